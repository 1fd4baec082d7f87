"""Variable parts stored on one ps task.

All calls come from one thread, the shard's, so that nobody sees half of an update. Inside an
update, large variables are changed at the same time, by several threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.core import gradient_sums
from strategies.core.array_ops import COMPUTE, dtype_name
from strategies.core.sparse import Gradient, Rows, checked_rows
from strategies.errors import InvalidArgumentError
from strategies.optimizers import Optimizer
from strategies.parameter_server import state_io
from strategies.parameter_server.state_io import ServerState
from strategies.variables.server_ops import rounded, widened
from strategies.variables.stored_variable import StoredVariable

__all__ = ["DirtyRows", "PartStorage"]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

# Bytes of gradients from which an update is worth several threads: handing out the work takes some
# 0.1 ms, in which one thread changes about this much.
_WORTH_THREADS = 1 << 20
_MOST_THREADS = min(4, os.cpu_count() or 1)  # more do not make memory faster


class DirtyRows:
    """Rows of a variable or part that the last updates changed, so that a reply has only these.

    ::

        update to version   7         8       9
        rows               3 5       5 9      7          a worker at version 7 lacks 5 7 9

    A worker's copy has the version of its last reply. Updates by arrays change all rows. Once the
    recorded rows exceed half of the variable, the oldest are dropped, and workers at older versions
    get the whole variable.

    Args:
        shape: shape of the variable.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        # Writing rows to their indices takes about twice as long as copying an array.
        self._most = shape[0] // 2 if shape else 0
        self._noted: deque[tuple[int, Indices]] = deque()
        self._count = 0
        self._known_from = 0  # copies of older versions need the whole

    def rows(self, version: int, indices: Indices) -> None:
        """Record the rows that the update to this version changed."""
        self._noted.append((version, indices))
        self._count += len(indices)
        while self._count > self._most:
            self._known_from, oldest = self._noted.popleft()
            self._count -= len(oldest)

    def all(self, version: int) -> None:
        """Record that copies older than this version need the whole variable."""
        self._noted.clear()
        self._count, self._known_from = 0, version

    def since(self, version: int) -> Indices | None:
        """Return the rows that a copy of this version lacks, sorted; None for all."""
        if version < self._known_from:
            return None
        newer = [indices for changed, indices in self._noted if changed > version]
        return np.unique(np.concatenate(newer)) if newer else np.empty(0, np.int64)


class PartStorage:
    """What one ps holds, by number, in the order in which all tasks have made them.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._parts: list[StoredVariable] = []
        self._changes: dict[int, DirtyRows] = {}  # number of a part of which workers have copies
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"{name}-update")

    def add(
        self,
        name: str,
        value: Array | Callable[[], Array],
        optimizer: Optimizer | None,
        *,
        resident: bool,
    ) -> None:
        """Add one; see `ParameterServer.add`."""
        part = StoredVariable(name)
        part.initialize(value, optimizer)
        # Others are never updated, only assigned.
        if part.optimizer is not None and dtype_name(part.initialized_value) in COMPUTE:
            part.optimizer.prepare([part.named()])
        if resident:
            self._changes[len(self._parts)] = DirtyRows(part.initialized_value.shape)
        self._parts.append(part)

    def gradients(
        self, told: Mapping[str, Any], values: Sequence[Array]
    ) -> tuple[dict[int, Gradient], dict[int, float]]:
        """Look at all gradients of a push before the first part is changed.

        Returns:
            Number of a part -> its gradient, and its learning rate, where the worker says which.

        Raises:
            InvalidArgumentError: a part is given twice.
            ValueError: a gradient does not fit.
        """
        arrays = iter(values)
        given: dict[int, Gradient] = {}
        rates: dict[int, float] = {}
        for number, sparse, rate in told["parts"]:
            part = self._parts[number]
            if number in given:
                raise InvalidArgumentError(f"push: a part is given twice (variable: {part.name})")
            indices = next(arrays) if sparse else None
            array = widened(next(arrays), told, part.initialized_value.dtype)
            gradient = array if indices is None else Rows(indices, array)
            given[number] = gradient
            if rate is not None:
                rates[number] = rate
            where = f"variable: {part.name}"
            checked_rows(
                gradient,
                part.initialized_value.shape,
                dtype_name(part.initialized_value),
                "push",
                where,
            )
        return given, rates

    def means(self, pushes: Sequence[tuple[Mapping[int, Gradient], float]]) -> dict[int, Gradient]:
        """Return the mean gradient of each part that has one; a missing one counts as zero.

        Args:
            pushes: gradients by number, and their weight.
        """
        columns: dict[int, list[tuple[Gradient, float]]] = {}
        total = sum(weight for _, weight in pushes)
        for gradients, weight in pushes:
            for i, gradient in gradients.items():
                columns.setdefault(i, []).append((gradient, weight / total))
        dtypes = {i: dtype_name(self._parts[i].initialized_value) for i in columns}
        return {i: gradient_sums.mean(column, 1, dtypes[i]) for i, column in columns.items()}

    def update(
        self,
        given: Mapping[int, Gradient],
        rates: Mapping[int, float],
        factor: float,
        version: int,
    ) -> None:
        """Change parts by their gradients, at the same time where that is worth it.

        Args:
            given: number of a part -> gradient.
            rates: number of a part -> learning rate, where it is not that of the optimizer.
            factor: by which learning rates are multiplied.
            version: which this update makes.
        """
        for number in given.keys() & self._changes.keys():  # first, in case that a step fails
            self._note(number, given[number], version)

        def step(number: int) -> None:
            self._parts[number].step(given[number], factor, rates.get(number))

        sizes = [g.values.nbytes if isinstance(g, Rows) else g.nbytes for g in given.values()]
        side_by_side = len(sizes) > 1 and sum(sizes) >= _WORTH_THREADS
        list((self._threads.map if side_by_side else map)(step, given))

    def _note(self, number: int, gradient: Gradient, version: int) -> None:
        """Remember what an update changes."""
        if isinstance(gradient, Rows):
            self._changes[number].rows(version, np.unique(gradient.indices))
        else:
            self._changes[number].all(version)

    def updates_since(self, version: int, packed: str | None) -> tuple[list[Array], list[int]]:
        """Return what copies of a version lack, and in how many arrays that of each part is.

        Of each part of which workers have copies that is nothing, the whole, or indices and rows.

        Args:
            version: of the copies.
            packed: the 16-bit dtype that values are rounded to, or None.
        """
        values: list[Array] = []
        counts = []
        for number, changes in self._changes.items():
            part, rows = self._parts[number], changes.since(version)
            own = [rounded(part.view(), packed)] if rows is None else []
            if rows is not None and len(rows):
                own = [rows, rounded(part.initialized_value[rows], packed)]
            values += own
            counts.append(len(own))
        return values, counts

    def rows(self, number: int, indices: Array, packed: str | None) -> Array:
        """Return some rows of a part."""
        return rounded(self._parts[number].initialized_value[indices], packed)

    def assign(self, number: int, value: Array, version: int) -> None:
        """Let a part take another value, while this is the version.

        Raises:
            InvalidArgumentError: it does not fit.
        """
        part = self._parts[number]
        wanted = part.initialized_value
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            raise InvalidArgumentError(
                f"assign: the value does not fit, expected {wanted.dtype} of shape {wanted.shape}, "
                f"got {value.dtype} of shape {value.shape} (variable: {part.name})"
            )
        part.writable(keep=False)[...] = value
        if number in self._changes:
            self._changes[number].all(version + 1)  # since copies of this version lack it, too

    def states(self) -> dict[str, ServerState]:
        """Return name of a part -> all that a checkpoint keeps of it, as views, in order."""
        return {part.name: state_io.state_of(part) for part in self._parts}

    def load(self, states: Mapping[str, ServerState], version: int) -> None:
        """Go on from what `states` has returned, while this is the version.

        Raises:
            ValueError: it belongs to another optimizer.
        """
        for part in self._parts:
            state_io.load(part, states[part.name])
        for changes in self._changes.values():
            changes.all(version + 1)

    def names(self) -> list[str]:
        """Return the names of the parts, in order."""
        return [part.name for part in self._parts]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)
