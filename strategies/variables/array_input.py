"""Arrays given by callers, of any library, copied where necessary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.core import array_ops
from strategies.errors import InvalidArgumentError
from strategies.rpc.wire import Array, is_numeric

__all__ = ["to_host", "take_ownership"]


def to_host(value: Any, operation: str, name: str) -> Array:
    """Return an array in host memory, of whatever library.

    Raises:
        TypeError: it is on a device, or of objects.
        InvalidArgumentError: it is not one of numbers.
    """
    array = array_ops.host(value) if hasattr(value, "__dlpack_device__") else np.asarray(value)
    if array is None:
        raise TypeError(
            f"{operation}: the array is on a device, expected one in host memory, got "
            f"{type(value).__name__} (variable: {name})"
        )
    if array.dtype.hasobject:
        raise TypeError(
            f"{operation}: not an array of numbers, got {type(value).__name__} (variable: {name})"
        )
    if not is_numeric(array.dtype):
        raise InvalidArgumentError(
            f"{operation}: not an array of numbers, got {array.dtype} (variable: {name})"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def take_ownership(make: Callable[[], npt.ArrayLike], dtype: npt.DTypeLike) -> Array:
    """Call a function that makes an array, and return that, or a copy if others see its memory.

    So an array of the caller's does not change when a variable does, and one that was made for the
    variable costs no copy.
    """
    made: list[Array] = [np.require(make(), dtype, ["C", "W", "O", "E"])]
    return made.pop() if sys.getrefcount(made[0]) <= _ALONE else made[0].copy()


def _alone() -> int:
    """Return how many references Python counts to an array in a list, and nowhere else."""
    made = [np.empty(1)]
    return sys.getrefcount(made[0])


_ALONE = _alone()
