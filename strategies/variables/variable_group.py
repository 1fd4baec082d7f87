"""Variables of one task that change together and share one version.

One thread makes all calls, so that no read sees half of an update. Within an update, several
threads change large variables in parallel.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from strategies.core import gradient_sums
from strategies.core.array_ops import COMPUTE, dtype_name
from strategies.core.sparse import Gradient, Rows, checked_rows
from strategies.errors import DataLossError, InvalidArgumentError
from strategies.optimizers import Optimizer
from strategies.rpc.wire import Array
from strategies.variables.server_ops import execute, rounded, widened
from strategies.variables.stored_variable import StoredVariable

__all__ = ["VALUE", "DirtyRows", "VariableGroup", "VariableState", "pack", "unpack"]

Indices = npt.NDArray[np.int64]
T = TypeVar("T")

# Bytes of gradients from which an update uses several threads. Dispatching takes about 0.1 ms, in
# which one thread updates about this much.
_WORTH_THREADS = 1 << 20
_MOST_THREADS = min(4, os.cpu_count() or 1)  # more threads do not raise memory bandwidth

VALUE = "value"
"""Key of the variable's value among the arrays of its state."""


class VariableState(NamedTuple):
    """Checkpoint state of a variable.

    Attributes:
        counts: "step", the number of updates, and other counters of the optimizer.
        arrays: "value" and slot names -> arrays of the variable's shape.
    """

    counts: dict[str, int]
    arrays: dict[str, Array]


def pack(states: Iterable[VariableState]) -> tuple[list[Any], list[Array]]:
    """Return metadata and arrays of a message with these states."""
    chosen = list(states)
    facts = [[state.counts, list(state.arrays)] for state in chosen]
    return facts, [array for state in chosen for array in state.arrays.values()]


def unpack(facts: Iterable[Any], arrays: Iterable[Array]) -> list[VariableState]:
    """Reverse `pack`."""
    rest = iter(arrays)
    return [VariableState(counts, {kind: next(rest) for kind in kinds}) for counts, kinds in facts]


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
        self._known_from = 0  # older copies need the whole variable

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


class VariableGroup:
    """Variables of one task, numbered in the order in which they were added.

    Args:
        name: name of the threads.

    Attributes:
        version: number of updates in this process.
        updates: number of updates, including those before a loaded checkpoint.
    """

    def __init__(self, name: str) -> None:
        self.version = 0
        self.updates = 0
        self._variables: list[StoredVariable] = []
        self._changes: dict[int, DirtyRows] = {}  # by number, of resident variables
        self._damage: str | None = None  # why only some variables have changed
        # Threads start at the first update that is large enough.
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"{name}-update")

    def add(
        self,
        name: str,
        value: Array | Callable[[], Array],
        optimizer: Optimizer | None,
        *,
        resident: bool,
    ) -> None:
        """Add a variable, before the first request for it.

        Args:
            name: name in messages.
            value: shape (...), copied; or a function that returns it.
            optimizer: optimizer; the variable gets a copy.
            resident: whether workers have copies, which every reply updates.
        """
        variable = StoredVariable(name)
        variable.initialize(value, optimizer)
        # Variables of other dtypes are only assigned, never updated.
        if variable.optimizer is not None and dtype_name(variable.initialized_value) in COMPUTE:
            # Slots must exist before the first update, because `load` compares a state with them.
            variable.optimizer.prepare([variable.named()])
        if resident:
            shape = variable.initialized_value.shape
            self._changes[len(self._variables)] = DirtyRows(shape)
        self._variables.append(variable)

    def gradients(
        self, told: Mapping[str, Any], values: Sequence[Array]
    ) -> tuple[dict[int, Gradient], dict[int, float]]:
        """Check all gradients of a push before the first variable changes.

        Returns:
            Variable number -> gradient, and variable number -> learning rate where the push has
            one.

        Raises:
            InvalidArgumentError: a variable occurs twice.
            ValueError: a gradient does not fit its variable.
        """
        arrays = iter(values)
        given: dict[int, Gradient] = {}
        rates: dict[int, float] = {}
        for number, sparse, rate in told["parts"]:
            variable = self._variables[number]
            has, where = variable.initialized_value, f"variable: {variable.name}"
            if number in given:
                raise InvalidArgumentError(f"push: a part is given twice ({where})")
            # Arrays follow in the order of the parts; a sparse gradient has two.
            indices = next(arrays) if sparse else None
            array = widened(next(arrays), told, has.dtype)
            given[number] = array if indices is None else Rows(indices, array)
            if rate is not None:
                rates[number] = rate
            # Only the check: rows of one index are added later, together with those of other
            # pushes.
            checked_rows(given[number], has.shape, dtype_name(has), "push", where)
        return given, rates

    def means(self, pushes: Sequence[tuple[Mapping[int, Gradient], float]]) -> dict[int, Gradient]:
        """Return the weighted mean gradient per variable; a missing gradient counts as zero.

        Args:
            pushes: pairs of gradients by variable number and weight.
        """
        columns: dict[int, list[tuple[Gradient, float]]] = {}
        total = sum(weight for _, weight in pushes)
        for gradients, weight in pushes:
            for i, gradient in gradients.items():
                # A fraction of the total of all pushes, so that a missing gradient counts as zero.
                columns.setdefault(i, []).append((gradient, weight / total))
        dtypes = {i: dtype_name(self._variables[i].initialized_value) for i in columns}
        return {i: gradient_sums.mean(column, 1, dtypes[i]) for i, column in columns.items()}

    def update(
        self, given: Mapping[int, Gradient], rates: Mapping[int, float], factor: float
    ) -> None:
        """Update variables by their gradients, in parallel if they are large.

        Args:
            given: variable number -> gradient.
            rates: variable number -> learning rate, where it replaces the optimizer's.
            factor: factor of the learning rates.

        Raises:
            DataLossError: an earlier change of several variables has failed for some of them. All
                methods that read or change values then raise it.
        """
        for number in given.keys() & self._changes.keys():
            gradient, changes = given[number], self._changes[number]
            if isinstance(gradient, Rows):
                # `unique`, so that the count of recorded rows is that of distinct rows.
                changes.rows(self.version + 1, np.unique(gradient.indices))
            else:
                changes.all(self.version + 1)

        def step(number: int) -> None:
            self._variables[number].step(given[number], factor, rates.get(number))

        sizes = [g.values.nbytes if isinstance(g, Rows) else g.nbytes for g in given.values()]
        side_by_side = len(sizes) > 1 and sum(sizes) >= _WORTH_THREADS
        self._change_all(step, given, self._threads.map if side_by_side else map)
        self.version += 1
        self.updates += 1

    def _change_all(
        self, change: Callable[[T], None], chosen: Collection[T], apply: Callable[..., Any] = map
    ) -> None:
        """Change several variables; if only some of the changes fail, refuse all later calls."""
        self._check_whole()

        def failure(each: T) -> Exception | None:
            try:
                change(each)
            except Exception as error:
                return error
            return None

        # All changes end here, so that no thread changes a variable after an error.
        failures = [error for error in apply(failure, chosen) if error is not None]
        if failures:
            error = failures[0]
            if len(failures) < len(chosen):
                self._damage = f"{type(error).__name__}: {error}"
            raise error

    def _check_whole(self) -> None:
        # Undoing a change would need a copy of every variable and slot before each update.
        if self._damage is not None:
            raise DataLossError(
                f"parameter server: a change failed for some variables, expected all or none, got "
                f"{self._damage}; start again from a checkpoint"
            )

    def updates_since(self, version: int, packed: str | None) -> tuple[list[Array], list[int]]:
        """Return the data that copies of a version lack, and the number of arrays per variable.

        Each resident variable has no array (up to date), one (whole value), or two (indices and
        rows).

        Args:
            version: version of the copies.
            packed: 16-bit dtype that values are rounded to, or None.
        """
        self._check_whole()
        values: list[Array] = []
        counts = []
        for number, changes in self._changes.items():
            variable, rows = self._variables[number], changes.since(version)
            # A view is sent without a copy; the next update then writes to other memory.
            own = [rounded(variable.view(), packed)] if rows is None else []
            if rows is not None and len(rows):
                own = [rows, rounded(variable.initialized_value[rows], packed)]
            values += own
            counts.append(len(own))
        return values, counts

    def rows(self, number: int, indices: Array, packed: str | None) -> Array:
        """Return some rows of a variable."""
        self._check_whole()
        return execute("gather", self._variables[number], [indices], {"as": packed}).arrays[0]

    def assign(self, number: int, value: Array) -> None:
        """Set the value of a variable.

        Raises:
            InvalidArgumentError: shape or dtype does not fit.
        """
        self._check_whole()
        execute("assign", self._variables[number], [value], {})
        if number in self._changes:  # copies of this version also lack it
            self._changes[number].all(self.version + 1)

    def states(self) -> dict[str, VariableState]:
        """Return name -> checkpoint state of each variable, as views, in order."""
        self._check_whole()
        return {variable.name: _state_of(variable) for variable in self._variables}

    def load(self, states: Mapping[str, VariableState], updates: int) -> None:
        """Restore the result of `states`, saved after `updates` updates.

        Raises:
            ValueError: the state belongs to another optimizer.
        """
        self._change_all(lambda each: _load(each, states[each.name]), self._variables)
        # Copies of the current version also lack the restored values.
        for changes in self._changes.values():
            changes.all(self.version + 1)
        self.updates = updates

    def names(self) -> list[str]:
        """Return the names of the variables, in order."""
        return [variable.name for variable in self._variables]

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False)


def _state_of(variable: StoredVariable) -> VariableState:
    assert variable.optimizer is not None
    found = VariableState({}, {VALUE: variable.view()})
    for key, entry in variable.optimizer.state_dict().items():
        # The optimizer has one variable, so the rest of the key identifies the slot.
        kind = key.removesuffix(f"/{variable.name}")
        (found.arrays if isinstance(entry, np.ndarray) else found.counts)[kind] = entry
    return found


def _load(variable: StoredVariable, state: VariableState) -> None:
    assert variable.optimizer is not None
    entries: dict[str, Any] = {**state.counts, **state.arrays}
    value = entries.pop(VALUE)
    variable.optimizer.load_state_dict(
        {kind if kind == "step" else f"{kind}/{variable.name}": entries[kind] for kind in entries}
    )
    variable.writable(keep=False)[...] = value
