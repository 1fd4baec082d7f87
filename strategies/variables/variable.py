"""Variables that live on one task and are read and updated from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.errors import InvalidArgumentError
from strategies.remote.containers import Place
from strategies.remote.service import Service
from strategies.remote.wire import Array, dtype_named
from strategies.sparse import Rows
from strategies.variables import actions, many
from strategies.variables.actions import Outcome
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
from strategies.variables.kind import KIND, is_missing
from strategies.variables.many import Item

__all__ = ["SharedVariable"]


class SharedVariable:
    """An array on a task, for all tasks; `shared_variable` makes it or finds it.

    Every operation may raise `UnavailableError` (the task is dead, has left, or is silent),
    `NotFoundError` and `AbortedError` (the container was reset), `DeadlineExceededError` (it was
    not done within `timeout` seconds; None waits for the initial value without a limit) and
    `InvalidArgumentError` (shape, dtype or index).

    A read gives all of one version: it sees no half of an update. Of several variables that are
    read together each one may be of another moment.

    Args:
        service: reaches the task.
        place: where the variable is.

    Attributes:
        service: as given.
        place: as given.
    """

    def __init__(self, service: Service, place: Place) -> None:
        self.service = service
        self.place = place
        self._known: tuple[tuple[int, ...], np.dtype[Any]] | None = None

    def __repr__(self) -> str:
        return f"SharedVariable({self.place})"

    @property
    def name(self) -> str:
        """Name in the container."""
        return self.place.name

    @property
    def task(self) -> int:
        """Number of the task where the variable is."""
        return self.place.task

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value; waits for it the first time."""
        return self._description()[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value; waits for it the first time."""
        return self._description()[1]

    @property
    def parts(self) -> tuple[SharedVariable, ...]:
        """The variable itself: it is in one part, unlike a `PartitionedVariable`."""
        return (self,)

    def _description(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if self._known is None:
            _, shape, dtype = self._do("describe", timeout=None).facts
            self._known = tuple(shape), dtype_named(dtype)
        return self._known

    def is_initialized(self) -> bool:
        """Return whether somebody has set the initial value; does not wait for that."""
        return not is_missing(self.service, self.place)

    def read(
        self, *, compression: cc.Compression | None = cc.NONE, timeout: float | None = None
    ) -> Reading:
        """Return value and version.

        Args:
            compression: the value travels as 16 bits, also to the own task.
            timeout: in seconds.
        """
        options = packing(compression, "read")
        return reading_of(self._do("read", options=options, timeout=timeout), options)

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
        options = {"start": start, "stop": stop, **packing(compression, "read_rows")}
        return reading_of(self._do("read", options=options, timeout=timeout), options)

    def gather(
        self,
        indices: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> Reading:
        """Return the rows of these indices, of any shape; only they travel, each of them once.

        Returns:
            Shape (*shape of the indices, *shape of a row), and the version.
        """
        wanted = wanted_rows(indices, self.name)
        unique, places = np.unique(wanted, return_inverse=True)
        options = packing(compression, "gather")
        found = reading_of(self._do("gather", [unique], options, timeout), options)
        return found._replace(value=spread(found.value, places, wanted.shape))

    def assign(
        self,
        value: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> int:
        """Set the value, and return the new version."""
        return self._change("assign", [value], compression, timeout)

    def assign_add(
        self,
        delta: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> int:
        """Add to the value, and return the new version."""
        return self._change("assign_add", [delta], compression, timeout)

    def assign_sub(
        self,
        delta: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> int:
        """Subtract from the value, and return the new version."""
        return self._change("assign_sub", [delta], compression, timeout)

    def scatter_add(
        self,
        indices: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> int:
        """Add rows at indices, shape (k,), those of one index summed; return the new version."""
        return self._change("scatter_add", [indices, rows], compression, timeout)

    def scatter_sub(
        self,
        indices: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> int:
        """Subtract rows at indices, as `scatter_add` adds them."""
        return self._change("scatter_sub", [indices, rows], compression, timeout)

    def scatter_update(
        self,
        indices: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> int:
        """Set rows at indices, the last one of an index; return the new version."""
        return self._change("scatter_update", [indices, rows], compression, timeout)

    def apply_gradients(
        self,
        gradient: npt.ArrayLike | Rows,
        *,
        seen: int | None = None,
        most_stale: int | None = None,
        scale_stale: bool = False,
        learning_rate: float | None = None,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> Update:
        """Let the optimizer that lives beside the variable make a step.

        Args:
            gradient: shape of the variable, or `Rows`: then only those rows, and only those of the
                slots, travel and change.
            seen: version that the gradient was computed from, so that its staleness is known.
            most_stale: a gradient that is staler is dropped.
            scale_stale: the learning rate is divided by 1 + staleness.
            learning_rate: instead of the optimizer's own, in this step.
            compression: the gradient travels as 16 bits.
            timeout: in seconds.

        Raises:
            FailedPreconditionError: the variable has no optimizer.
        """
        options = stepping(most_stale, scale_stale, learning_rate, compression)
        item = gradient_item(self.place, gradient, seen, options, compression)
        facts = self._do("apply_gradients", item.arrays, item.options, timeout).facts
        return Update(*facts)

    def _do(
        self,
        operation: str,
        given: Sequence[Array] = (),
        options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        item = Item(self.place, given, options or {})
        return many.perform(self.service, KIND, operation, [item], timeout=timeout)[0]

    def _change(
        self,
        operation: str,
        given: Sequence[Any],
        compression: cc.Compression | None,
        timeout: float | None,
    ) -> int:
        *indices, values = [host_array(each, operation, self.name) for each in given]
        options = packing(compression, operation)
        packed = actions.compressed(values, compression, self.name)
        return int(self._do(operation, [*indices, packed], options, timeout).facts[0])
