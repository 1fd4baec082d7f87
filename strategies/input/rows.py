"""Where a queue keeps its rows: growing arrays, so that batches are copied as wholes.

A *row* is one element of a queue, a tuple of components; *columns* are several rows, one array per
component whose first dimension counts the rows. Everything that is put in is copied, everything
that is taken out belongs to the taker. A component of objects (text, or arrays of unknown shape)
lives in an object array of the same kind.

Stores know nothing of locks, limits or closing: that is the business of `attempts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Columns", "FifoRows", "RowStore", "ShuffledRows"]

Array = npt.NDArray[Any]
Columns = tuple[Array, ...]

_FIRST_ROWS = 16  # rows of a new store; doubled whenever it is full


class RowStore(ABC):
    """Rows with a defined order of leaving; `len()` counts them.

    Args:
        dtypes: dtype per component.
        shapes: shape per component, without the dimension that counts rows.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> None:
        self._size = 0
        self._room = _FIRST_ROWS
        self._columns = [
            np.empty((self._room, *shape), dtype)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        self._objects = [column for column in self._columns if column.dtype == object]

    def __len__(self) -> int:
        return self._size

    @abstractmethod
    def append_row(self, row: Sequence[Any]) -> None:
        """Add one row as the youngest."""

    @abstractmethod
    def append(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows `start` to `stop` of `columns` as the youngest, in that order."""

    @abstractmethod
    def take_row(self) -> tuple[Any, ...]:
        """Remove the next row; components of shape () come as scalars or Python objects."""

    @abstractmethod
    def take(self, count: int) -> Columns:
        """Remove the next `count` rows; there must be as many."""

    @abstractmethod
    def put_back(self, columns: Columns) -> None:
        """Give back rows that were taken, so that they are next again where the order says so."""

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
    """Rows leave in the order of their arrival: a ring, so that a batch is one or two slices."""

    _head = 0

    def append_row(self, row: Sequence[Any]) -> None:
        """Add one row at the end."""
        if self._size == self._room:
            self._reserve(1)
        place = (self._head + self._size) % self._room
        for column, component in zip(self._columns, row):  # noqa: B905 (checked before, hot)
            column[place] = component
        self._size += 1

    def append(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows at the end, in at most two copies per component."""
        self._reserve(stop - start)
        self._write(self._head + self._size, columns, start, stop)
        self._size += stop - start

    def take_row(self) -> tuple[Any, ...]:
        """Remove the oldest row."""
        head = self._head
        row = tuple([c[head].copy() if c.ndim > 1 else c[head] for c in self._columns])
        for column in self._objects:
            column[head] = None
        self._advance(1)
        return row

    def take(self, count: int) -> Columns:
        """Remove the oldest `count` rows."""
        head, end = self._head, self._head + count
        if end <= self._room:
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
        """Give back rows to the front; the first row of `columns` is then next."""
        count = len(columns[0])
        self._reserve(count)
        self._head = (self._head - count) % self._room
        self._write(self._head, columns, 0, count)
        self._size += count

    def _advance(self, count: int) -> None:
        self._size -= count
        # An empty ring starts anew, so that a queue that is mostly empty stays in the cache.
        self._head = (self._head + count) % self._room if self._size else 0

    def _reserve(self, count: int) -> None:
        if self._size + count > self._room:
            self._grow((self._head + np.arange(self._size)) % self._room, self._size + count)
            self._head = 0

    def _write(self, place: int, columns: Columns, start: int, stop: int) -> None:
        place %= self._room
        split = min(stop, start + self._room - place)
        for column, source in zip(self._columns, columns, strict=True):
            column[place : place + split - start] = source[start:split]
            if split < stop:
                column[: stop - split] = source[split:stop]


class ShuffledRows(RowStore):
    """Every row that is present is equally likely to leave next.

    One random number in [0, 1) is used per row that leaves, and the last row takes the place of the
    one that left: the order depends on the seed and on which rows are present at each removal, not
    on how many are taken at a time.

    Args:
        dtypes: dtype per component.
        shapes: shape per component, without the dimension that counts rows.
        seed: of the order; None for a different one each time.
    """

    def __init__(
        self,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        seed: int | None,
    ) -> None:
        super().__init__(dtypes, shapes)
        self._random = np.random.default_rng(seed).random
        self._present: list[int] = []  # places of the rows, in the order that the draws refer to
        self._free = list(range(self._room))

    def append_row(self, row: Sequence[Any]) -> None:
        """Add one row."""
        if not self._free:
            self._reserve(1)
        place = self._free.pop()
        for column, component in zip(self._columns, row):  # noqa: B905 (checked before, hot)
            column[place] = component
        self._present.append(place)
        self._size += 1

    def append(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows; the order says only which draw finds them."""
        count = stop - start
        self._reserve(count)
        if count == 1:
            places: Any = self._free.pop()
            self._present.append(places)
            start_rows: Any = start
        else:
            places = self._free[-count:]
            del self._free[-count:]
            self._present.extend(places)
            start_rows = slice(start, stop)
        for column, source in zip(self._columns, columns, strict=True):
            column[places] = source[start_rows]
        self._size += count

    def take_row(self) -> tuple[Any, ...]:
        """Remove a row at random."""
        (place,) = self._draw(1)
        row = tuple([c[place].copy() if c.ndim > 1 else c[place] for c in self._columns])
        for column in self._objects:
            column[place] = None
        return row

    def take(self, count: int) -> Columns:
        """Remove `count` rows at random, one draw after the other."""
        places = self._draw(count)
        taken = tuple([column[places] for column in self._columns])
        for column in self._objects:
            column[places] = None
        return taken

    def put_back(self, columns: Columns) -> None:
        """Add the rows again: an order that is random has no front."""
        self.append(columns, 0, len(columns[0]))

    def _draw(self, count: int) -> list[int]:
        present = self._present
        size = self._size
        places = []
        numbers = (self._random(),) if count == 1 else self._random(count).tolist()
        for number in numbers:
            index = int(number * size)
            size -= 1
            places.append(present[index])
            present[index] = present[size]
            present.pop()
        self._size = size
        self._free.extend(places)
        return places

    def _reserve(self, count: int) -> None:
        if count > len(self._free):
            self._grow(self._present, self._size + count)
            self._present = list(range(self._size))
            self._free = list(range(self._size, self._room))
