"""Buffers of plans: caller memory that must outlast the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import Array, address
from collectives.calls.call import Call

__all__ = ["check_out", "pin", "output"]


def pin(call: Call, x: Any) -> Array:
    """Return the memory of a caller's array, which later calls go to.

    Raises:
        TypeError, ValueError: it is not host memory that can be written, or not contiguous.
    """
    like = host_arrays.host_view(x, operation=call.operation).host
    array, _ = host_arrays.check_out(x, like.shape, like.dtype, operation=call.operation)
    if array is None:
        raise TypeError(
            f"{call.operation}: the array must be in host memory, "
            f"got {type(x).__module__}.{type(x).__name__}"
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{call.operation}: the array is not contiguous, got strides {array.strides} of shape "
            f"{array.shape}"
        )
    return array


def check_out(call: Call, out: Any, target: Array | None) -> None:
    """Refuse an `out` that no call can write into as it is."""
    if out is not None and target is None:
        raise TypeError(
            f"{call.operation}: out must be in host memory, "
            f"got {type(out).__module__}.{type(out).__name__}"
        )
    if target is not None and not target.flags.c_contiguous:
        raise ValueError(
            f"{call.operation}: out is not contiguous, got strides {target.strides} of shape "
            f"{target.shape}"
        )


def output(
    call: Call,
    target: Array | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    source: Array,
    before: int,
) -> tuple[Array, Array]:
    """As `host_arrays.output`, of memory that is the target's.

    Raises:
        ValueError: it is in use.
    """
    result, flat = host_arrays.output(target, shape, dtype, source, before)
    if flat.size and address(flat) != address(result):
        raise ValueError(f"{call.operation}: out and the array share memory at other places")
    return result, flat
