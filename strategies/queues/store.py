"""Row storage for FIFO queues: growing arrays, dequeued as whole batches.

A *row* is one element of a queue, a tuple of components. *Columns* are several rows: one array per
component, whose first dimension counts the rows. Added rows are copied; removed rows belong to the
caller. Objects (text, or arrays of unknown shape) are stored in object arrays.

Stores do not handle locks, limits or closing; `state_machine` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Columns", "FifoRows", "RowStore"]

Array = npt.NDArray[Any]
Columns = tuple[Array, ...]

_FIRST_ROWS = 16  # rows of a new store; doubled when it is full


class RowStore(ABC):
    """Rows with a defined order of removal.

    Args:
        dtypes: dtype per component.
        shapes: shape per component, without the dimension that counts rows.

    Attributes:
        size: number of rows; an attribute rather than a method, because queues read it often.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> None:
        self.size = 0
        self._room = _FIRST_ROWS
        self._columns = [
            np.empty((self._room, *shape), dtype)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        # Columns that must drop their references to removed rows, which would keep arrays alive.
        self._objects = [column for column in self._columns if column.dtype == object]

    @abstractmethod
    def append_row(self, row: Sequence[Any]) -> None:
        """Add one row as the newest."""

    @abstractmethod
    def append(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows `start` to `stop` of `columns` as the newest, in that order."""

    @abstractmethod
    def take_row(self) -> tuple[Any, ...]:
        """Remove and return the next row; components of shape () are scalars or Python objects."""

    @abstractmethod
    def take(self, count: int) -> Columns:
        """Remove and return the next `count` rows; the store must have this many."""

    @abstractmethod
    def put_back(self, columns: Columns) -> None:
        """Put removed rows back, so that they are next again if the order defines that."""

    def _grow(self, order: Any, wanted: int) -> None:
        """Double the room until it holds `wanted` rows; row `order[i]` moves to place `i`."""
        while self._room < wanted:
            self._room *= 2
        grown = []
        for old in self._columns:
            new = np.empty((self._room, *old.shape[1:]), old.dtype)
            new[: len(order)] = old[order]
            grown.append(new)
        self._columns = grown
        self._objects = [column for column in grown if column.dtype == object]


class FifoRows(RowStore):
    """Rows in order of arrival, as a ring, so that a batch is one or two slices."""

    _head = 0

    def append_row(self, row: Sequence[Any]) -> None:
        """Add one row at the end."""
        if self.size == self._room:
            # Compared here as well, to save a call for every row.
            self._reserve(1)
        place = (self._head + self.size) % self._room
        for column, component in zip(self._columns, row):  # noqa: B905 (checked before, hot)
            column[place] = component
        self.size += 1

    def append(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows at the end, in at most two copies per component."""
        self._reserve(stop - start)
        self._write(self._head + self.size, columns, start, stop)
        self.size += stop - start

    def take_row(self) -> tuple[Any, ...]:
        """Remove and return the oldest row."""
        head = self._head
        # Indexing an array of more axes gives a view, whose memory the next row overwrites.
        row = tuple([c[head].copy() if c.ndim > 1 else c[head] for c in self._columns])
        for column in self._objects:
            column[head] = None
        self._advance(1)
        return row

    def take(self, count: int) -> Columns:
        """Remove and return the oldest `count` rows."""
        head, end = self._head, self._head + count
        if end <= self._room:
            # A copy, because the batch belongs to the caller and the ring is reused.
            taken = tuple([column[head:end].copy() for column in self._columns])
            for column in self._objects:
                column[head:end] = None
        else:
            end -= self._room
            parts = [(column[head:], column[:end]) for column in self._columns]
            taken = tuple([np.concatenate(part) for part in parts])
            for column in self._objects:
                column[head:] = None
                column[:end] = None
        self._advance(count)
        return taken

    def put_back(self, columns: Columns) -> None:
        """Put rows back at the front; the first row of `columns` is then next."""
        count = len(columns[0])
        self._reserve(count)
        # Before the head, after growing: `_reserve` moves the head to 0.
        self._head = (self._head - count) % self._room
        self._write(self._head, columns, 0, count)
        self.size += count

    def _advance(self, count: int) -> None:
        self.size -= count
        # An empty ring restarts at 0, so that a mostly empty queue stays in the cache.
        self._head = (self._head + count) % self._room if self.size else 0

    def _reserve(self, count: int) -> None:
        if self.size + count > self._room:
            self._grow((self._head + np.arange(self.size)) % self._room, self.size + count)
            self._head = 0

    def _write(self, place: int, columns: Columns, start: int, stop: int) -> None:
        # A range may wrap around the end of the ring once.
        place %= self._room
        split = min(stop, start + self._room - place)
        for column, source in zip(self._columns, columns, strict=True):
            column[place : place + split - start] = source[start:split]
            if split < stop:
                column[: stop - split] = source[split:stop]
