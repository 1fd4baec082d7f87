"""Variable handle: a whole or partitioned variable on tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.errors import InvalidArgumentError
from strategies.rpc.registry import Address
from strategies.rpc.service import Service
from strategies.rpc.wire import dtype_named
from strategies.variables import partition
from strategies.variables.client_ops import VariableOps

__all__ = ["AnyVariable", "PartitionedVariable", "SharedVariable"]


class SharedVariable(VariableOps[int]):
    """An array on a task, for all tasks; `shared_variable` makes it or finds it.

    Every operation may raise `UnavailableError` (the task is dead, has left, or is silent),
    `NotFoundError` and `AbortedError` (the container was reset), `DeadlineExceededError` (it was
    not done within `timeout` seconds; None waits for the initial value without a limit) and
    `InvalidArgumentError` (shape, dtype or index).

    A read gives all of one version: it sees no half of an update. Of several variables that are
    read together each one may be of another moment.

    Args:
        service: reaches the task.
        address: where the variable is.

    Attributes:
        service: as given.
        address: as given.
        name: in the container.
    """

    def __init__(self, service: Service, address: Address) -> None:
        self.service = service
        self.address = address
        self.name = address.name
        self.addresses = (address,)
        self._known: tuple[tuple[int, ...], np.dtype[Any]] | None = None

    def __repr__(self) -> str:
        return f"SharedVariable({self.address})"

    @property
    def parts(self) -> tuple[SharedVariable, ...]:
        """The variable itself: it is in one part, unlike a `PartitionedVariable`."""
        return (self,)  # not kept: it would live in a circle

    @property
    def task(self) -> int:
        """Number of the task where the variable is."""
        return self.address.task

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the value; waits for it the first time."""
        return self._description()[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value; waits for it the first time."""
        return self._description()[1]

    def _description(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if self._known is None:
            _, shape, dtype = self._ask("describe", [{}], None)[0].facts
            self._known = tuple(shape), dtype_named(dtype)
        return self._known

    def _join(self, versions: Sequence[int | None]) -> int:
        (version,) = versions
        assert version is not None
        return version

    def _split(self, seen: int | None) -> Sequence[int | None]:
        return [seen]


class PartitionedVariable(VariableOps[tuple[int | None, ...]]):
    """An array in parts along one axis, each of which is a `SharedVariable`.

    Operations are those of `SharedVariable`, and reach all parts, or those that hold the rows, by
    one message to each task. The parts are changed one by one: a reading may have parts of
    different versions, which are therefore tuples, one for each part.

    Args:
        parts: in their order.
        name: of the whole.
        shape: of the whole.
        dtype: of the whole.
        cut: number of parts along each axis, see `partition.checked`.

    Attributes:
        service: reaches the tasks.
        name: of the whole; the parts' names are `name/part_0` and so on.
        shape: of the whole.
        dtype: of the whole.
        axis: along which it is cut.
        offsets: where each part begins along the axis, and where the last one ends.
        parts: in their order.
    """

    offsets: tuple[int, ...]

    def __init__(
        self,
        parts: Sequence[SharedVariable],
        name: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        cut: Sequence[int],
    ) -> None:
        self.service = parts[0].service
        self.parts = tuple(parts)
        self.addresses = tuple(part.address for part in parts)
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.axis = partition.axis_of(cut)
        self.offsets = partition.offsets(shape, cut)

    def __repr__(self) -> str:
        return f"PartitionedVariable(name={self.name!r}, parts={len(self.parts)})"

    def _join(self, versions: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(versions)

    def _split(self, seen: Sequence[int | None] | None) -> Sequence[int | None]:
        versions = [None] * len(self.parts) if seen is None else list(seen)
        if len(versions) != len(self.parts):
            raise InvalidArgumentError(
                f"apply_gradients: expected {len(self.parts)} versions, one of each part, got "
                f"{seen!r} (variable: {self.name})"
            )
        return versions


AnyVariable = SharedVariable | PartitionedVariable
