"""Variables on ps tasks: parts, placement and cached copies.

A variable is one *part* on one task, or is partitioned along its first axis; see
`variables.partition`. Workers compute with copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from strategies.cluster.scopes import PlacementRequest
from strategies.optimizers import Optimizer
from strategies.replicas.context import ReplicaStrategy
from strategies.replicas.replica_view import ReplicaView
from strategies.variables import partition
from strategies.variables.partition import Partitioner

__all__ = ["Owner", "Part", "ServedVariable", "number_of_parts", "offsets", "parts_of"]

Array = npt.NDArray[Any]


class Part(NamedTuple):
    """A range of rows of a variable, or the whole variable.

    Attributes:
        name: name of the variable, or `name/part_2`.
        task: index of the ps task.
    """

    name: str
    task: int


def number_of_parts(
    name: str, shape: tuple[int, ...], dtype: Any, partitioner: Partitioner | None
) -> int:
    """Return the number of parts of a variable.

    Raises:
        ValueError: the partitioner does not return one number per axis, or splits another axis than
            the first.
    """
    if partitioner is None or not shape:
        return 1
    counts = list(partitioner(shape, dtype))
    good = len(counts) == len(shape) and all(isinstance(n, (int, np.integer)) for n in counts)
    if not good or counts[0] < 1 or any(n != 1 for n in counts[1:]):
        raise ValueError(
            f"variable: bad answer of the partitioner, expected {len(shape)} numbers that are 1 "
            f"but for the first, got {counts} (variable: {name})"
        )
    # No more parts than rows, but one part for a variable without rows.
    return max(1, min(int(counts[0]), shape[0]))


def offsets(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the first row of each of `count` parts, and the end of the last part."""
    return partition.offsets(shape, [count, *[1] * (len(shape) - 1)])


def parts_of(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    count: int,
    choice: Callable[[PlacementRequest], int],
) -> list[Part]:
    """Place the parts of a variable on tasks.

    Args:
        name: name of the variable.
        shape: shape of the whole.
        dtype: dtype, passed to `choice`.
        count: number of parts.
        choice: returns the index of the ps task for a placement request.

    Example:
        >>> parts_of("w", (5, 2), "f4", 2, lambda thing: thing.shape[0])
        [Part(name='w/part_0', task=3), Part(name='w/part_1', task=2)]
    """
    names = [name] if count == 1 else [f"{name}/part_{i}" for i in range(count)]
    sizes = [
        (stop - start, *shape[1:]) if shape else ()
        for start, stop in itertools.pairwise(offsets(shape, count))
    ]
    return [
        Part(part, choice(PlacementRequest(part, "Variable", shape=size, dtype=dtype)))
        for part, size in zip(names, sizes, strict=True)
    ]


class Owner(ReplicaStrategy, Protocol):
    """Interface of the strategy that a variable uses."""

    def assign(self, variable: ServedVariable, value: npt.ArrayLike) -> None:
        """Set the value of a variable on its ps tasks and in the local copy."""


class ServedVariable:
    """A variable of a `ParameterServerStrategy`: parts on ps tasks, and a local copy.

    Args:
        name: name of the variable.
        shape: shape of the whole.
        dtype: dtype of the whole.
        parts: parts and their tasks.
        strategy: strategy of the variable.
        value: initial value of the local copy; None without a copy.
        seen: converts the copy for replicas.

    Attributes:
        name: name in checkpoints and errors.
        parts: parts and their tasks.
        offsets: first row of each part, and the end of the last part.
        shape: shape of the value.
        dtype: dtype of the value.
        strategy: strategy of the variable.
        resident: whether this task has a copy.
        optimizer: optimizer whose copies on the ps tasks update the variable.
        seen: converts the copy for replicas.
        learning_rate: learning rate of this worker's gradients, such as from its own schedule; None
            uses the optimizer's. If several workers contribute to an update, the first worker's
            rate is used.
        is_copy: True: `value` is a copy that must not be changed.
        in_place: whether new rows are written into the existing copy, so that a model that shares
            its memory sees them.
    """

    is_copy = True

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        parts: Sequence[Part],
        strategy: Owner,
        value: Array | None,
        seen: ReplicaView | None = None,
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.offsets = offsets(self.shape, len(parts))
        self.strategy = strategy
        self.resident = value is not None
        self.optimizer: Optimizer | None = None
        self.learning_rate: float | None = None
        self.in_place = False
        self.seen = seen or ReplicaView(None)
        self._value = value

    def __repr__(self) -> str:
        return f"ServedVariable(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self.local
        if copy is None:  # NumPy 1 rejects None
            return np.asarray(value, dtype=dtype)
        return np.array(value, dtype=dtype, copy=copy)

    @property
    def value(self) -> Any:
        """Copy on this task, as of the last `pull` or `apply_gradients`.

        It is an array of the initial value's library, on the device of the current replica. The
        same array is returned until newer values arrive. Do not change it; NumPy arrays are
        read-only.

        Raises:
            ValueError: the variable is not resident.
        """
        return self.seen.last(self.local, self.strategy)

    @property
    def local(self) -> Array:
        """Array of the copy; the next `pull` or `apply_gradients` replaces it.

        Raises:
            ValueError: the variable is not resident.
        """
        if self._value is None:
            raise ValueError(
                f"value: the variable has no copy on this task, expected strategy.look_up, or a "
                f"resident variable (variable: {self.name})"
            )
        return self._value

    @property
    def components(self) -> tuple[Any, ...]:
        """The array, as a tuple for compatibility with variables of other strategies."""
        return (self.value,)

    def pieces(self, array: Array) -> list[Array]:
        """Return the piece of an array for each part, as views."""
        return partition.pieces(array, self.offsets)

    def apply_reply(self, value: Array) -> None:
        """Replace the copy by an array that does not change any more."""
        self._value = value

    def refresh(self, news: Sequence[Sequence[Array]]) -> None:
        """Update the copy with the news of each part: none, the whole part, or indices and rows.

        With rows, earlier results of `local` stay unchanged unless `in_place` is set.
        """
        # Whole parts from every ps: no row of the old copy is needed.
        if all(len(new) == 1 for new in news):
            parts = [new[0] for new in news]
            # One part is used in the memory of its message, without a copy.
            self.apply_reply(parts[0] if len(parts) == 1 else np.concatenate(parts))
        elif any(news):
            kept = self.in_place and self.local.flags.writeable
            whole = self.local if kept else self.local.copy()
            for new, first, last in zip(news, self.offsets, self.offsets[1:], strict=False):
                if len(new) == 1:
                    whole[first:last] = new[0]
                elif new:
                    # Indices of a part start at its first row.
                    whole[first + new[0]] = new[1]
            # A new array object, so that `seen` does not reuse its last conversion.
            self.apply_reply(whole[:])

    def assign(self, value: npt.ArrayLike) -> None:
        """Set the value on the ps tasks and in the local copy.

        Raises:
            ValueError: the shape differs.
            UnavailableError: a ps task cannot be reached.
        """
        self.strategy.assign(self, value)
