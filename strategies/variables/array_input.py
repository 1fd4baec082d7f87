"""Array arguments of any library, copied where necessary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives import extend
from strategies.core import array_ops
from strategies.errors import InvalidArgumentError
from strategies.rpc.wire import Array, is_numeric

__all__ = ["to_host", "take_ownership"]


def to_host(value: Any, operation: str, name: str) -> Array:
    """Return an array of any library as a NumPy array in host memory.

    Raises:
        TypeError: the array is on a device or contains objects.
        InvalidArgumentError: the array is not numeric.
    """
    # Without a copy if possible: arrays of other libraries share their memory by DLPack.
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
    # The wire format has no byte order.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def take_ownership(make: Callable[[], npt.ArrayLike], dtype: npt.DTypeLike) -> Array:
    """Call `make` and return its array, or a copy if other references to it exist.

    Later updates then do not change an array of the caller, and a new array is not copied.
    """
    # O and E: views then refer to this array itself, and its reference count shows whether any
    # exist. In a list, because a local name would count as well.
    made: list[Array] = [np.require(make(), dtype, ["C", "W", "O", "E"])]
    return made[0].copy() if extend.is_referenced_elsewhere(made[0]) else made[0]
