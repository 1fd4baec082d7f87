"""Row storage for shuffling and priority queues."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.queues.store import Columns, RowStore

__all__ = ["SlotStore", "PriorityStore", "ShuffledStore"]


class SlotStore(RowStore):
    """Rows at free places of the columns; subclasses keep their order."""

    def __init__(self, dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(dtypes, shapes)
        self._free = list(range(self._room))

    def append_row(self, row: Sequence[Any]) -> None:
        """Add one row."""
        self._reserve(1)
        place = self._free.pop()
        for column, component in zip(self._columns, row):  # noqa: B905 (checked before, hot)
            column[place] = component
        self.size += 1
        # After the row is stored, because `PriorityStore` reads the priority from it.
        self._enter([place])

    def append(self, columns: Columns, start: int, stop: int) -> None:
        """Add rows in order."""
        self._enter(self._store(columns, start, stop))

    def take_row(self) -> tuple[Any, ...]:
        """Remove the next row."""
        (place,) = self._leave(1)
        row = tuple([c[place].copy() if c.ndim > 1 else c[place] for c in self._columns])
        for column in self._objects:
            column[place] = None
        self._free.append(place)
        self.size -= 1
        return row

    def take(self, count: int) -> Columns:
        """Remove the next `count` rows in order."""
        places = self._leave(count)
        # Indexing by a list copies, so the rows belong to the caller.
        taken = tuple([column[places] for column in self._columns])
        for column in self._objects:
            column[places] = None
        self._free.extend(places)
        self.size -= count
        return taken

    @abstractmethod
    def _enter(self, places: list[int]) -> None:
        """Record that rows are now at these places."""

    @abstractmethod
    def _leave(self, count: int) -> list[int]:
        """Choose the next rows, remove them from the order, and return their places."""

    @abstractmethod
    def _move(self) -> list[int]:
        """Return the places of all rows. From then on row `i` of them is at place `i`."""

    def _store(self, columns: Columns, start: int, stop: int) -> list[int]:
        """Copy rows to free places and return the places."""
        count = stop - start
        self._reserve(count)
        places = self._free[-count:]
        del self._free[-count:]
        for column, source in zip(self._columns, columns, strict=True):
            # A list of one place would need an array of indices.
            if count == 1:
                column[places[0]] = source[start]
            else:
                column[places] = source[start:stop]
        self.size += count
        return places

    def _reserve(self, count: int) -> None:
        if count > len(self._free):
            self._grow(self._move(), self.size + count)
            # Rows are now at 0 .. size - 1, as `_move` promises.
            self._free = list(range(self.size, self._room))


class ShuffledStore(SlotStore):
    """Rows in random order: each present row is equally likely to leave next.

    Each removed row uses one random number in [0, 1), and the last row takes its place. So the
    order depends on the seed and on the rows present at each removal, but not on the batch size.

    Args:
        dtypes: as for `RowStore`.
        shapes: as for `RowStore`.
        seed: seed of the order; None for a different one each time.
    """

    def __init__(
        self,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        seed: int | None,
    ) -> None:
        super().__init__(dtypes, shapes)
        self._random = np.random.default_rng(seed).random
        self._present: list[int] = []  # places of the rows, indexed by the random draws

    def put_back(self, columns: Columns) -> None:
        """Add the rows like new ones, because a random order has no front."""
        self.append(columns, 0, len(columns[0]))

    def _enter(self, places: list[int]) -> None:
        self._present.extend(places)

    def _leave(self, count: int) -> list[int]:
        present = self._present
        size = len(present)
        places = []
        # `Generator.random(n)` draws the same numbers as n single draws, so the order does not
        # depend on the batch size.
        numbers = (self._random(),) if count == 1 else self._random(count).tolist()
        for number in numbers:
            index = int(number * size)
            size -= 1
            places.append(present[index])
            # The last row fills the gap, which takes constant time in a list.
            present[index] = present[size]
            present.pop()
        return places

    def _move(self) -> list[int]:
        places, self._present = self._present, list(range(self.size))
        return places


class PriorityStore(SlotStore):
    """Rows by increasing first component; equal ones in the order of arrival."""

    def __init__(self, dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(dtypes, shapes)
        self._heap: list[tuple[int, int, int]] = []  # priority, arrival, place
        self._first = self._last = 0  # arrival numbers; returned rows count down from `_first`

    def put_back(self, columns: Columns) -> None:
        """Put rows back, before all others of the same priority."""
        count = len(columns[0])
        # Arrival numbers below all others, so that returned rows are first among equal priorities.
        self._first -= count
        self._push(self._store(columns, 0, count), self._first)

    def _enter(self, places: list[int]) -> None:
        self._push(places, self._last)
        self._last += len(places)

    def _push(self, places: list[int], arrival: int) -> None:
        priorities = self._columns[0]
        for number, place in enumerate(places, arrival):
            heapq.heappush(self._heap, (int(priorities[place]), number, place))

    def _leave(self, count: int) -> list[int]:
        return [heapq.heappop(self._heap)[2] for _ in range(count)]

    def _move(self) -> list[int]:
        places = [place for _, _, place in self._heap]
        keys = [(priority, arrival) for priority, arrival, _ in self._heap]
        # Still a heap: pairs of priority and arrival are unique, so places are never compared.
        self._heap = [(*key, place) for place, key in enumerate(keys)]
        return places
