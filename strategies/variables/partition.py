"""Partitioners: number of parts, axis, and rows of each part.

A *partitioner* is a function from shape and dtype to one number of parts per axis, at most one of
them above 1. The sizes of parts differ by at most one row, larger parts first: 10 rows in 4 parts
are 3, 3, 2, 2.

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
    """Return a partitioner with `num_parts` parts, limited to the number of rows.

    Args:
        num_parts: number of parts, at least 1.
        axis: partitioned axis.
    """
    _positive("fixed_size", num_parts=num_parts)

    def partitioner(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        length = _length("fixed_size", shape, axis)
        # A variable of no rows still has one part.
        return _only(axis, min(num_parts, max(length, 1)), len(shape))

    return partitioner


def variable_axis_size(
    max_part_bytes: int, axis: int = 0, *, max_parts: int | None = None
) -> Partitioner:
    """Return a partitioner with parts of at most `max_part_bytes` bytes.

    Args:
        max_part_bytes: largest part in bytes, at least 1; a part has at least one slice of any
            size.
        axis: partitioned axis.
        max_parts: largest number of parts, even if parts exceed `max_part_bytes`.
    """
    _positive("variable_axis_size", max_part_bytes=max_part_bytes, max_parts=max_parts)

    def partitioner(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        length = _length("variable_axis_size", shape, axis)
        slice_bytes = _bytes(shape, dtype) // max(length, 1)
        # A slice larger than the limit gets a part of its own.
        slices = max(1, max_part_bytes // max(slice_bytes, 1))
        parts = max(1, -(-length // slices))
        return _only(axis, min(parts, max_parts or parts), len(shape))

    return partitioner


def min_max_variable(
    max_parts: int = 1, axis: int = 0, *, min_part_bytes: int = 256 << 10
) -> Partitioner:
    """Return a partitioner with parts of about `min_part_bytes` bytes or more.

    Args:
        max_parts: largest number of parts, at least 1.
        axis: partitioned axis.
        min_part_bytes: bytes per part, at least 1; the number of parts is rounded up.
    """
    _positive("min_max_variable", max_parts=max_parts, min_part_bytes=min_part_bytes)

    def partitioner(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
        length = _length("min_max_variable", shape, axis)
        # Rounded up, so a part may have as little as half of `min_part_bytes`.
        wished = -(-_bytes(shape, dtype) // min_part_bytes)
        return _only(axis, max(1, min(length, max_parts, wished)), len(shape))

    return partitioner


def fixed_shards(num_shards: int) -> Partitioner:
    """Return `fixed_size` along the first axis; a scalar stays whole."""
    return _along_rows(fixed_size(num_shards))


def min_size(min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> Partitioner:
    """Return `min_max_variable` along the first axis; a scalar stays whole."""
    return _along_rows(min_max_variable(max_shards, min_part_bytes=min_shard_bytes))


def max_size(max_shard_bytes: int, max_shards: int | None = None) -> Partitioner:
    """Return `variable_axis_size` along the first axis; a scalar stays whole."""
    return _along_rows(variable_axis_size(max_shard_bytes, max_parts=max_shards))


def checked(partition: Any, shape: Sequence[int]) -> list[int]:
    """Return the result of a partitioner after checking that it fits the shape.

    Raises:
        ValueError: the result is not one number >= 1 per axis, has several numbers above 1, or has
            more parts than rows.
    """
    listed = isinstance(partition, (list, tuple))
    whole = listed and all(isinstance(n, (int, np.integer)) and n >= 1 for n in partition)
    # As in TensorFlow, only one axis may be cut: `offsets` are bounds along one axis.
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
    """Return the partitioned axis; 0 for a whole variable."""
    return next((axis for axis, parts in enumerate(partition) if parts > 1), 0)


def offsets(shape: Sequence[int], partition: Sequence[int]) -> tuple[int, ...]:
    """Return the first index of each part along the axis, and the end of the last part."""
    if not shape:
        # A scalar is one part, with one row in this sense.
        return (0, 1)
    axis = axis_of(partition)
    # The first `longer` parts have one row more.
    size, longer = divmod(shape[axis], partition[axis])
    return tuple(size * part + min(part, longer) for part in range(partition[axis] + 1))


def check_shape(operation: str, array: npt.NDArray[Any], shape: Sequence[int], name: str) -> None:
    """Check that a value has the shape of its variable.

    Raises:
        InvalidArgumentError: the shapes differ.
    """
    if array.shape != tuple(shape):
        raise InvalidArgumentError(
            f"{operation}: the value has the wrong shape, expected {tuple(shape)}, got "
            f"{tuple(array.shape)} (variable: {name})"
        )


def pieces(array: npt.NDArray[Any], ends: Sequence[int], axis: int = 0) -> list[npt.NDArray[Any]]:
    """Return the piece of an array for each part, as views; see `offsets`."""
    return np.split(array, ends[1:-1], axis) if len(ends) > 2 else [array]


def positions(indices: npt.NDArray[np.int64], ends: Sequence[int]) -> list[npt.NDArray[np.intp]]:
    """Return for each part the positions of its indices, in increasing order of index."""
    # Stable, because the last row of a duplicate index wins in `scatter_update`.
    order = np.argsort(indices, kind="stable")
    # Sorted indices of one part are adjacent, so two bounds per part suffice.
    cuts = np.searchsorted(indices[order], ends)
    return [order[low:high] for low, high in itertools.pairwise(cuts)]


def row_pieces(rows: Rows, ends: Sequence[int]) -> list[Rows]:
    """Return the rows of a gradient for each part, with indices relative to the part."""
    if len(ends) == 2:
        return [rows]
    values = np.asarray(rows.values)
    # `ends` has one entry more than there are parts.
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
