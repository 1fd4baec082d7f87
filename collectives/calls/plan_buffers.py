"""Buffers of plans: caller memory that outlives the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import Array, address
from collectives.calls.call import Call

__all__ = ["check_out", "pin", "output"]


def pin(call: Call, x: Any) -> Array:
    """Return a caller's array as memory that later calls read or write.

    Raises:
        TypeError, ValueError: the array is not writable host memory, or not contiguous.
    """
    # Checked as an `out` of its own shape: later calls write to it or read it in place.
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
    """Raise an error unless later calls can write into `out` without a copy."""
    # A plan has no step that copies to a device.
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
    """Return the result and its flat view as `host_arrays.output`, but never a copy of `target`.

    Raises:
        ValueError: the target overlaps `source` at a different offset.
    """
    result, flat = host_arrays.output(target, shape, dtype, source, before)
    # Another address means that `host_arrays.output` would copy at the end of every call.
    if flat.size and address(flat) != address(result):
        raise ValueError(f"{call.operation}: out and the array share memory at other places")
    return result, flat
