"""Variable handles: whole or partitioned variables on tasks."""

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
    """An array on a task, accessible to all tasks; `shared_variable` creates or finds it.

    Every operation may raise `UnavailableError` (the task is dead, has left or is silent),
    `NotFoundError` and `AbortedError` (the container was reset), `DeadlineExceededError` (not
    finished within `timeout` seconds; None waits for the initial value without a limit) and
    `InvalidArgumentError` (shape, dtype or index).

    A read returns one version and never half of an update. Several variables that are read together
    may be from different moments.

    Args:
        service: service that reaches the task.
        address: address of the variable.

    Attributes:
        service: the service.
        address: the address.
        name: name in the container.
    """

    def __init__(self, service: Service, address: Address) -> None:
        self.service = service
        self.address = address
        self.name = address.name
        self.addresses = (address,)
        # Requested once, because shape and dtype never change.
        self._known: tuple[tuple[int, ...], np.dtype[Any]] | None = None

    def __repr__(self) -> str:
        return f"SharedVariable({self.address})"

    @property
    def parts(self) -> tuple[SharedVariable, ...]:
        """The variable itself, as its only part; see `PartitionedVariable`."""
        return (self,)  # not stored: that would be a reference cycle

    @property
    def task(self) -> int:
        """Number of the variable's task."""
        return self.address.task

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the value; the first access waits for the value."""
        return self._description()[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value; the first access waits for the value."""
        return self._description()[1]

    def _description(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if self._known is None:
            # `describe` waits for the initial value, like a read.
            _, shape, dtype = self._ask("describe", [{}], None)[0].facts
            self._known = tuple(shape), dtype_named(dtype)
        return self._known

    def _join(self, versions: Sequence[int | None]) -> int:
        (version,) = versions
        # A whole variable takes part in every operation, so it always has a version.
        assert version is not None
        return version

    def _split(self, seen: int | None) -> Sequence[int | None]:
        return [seen]


class PartitionedVariable(VariableOps[tuple[int | None, ...]]):
    """An array in parts along one axis, each of them a `SharedVariable`.

    The operations are those of `SharedVariable`. They send one message to each task that holds a
    requested part. Parts change independently, so a read may return parts of different versions. A
    version is a tuple with one entry per part.

    Args:
        parts: parts in order.
        name: name of the whole.
        shape: shape of the whole.
        dtype: dtype of the whole.
        cut: number of parts along each axis; see `partition.checked`.

    Attributes:
        service: service that reaches the tasks.
        name: name of the whole; the names of the parts are `name/part_0` and so on.
        shape: shape of the whole.
        dtype: dtype of the whole.
        axis: partitioned axis.
        offsets: first index of each part along the axis, and the end of the last part.
        parts: parts in order.
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
