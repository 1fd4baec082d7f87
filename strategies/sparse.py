"""Gradients of large variables of which a step has used a few rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies import arrays

__all__ = ["Rows", "in_order"]


@dataclass(frozen=True, eq=False)
class Rows:
    """A gradient that is zero but for some rows.

    It stands for an array of zeros to which every row is added at its index, so that rows of one
    index are summed. What `Communicator.sparse_allreduce` returns are its two fields.

    Attributes:
        indices: shape (k,), integers >= 0 in host memory, in any order; kept as int64.
        values: shape (k, ...), a row of the variable for each index, in the variable's memory.

    Example:
        >>> import strategies
        >>> table = np.zeros((4, 2))
        >>> rows = strategies.Rows([3, 0, 3], np.ones((3, 2)))
        >>> strategies.SGD(0.5).apply_gradients([(rows, table)])
        >>> table[:, 0].tolist()
        [-0.5, 0.0, 0.0, -1.0]
    """

    indices: Any
    values: Any

    def __post_init__(self) -> None:
        indices = np.asarray(self.indices)
        # An empty list is one of floats, and beside int64 uint64 becomes one, too.
        if indices.dtype.kind in "iu" or not indices.size:
            indices = indices.astype(np.int64, copy=False)
        object.__setattr__(self, "indices", indices)


def in_order(rows: Rows, operation: str, where: str, *, length: int | None = None) -> Rows:
    """Check rows, and return them by increasing index, those of one index summed.

    Args:
        rows: as a user gave them, with values that are an array; they are not changed.
        operation: beginning of a message.
        where: end of a message.
        length: number of rows of the variable, if known.

    Returns:
        Rows whose indices are int64 without repetition. Where any were summed, 16-bit floats have
        become float32.

    Raises:
        TypeError: the indices are no integers.
        ValueError: there is not an index for every row, or one is out of range.

    Order: of a summation, fixed by the order of the rows.
    """
    indices, values = rows.indices, rows.values
    if indices.dtype != np.int64:
        raise TypeError(f"{operation}: indices are no integers, got {indices.dtype} ({where})")
    shape = tuple(values.shape)
    if indices.ndim != 1 or indices.shape != shape[:1]:
        raise ValueError(
            f"{operation}: expected an index for every row, got shapes {indices.shape} and "
            f"{shape} ({where})"
        )
    if indices.size and (indices.min() < 0 or (length is not None and indices.max() >= length)):
        raise ValueError(
            f"{operation}: an index is out of range, expected 0 .. "
            f"{'any' if length is None else length - 1}, got {indices.min()} .. {indices.max()} "
            f"({where})"
        )
    indices = indices.copy()
    if np.all(indices[1:] > indices[:-1]):
        return Rows(indices, values)
    return _summed(indices, values)


def _summed(indices: npt.NDArray[np.int64], values: Any) -> Rows:
    """Sort rows, and add neighbours of one index two by two until there are none."""
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], arrays.take(values, order)
    while np.any(same := indices[1:] == indices[:-1]):
        values = arrays.wide(values)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        lengths = np.diff(starts, append=len(indices))
        second = (np.arange(len(indices)) - np.repeat(starts, lengths)) % 2 == 1
        right, kept = np.flatnonzero(second), np.flatnonzero(~second)
        sums = arrays.take(values, right - 1) + arrays.take(values, right)
        arrays.put(values, right - 1, sums)
        indices, values = indices[kept], arrays.take(values, kept)
    return Rows(indices, values)
