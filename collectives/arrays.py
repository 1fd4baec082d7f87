"""What callers hand in, seen as flat host memory, and results handed back in their shape.

Algorithms work on one kind of thing only: a one-dimensional, contiguous, writable NumPy array.
This module is the border: strides, read-only memory, scalars and `out=` end here.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["Array", "as_array", "check_out", "flat_copy", "is_float", "raw_bytes", "store"]

Array = npt.NDArray[Any]

# Kinds of NumPy dtypes that have an arithmetic meaning on every rank: bool, integers, floats,
# complex. Objects, text, dates and records have no bytes that could be reduced.
_NUMERIC_KINDS = "biufc"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def as_array(x: Any, *, operation: str) -> Array:
    """View `x` as a NumPy array of a numeric dtype in native byte order.

    Args:
        x: a NumPy array of any strides, a Python number or a nested sequence of numbers.
        operation: the caller's name, for the error message.

    Returns:
        An array that shares memory with `x` where `x` is an array already.

    Raises:
        TypeError: `x` lives on a device, or its dtype is no number.
    """
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(
            f"{operation}: device arrays are not supported yet, expected a NumPy array, "
            f"got {type(x).__module__}.{type(x).__name__}"
        )
    array = np.asarray(x)
    if array.dtype.kind not in _NUMERIC_KINDS and array.dtype != _BFLOAT16:
        raise TypeError(
            f"{operation}: this dtype cannot be sent, expected bool, integers, floats or complex, "
            f"got {array.dtype}"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tell whether the dtype is a real floating-point one, bfloat16 included."""
    return dtype.kind == "f" or dtype == _BFLOAT16


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, operation: str) -> None:
    """Check that `out=` can take a result.

    Raises:
        TypeError: `out` is no NumPy array or has another dtype.
        ValueError: `out` has another shape, or is read-only.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{operation}: out is no NumPy array, got {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"{operation}: out has the wrong dtype, expected {dtype}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"{operation}: out has the wrong shape, expected {shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError(f"{operation}: out is read-only")


def flat_copy(array: Array, out: Array | None, dtype: np.dtype[Any]) -> Array:
    """Copy `array` into the buffer that an algorithm will work in.

    The memory of `out` serves where it is contiguous and of the right dtype, so that an in-place
    call copies nothing.

    Args:
        array: shape (...), any strides.
        out: where the result is wanted, of the shape of `array`, or None.
        dtype: the dtype that the algorithm computes in.

    Returns:
        shape (array.size,), contiguous, writable.
    """
    if out is not None and out.flags.c_contiguous and out.dtype == dtype:
        if out is not array:
            np.copyto(out, array)
        return out.reshape(-1)
    flat = np.empty(array.size, dtype)
    flat.reshape(array.shape)[...] = array
    return flat


def store(flat: Array, shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None) -> Array:
    """Give the algorithm's flat result the caller's shape and dtype, in `out` if there is one."""
    shaped = flat.reshape(shape)
    if out is None:
        return shaped.astype(dtype, copy=False)
    if not np.shares_memory(shaped, out):
        out[...] = shaped
    return out


def raw_bytes(array: Array) -> Array:
    """View a contiguous array as bytes: shape (array.nbytes,), uint8, the same memory."""
    return array.reshape(-1).view(np.uint8)
