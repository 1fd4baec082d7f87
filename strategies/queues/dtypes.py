"""Dtypes of queue elements, and lossless conversion."""

from __future__ import annotations

from typing import Any

import numpy as np

from strategies.errors import InvalidArgumentError
from strategies.queues.store import Array
from strategies.rpc.wire import is_numeric

__all__ = ["DType", "as_array", "as_dtype", "boxed_rows", "dtype_of", "padded_rows", "scalar_types"]

DType = np.dtype[Any] | type[str] | type[bytes]
"""A NumPy dtype of fixed size, or `str` / `bytes` for components that are Python objects."""


def dtype_of(values: Any) -> DType:
    """Return the component dtype that holds `values`, an array or array-like."""
    array = np.asarray(values)
    if array.dtype == object and array.size:
        return as_dtype(type(array.flat[0]))
    return as_dtype(array.dtype)


def as_dtype(dtype: Any) -> DType:
    """Return the component dtype of an argument, in this machine's byte order.

    Raises:
        TypeError: the dtype is neither numeric nor text.
    """
    if dtype in (str, bytes):
        return str if dtype is str else bytes
    known = np.dtype(dtype)
    if known.kind in "US":
        return str if known.kind == "U" else bytes
    if not is_numeric(known):
        raise TypeError(f"queue: dtype must be numeric, str or bytes, got {dtype!r}")
    # The wire format has no byte order.
    native: DType = known.newbyteorder("=")
    return native


def scalar_types(dtype: DType) -> tuple[type, ...]:
    """Return the types of scalars that need no conversion before they are stored in an array.

    The first type also needs none before it is stored as an object.
    """
    if not isinstance(dtype, np.dtype):
        return (dtype,)
    # A Python float is rounded on assignment. A Python int may not fit, so `as_array` checks it.
    return (dtype.type, float) if dtype.kind == "f" else (dtype.type,)


def as_array(operation: str, index: int, value: Any, dtype: DType, *, copy: bool = False) -> Array:
    """Return `value` as an array of a component's dtype, without conversion between kinds.

    Args:
        operation: name of the operation, for errors.
        index: index of the component, for errors.
        value: array, number, text, or nested lists of them.
        dtype: dtype of the component.
        copy: whether the array must not share memory with `value`.

    Raises:
        InvalidArgumentError: the value is of another kind, or too large.
    """
    if not isinstance(dtype, np.dtype):
        return _as_objects(operation, index, value, dtype, copy=copy)
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{operation}: component {index} is not an array: {error}"
        ) from None
    if array.dtype != dtype:
        # Arrays have a dtype that must match; Python's numbers and lists take the queue's dtype.
        exact = isinstance(value, (np.ndarray, np.generic))
        whole = array.dtype.kind in "iu" and dtype.kind in "iu"  # the range is checked below
        kind = whole or np.can_cast(array.dtype, dtype, "same_kind")
        if array.size and (exact or not kind):
            raise InvalidArgumentError(
                f"{operation}: dtype of component {index}, expected {dtype}, got {array.dtype}"
            )
        # `astype` wraps integers that do not fit; the comparison below detects it.
        converted = array.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(converted, array):
            raise InvalidArgumentError(
                f"{operation}: component {index} does not fit {dtype}, got {value!r:.80}"
            )
        return converted
    return array.copy() if copy else array


def _as_objects(
    operation: str, index: int, value: Any, dtype: type[str] | type[bytes], *, copy: bool
) -> Array:
    """Return an object array whose elements are exactly `str`, or exactly `bytes`."""
    array = np.array(value, dtype=object) if copy else np.asarray(value, dtype=object)
    for element in array.flat:
        if type(element) is not dtype:
            if isinstance(element, dtype):  # np.str_ and np.bytes_
                # `tolist` turns NumPy's text scalars into Python's.
                return _as_objects(operation, index, np.array(value).tolist(), dtype, copy=copy)
            raise InvalidArgumentError(
                f"{operation}: dtype of component {index}, expected {dtype.__name__}, "
                f"got {type(element).__name__}"
            )
    return array


def boxed_rows(column: Array) -> Array:
    """Return the rows of an array as the elements of an object array."""
    # Filled row by row: `np.array(rows, object)` would make an array of more axes.
    boxes = np.empty(len(column), object)
    for index, row in enumerate(column):
        boxes[index] = row
    return boxes


def padded_rows(boxes: Array, shape: tuple[int | None, ...], dtype: DType) -> Array:
    """Return rows of different sizes as one array, padded at the end with 0, False or "".

    Args:
        boxes: object array of the rows.
        shape: common shape of the rows. Dimensions of None get the largest size of this batch, or 0
            without rows.
        dtype: dtype of the rows.
    """
    sizes = [
        max((row.shape[axis] for row in boxes), default=0) if size is None else size
        for axis, size in enumerate(shape)
    ]
    if isinstance(dtype, np.dtype):
        batch = np.zeros((len(boxes), *sizes), dtype)
    else:
        batch = np.full((len(boxes), *sizes), dtype(), object)
    for index, row in enumerate(boxes):
        place: tuple[slice, ...] = tuple(slice(size) for size in row.shape)
        # Padding goes at the end of every axis, as TensorFlow's `PaddingFIFOQueue` does.
        batch[index][place] = row
    return batch
