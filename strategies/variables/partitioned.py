"""Variables in parts that live on several tasks, used as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.errors import InvalidArgumentError
from strategies.remote.wire import Array
from strategies.sparse import Rows
from strategies.variables import actions, many
from strategies.variables.items import (
    Reading,
    Update,
    gradient_item,
    host_array,
    packing,
    reading_of,
    spread,
    stepping,
    wanted_rows,
)
from strategies.variables.kind import KIND
from strategies.variables.many import Item
from strategies.variables.variable import SharedVariable

__all__ = ["PartitionedVariable"]


class PartitionedVariable:
    """An array in parts along one axis, each of which is a `SharedVariable`.

    Operations are those of `SharedVariable`, and reach all parts, or those that hold the rows, by
    one message to each task. The parts are changed one by one: a reading may have parts of
    different versions, which are therefore tuples, one for each part.

    Attributes:
        service: reaches the tasks.
        name: of the whole; the parts' names are `name/part_0` and so on.
        shape: of the whole.
        dtype: of the whole.
        axis: along which it is cut.
        offsets: where each part begins along the axis, and where the last one ends.
        parts: in their order.
    """

    def __init__(
        self,
        parts: Sequence[SharedVariable],
        *,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        axis: int,
        offsets: Sequence[int],
    ) -> None:
        self.service = parts[0].service
        self.parts = tuple(parts)
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.axis = axis
        self.offsets = tuple(offsets)

    def __repr__(self) -> str:
        return f"PartitionedVariable(name={self.name!r}, parts={len(self.parts)})"

    def is_initialized(self) -> bool:
        """Return whether all parts have values; does not wait for that."""
        return all(part.is_initialized() for part in self.parts)

    def read(
        self, *, compression: cc.Compression | None = cc.NONE, timeout: float | None = None
    ) -> Reading:
        """Return the whole value, and the version of each part."""
        options = packing(compression, "read")
        items = [Item(part.place, (), options) for part in self.parts]
        return self.joined([reading_of(o, options) for o in self._do("read", items, timeout)])

    def read_rows(
        self,
        start: int,
        stop: int,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> Reading:
        """Return the rows from `start` to before `stop`; only they travel."""
        if not 0 <= start <= stop:
            raise InvalidArgumentError(
                f"read_rows: expected 0 <= start <= stop, got {start} and {stop} "
                f"(variable: {self.name})"
            )
        options = packing(compression, "read_rows")
        items = []
        for part, (first, last) in zip(self.parts, itertools.pairwise(self.offsets), strict=True):
            low, high = (first, last) if self.axis == 0 else (0, stop)
            chosen = {"start": max(start - low, 0), "stop": max(min(stop, high) - low, 0)}
            items.append(Item(part.place, (), {**options, **chosen}))
        return self.joined([reading_of(o, options) for o in self._do("read", items, timeout)])

    def gather(
        self,
        indices: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> Reading:
        """Return the rows of these indices, of any shape: an embedding look-up.

        Only the rows travel, each of them once, and only the parts that hold some are asked; the
        version of the others is None.
        """
        wanted = wanted_rows(indices, self.name)
        unique, places = np.unique(wanted, return_inverse=True)
        options = packing(compression, "gather")
        cuts = self._cuts("gather", unique)
        asked = [n for n in range(len(self.parts)) if cuts[n] < cuts[n + 1]] or [0]
        items = [
            Item(
                self.parts[n].place,
                [unique[cuts[n] : cuts[n + 1]] - self.offsets[n]],
                options,
            )
            for n in asked
        ]
        outcomes = self._do("gather", items, timeout)
        readings = dict(zip(asked, [reading_of(o, options) for o in outcomes], strict=True))
        rows = np.concatenate([reading.value for reading in readings.values()])
        versions = tuple(
            readings[n].version if n in readings else None for n in range(len(self.parts))
        )
        return Reading(spread(rows, places, wanted.shape), versions)

    def assign(self, value: npt.ArrayLike, *, timeout: float | None = None) -> tuple[int, ...]:
        """Set the value, and return the new versions."""
        return self._change("assign", value, timeout)

    def assign_add(self, delta: npt.ArrayLike, *, timeout: float | None = None) -> tuple[int, ...]:
        """Add to the value, and return the new versions."""
        return self._change("assign_add", delta, timeout)

    def assign_sub(self, delta: npt.ArrayLike, *, timeout: float | None = None) -> tuple[int, ...]:
        """Subtract from the value, and return the new versions."""
        return self._change("assign_sub", delta, timeout)

    def scatter_add(
        self, indices: npt.ArrayLike, rows: npt.ArrayLike, *, timeout: float | None = None
    ) -> tuple[int | None, ...]:
        """Add rows; only the parts that hold them are asked; the others' version is None."""
        return self._scatter("scatter_add", indices, rows, timeout)

    def scatter_sub(
        self, indices: npt.ArrayLike, rows: npt.ArrayLike, *, timeout: float | None = None
    ) -> tuple[int | None, ...]:
        """Subtract rows, as `scatter_add` adds them."""
        return self._scatter("scatter_sub", indices, rows, timeout)

    def scatter_update(
        self, indices: npt.ArrayLike, rows: npt.ArrayLike, *, timeout: float | None = None
    ) -> tuple[int | None, ...]:
        """Set rows, the last one of an index."""
        return self._scatter("scatter_update", indices, rows, timeout)

    def apply_gradients(
        self,
        gradient: npt.ArrayLike | Rows,
        *,
        seen: Sequence[int | None] | None = None,
        most_stale: int | None = None,
        scale_stale: bool = False,
        learning_rate: float | None = None,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> Update:
        """Let the optimizers of the parts make a step; see `SharedVariable.apply_gradients`.

        Of `Rows`, only the parts that hold some are asked. An optimizer that looks at the norm of
        its variable, as `LARS` does, sees the norm of the part.

        Returns:
            The versions, None for a part that was not asked; the largest staleness of the parts;
            and whether all have applied it.
        """
        options = stepping(most_stale, scale_stale, learning_rate, compression)
        items = self.items(gradient, seen, options, compression)
        outcomes = self._do("apply_gradients", [item for item in items if item], timeout)
        return self.updated(items, outcomes)

    # What `variable_groups` needs, to do the same for several variables at once.

    def joined(self, readings: Sequence[Reading]) -> Reading:
        """Return one reading of those of all parts."""
        value = readings[0].value
        if len(readings) > 1:
            value = np.concatenate([reading.value for reading in readings], self.axis)
            value.flags.writeable = False
        return Reading(value, tuple(reading.version for reading in readings))

    def items(
        self,
        gradient: npt.ArrayLike | Rows,
        seen: Sequence[int | None] | None,
        options: dict[str, Any],
        compression: cc.Compression | None,
    ) -> list[Item | None]:
        """Return what is to be done with each part, None where it is nothing."""
        versions = [None] * len(self.parts) if seen is None else list(seen)
        if len(versions) != len(self.parts):
            raise InvalidArgumentError(
                f"apply_gradients: expected {len(self.parts)} versions, one of each part, got "
                f"{seen!r} (variable: {self.name})"
            )
        if isinstance(gradient, Rows):
            indices = host_array(gradient.indices, "apply_gradients", self.name)
            rows = host_array(gradient.values, "apply_gradients", self.name)
            pieces: list[Any] = [
                None if part is None else Rows(*part)
                for part in self._rows("apply_gradients", indices, rows)
            ]
        else:
            pieces = self.pieces("apply_gradients", gradient)
        return [
            None
            if piece is None
            else gradient_item(part.place, piece, version, options, compression)
            for part, piece, version in zip(self.parts, pieces, versions, strict=True)
        ]

    def updated(self, items: Sequence[Item | None], outcomes: Sequence[actions.Outcome]) -> Update:
        """Return one update of those of the parts that were asked."""
        rest = iter(outcomes)
        facts = [None if item is None else next(rest).facts for item in items]
        known = [fact[1] for fact in facts if fact is not None and fact[1] is not None]
        return Update(
            tuple(None if fact is None else fact[0] for fact in facts),
            max(known, default=None),
            all(fact is None or fact[2] for fact in facts),
        )

    def _do(
        self, operation: str, items: Sequence[Any], timeout: float | None
    ) -> list[actions.Outcome]:
        return many.perform(self.service, KIND, operation, items, timeout=timeout)

    def pieces(self, operation: str, value: npt.ArrayLike) -> list[Array]:
        """Return the slice of an array that belongs to each part."""
        array = host_array(value, operation, self.name)
        if array.shape != self.shape:
            raise InvalidArgumentError(
                f"{operation}: the value has the wrong shape, expected {self.shape}, got "
                f"{array.shape} (variable: {self.name})"
            )
        if len(self.parts) == 1:
            return [array]
        return np.split(array, self.offsets[1:-1], self.axis)

    def _change(
        self, operation: str, value: npt.ArrayLike, timeout: float | None
    ) -> tuple[int, ...]:
        pieces = self.pieces(operation, value)
        items = [Item(part.place, [p]) for part, p in zip(self.parts, pieces, strict=True)]
        return tuple(outcome.facts[0] for outcome in self._do(operation, items, timeout))

    def _cuts(self, operation: str, ordered: Array) -> npt.NDArray[np.intp]:
        """Return where among indices in order those of each part begin, and the end."""
        if self.axis != 0 or not self.shape:
            raise InvalidArgumentError(
                f"{operation}: rows lie in several parts, expected a variable that is cut along "
                f"axis 0, got axis {self.axis} (variable: {self.name})"
            )
        if ordered.size and not 0 <= ordered[0] <= ordered[-1] < self.shape[0]:
            raise InvalidArgumentError(
                f"{operation}: an index is out of range, expected 0 .. {self.shape[0] - 1}, got "
                f"{ordered[0]} .. {ordered[-1]} (variable: {self.name})"
            )
        return np.searchsorted(ordered, self.offsets)

    def _rows(
        self, operation: str, indices: Array, rows: Array
    ) -> list[tuple[Array, Array] | None]:
        """Return indices and rows for each part, None where there are none."""
        if indices.ndim != 1 or rows.shape[:1] != indices.shape:
            raise InvalidArgumentError(
                f"{operation}: expected an index for every row, got shapes {indices.shape} and "
                f"{rows.shape} (variable: {self.name})"
            )
        wanted = wanted_rows(indices, self.name)
        order = np.argsort(wanted, kind="stable")
        ordered = wanted[order]
        cuts = self._cuts(operation, ordered)
        found: list[tuple[Array, Array] | None] = []
        for n, (low, high) in enumerate(itertools.pairwise(cuts)):
            chosen = order[low:high]
            part = (ordered[low:high] - self.offsets[n], rows[chosen]) if low < high else None
            found.append(part)
        return found

    def _scatter(
        self,
        operation: str,
        indices: npt.ArrayLike,
        rows: npt.ArrayLike,
        timeout: float | None,
    ) -> tuple[int | None, ...]:
        values = host_array(rows, operation, self.name)
        found = self._rows(operation, np.asarray(indices), values)
        asked = [n for n, part in enumerate(found) if part is not None]
        items = [Item(self.parts[n].place, list(found[n] or ())) for n in asked]
        outcomes = dict(zip(asked, self._do(operation, items, timeout), strict=True))
        return tuple(
            outcomes[n].facts[0] if n in outcomes else None for n in range(len(self.parts))
        )
