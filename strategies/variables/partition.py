"""Partitioners: number of parts, axis, and rows of each part.

A *partitioner* is a function from shape and dtype to one number of parts per axis, at most one of
them above 1. Parts differ by one row at most, the longer ones first: 10 rows in 4 parts are 3, 3,
2, 2.

Example:
    >>> partition = fixed_size(3)((10, 4), np.dtype(np.float32))
    >>> partition, offsets((10, 4), partition)
    ([3, 1], (0, 4, 7, 10))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError

__all__ = [
    "Partitioner",
    "axis_of",
    "check_shape",
    "checked",
    "fixed_shards",
    "fixed_size",
    "max_size",
    "min_max_variable",
    "min_size",
    "offsets",
    "pieces",
    "positions",
    "row_pieces",
    "variable_axis_size",
]

Partitioner = Callable[[Sequence[int], np.dtype[Any]], list[int]]


def fixed_size(num_parts: int, axis: int = 0) -> Partitioner:
    """Return a partitioner into so many parts, or as many as there are rows.

    Args:
        num_parts: at least 1.
        axis: that is cut.
    """
    _positive("fixed_size", num_parts=num_parts)

    def partitioner(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        length = _length("fixed_size", shape, axis)
        return _only(axis, min(num_parts, max(length, 1)), len(shape))

    return partitioner


def variable_axis_size(
    max_part_bytes: int, axis: int = 0, *, max_parts: int | None = None
) -> Partitioner:
    """Return a partitioner into parts of at most so many bytes.

    Args:
        max_part_bytes: at least 1; a part has one slice at least, however large that is.
        axis: that is cut.
        max_parts: there are no more parts, even if they get larger.
    """
    _positive("variable_axis_size", max_part_bytes=max_part_bytes, max_parts=max_parts)

    def partitioner(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        length = _length("variable_axis_size", shape, axis)
        slice_bytes = _bytes(shape, dtype) // max(length, 1)
        slices = max(1, max_part_bytes // max(slice_bytes, 1))
        parts = max(1, -(-length // slices))
        return _only(axis, min(parts, max_parts or parts), len(shape))

    return partitioner


def min_max_variable(
    max_parts: int = 1, axis: int = 0, *, min_part_bytes: int = 256 << 10
) -> Partitioner:
    """Return a partitioner into parts of at least so many bytes.

    Args:
        max_parts: at least 1.
        axis: that is cut.
        min_part_bytes: at least 1.
    """
    _positive("min_max_variable", max_parts=max_parts, min_part_bytes=min_part_bytes)

    def partitioner(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        length = _length("min_max_variable", shape, axis)
        wished = -(-_bytes(shape, dtype) // min_part_bytes)
        return _only(axis, max(1, min(length, max_parts, wished)), len(shape))

    return partitioner


def fixed_shards(num_shards: int) -> Partitioner:
    """Return `fixed_size` along the first axis; a variable without axes stays whole."""
    return _along_rows(fixed_size(num_shards))


def min_size(min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> Partitioner:
    """Return `min_max_variable` along the first axis; a variable without axes stays whole."""
    return _along_rows(min_max_variable(max_shards, min_part_bytes=min_shard_bytes))


def max_size(max_shard_bytes: int, max_shards: int | None = None) -> Partitioner:
    """Return `variable_axis_size` along the first axis; a variable without axes stays whole."""
    return _along_rows(variable_axis_size(max_shard_bytes, max_parts=max_shards))


def checked(partition: Any, shape: Sequence[int]) -> list[int]:
    """Return what a partitioner has said, if it fits the shape.

    Raises:
        ValueError: there is not one number >= 1 for each axis, or more than one above 1, or there
            are more parts than rows.
    """
    listed = isinstance(partition, (list, tuple))
    whole = listed and all(isinstance(n, (int, np.integer)) and n >= 1 for n in partition)
    if not whole or len(partition) != len(shape) or sum(n > 1 for n in partition) > 1:
        raise ValueError(
            f"partition: expected one number >= 1 for each of {len(shape)} axes, at most one of "
            f"them above 1, got {partition!r}"
        )
    if any(n > max(length, 1) for n, length in zip(partition, shape, strict=True)):
        raise ValueError(
            f"partition: there are more parts than rows, expected at most {tuple(shape)}, got "
            f"{partition}"
        )
    return [int(n) for n in partition]


def axis_of(partition: Sequence[int]) -> int:
    """Return the axis that is cut; 0 if none is."""
    return next((axis for axis, parts in enumerate(partition) if parts > 1), 0)


def offsets(shape: Sequence[int], partition: Sequence[int]) -> tuple[int, ...]:
    """Return where along the axis each part begins, and where the last one ends."""
    if not shape:
        return (0, 1)
    axis = axis_of(partition)
    size, longer = divmod(shape[axis], partition[axis])
    return tuple(size * part + min(part, longer) for part in range(partition[axis] + 1))


def check_shape(operation: str, array: npt.NDArray[Any], shape: Sequence[int], name: str) -> None:
    """Refuse a value of another shape than its variable of this name has.

    Raises:
        InvalidArgumentError: it has another one.
    """
    if array.shape != tuple(shape):
        raise InvalidArgumentError(
            f"{operation}: the value has the wrong shape, expected {tuple(shape)}, got "
            f"{tuple(array.shape)} (variable: {name})"
        )


def pieces(array: npt.NDArray[Any], ends: Sequence[int], axis: int = 0) -> list[npt.NDArray[Any]]:
    """Return what of an array lies in each part, as views; see `offsets`."""
    return np.split(array, ends[1:-1], axis) if len(ends) > 2 else [array]


def positions(indices: npt.NDArray[np.int64], ends: Sequence[int]) -> list[npt.NDArray[np.intp]]:
    """Return for each part where the indices of its rows are, by increasing index."""
    order = np.argsort(indices, kind="stable")
    cuts = np.searchsorted(indices[order], ends)
    return [order[low:high] for low, high in itertools.pairwise(cuts)]


def row_pieces(rows: Rows, ends: Sequence[int]) -> list[Rows]:
    """Return what of a gradient's rows lies in each part, by their indices there."""
    if len(ends) == 2:
        return [rows]
    values = np.asarray(rows.values)
    chosen = zip(positions(rows.indices, ends), ends, strict=False)
    return [Rows(rows.indices[where] - first, values[where]) for where, first in chosen]


def _along_rows(partitioner: Partitioner) -> Partitioner:
    def along_rows(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        return partitioner(shape, dtype) if len(shape) else []

    return along_rows


def _only(axis: int, parts: int, rank: int) -> list[int]:
    return [parts if at == axis else 1 for at in range(rank)]


def _length(operation: str, shape: Sequence[int], axis: int) -> int:
    if not 0 <= axis < len(shape):
        raise InvalidArgumentError(
            f"{operation}: no such axis, expected 0 .. {len(shape) - 1}, got {axis} "
            f"(shape: {tuple(shape)})"
        )
    return shape[axis]


def _bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _positive(operation: str, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{operation}: expected {name} >= 1, got {number}")
