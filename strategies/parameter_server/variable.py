"""Variables on ps tasks: parts, placement and cached copies.

A variable is one *part* on one task, or is cut along its first axis as `variables.partition` says.
Workers compute with copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from strategies.cluster.scopes import PlacementRequest
from strategies.replicas.context import ReplicaStrategy
from strategies.replicas.replica_view import ReplicaView
from strategies.variables import partition
from strategies.variables.partition import Partitioner

__all__ = ["Owner", "Part", "ServedVariable", "number_of_parts", "offsets", "parts_of"]

Array = npt.NDArray[Any]


class Part(NamedTuple):
    """Some rows of a variable, or all of it.

    Attributes:
        name: of the variable, or `name/part_2`.
        task: index of the ps task where it is.
    """

    name: str
    task: int


def number_of_parts(
    name: str, shape: tuple[int, ...], dtype: Any, partitioner: Partitioner | None
) -> int:
    """Return into how many parts a variable is cut.

    Raises:
        ValueError: the partitioner's answer is not a number for each axis, 1 but for the first.
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
    return max(1, min(int(counts[0]), shape[0]))


def offsets(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return where so many parts begin, and where the last one ends."""
    return partition.offsets(shape, [count, *[1] * (len(shape) - 1)])


def parts_of(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    count: int,
    choice: Callable[[PlacementRequest], int],
) -> list[Part]:
    """Give each part of a variable a task.

    Args:
        name: of the variable, as are shape and dtype.
        shape: all of its sizes.
        dtype: what `choice` is told.
        count: into how many parts it is cut.
        choice: index of the task for something.

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
    """What a variable asks of the strategy that made it."""

    def assign(self, variable: ServedVariable, value: npt.ArrayLike) -> None:
        """Let a variable take another value on its ps tasks, and in the copy here."""


class ServedVariable:
    """A variable of a `ParameterServerStrategy`: parts of it on ps tasks, and here a copy.

    Args:
        name: of the variable.
        shape: of the whole.
        dtype: of the whole.
        parts: where it is.
        strategy: that made it.
        value: what it starts from, if there is a copy here.
        seen: makes of it what replicas compute with.

    Attributes:
        name: as in checkpoints and errors.
        parts: where it is.
        offsets: the first row of each part, and the row after the last one.
        shape: of the value.
        dtype: of the value.
        strategy: that made it.
        resident: whether there is a copy here.
        seen: as given.
        learning_rate: with which this worker's gradients are applied, such as that of a schedule
            of its own; None for that of the optimizer. Of several workers that make an update
            together, the first one's counts.
        is_copy: that `value` is one, which is not to be changed.
        in_place: whether new rows are written into the copy that is there, as into the parameters
            of a model, which all see it change.
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
        self.learning_rate: float | None = None
        self.in_place = False
        self.seen = seen or ReplicaView(None)
        self._value = value

    def __repr__(self) -> str:
        return f"ServedVariable(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self.local
        if copy is None:  # which NumPy 1 does not know
            return np.asarray(value, dtype=dtype)
        return np.array(value, dtype=dtype, copy=copy)

    @property
    def value(self) -> Any:
        """The copy of this task: as of the last `pull` or `apply_gradients`.

        Of the library of the initial value, on the device of the replica that asks; the same array
        until there are newer values. One of NumPy is read-only; others are not to be changed.

        Raises:
            ValueError: the variable is not resident.
        """
        return self.seen.last(self.local, self.strategy)

    @property
    def local(self) -> Array:
        """The memory of that copy. The next `pull` or `apply_gradients` puts another in its place.

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
        """The array, as for variables of other strategies."""
        return (self.value,)

    def pieces(self, array: Array) -> list[Array]:
        """Return what of an array of its shape lies in each part, as views."""
        return partition.pieces(array, self.offsets)

    def apply_reply(self, value: Array) -> None:
        """Let the copy be this array, which nobody else changes any more."""
        self._value = value

    def refresh(self, news: Sequence[Sequence[Array]]) -> None:
        """Let the copy be what is new of each part: nothing, all of it, or indices and rows.

        Where only rows are new, the array that was shown so far stays as it is, unless the variable
        is renewed in place.
        """
        if all(len(new) == 1 for new in news):
            parts = [new[0] for new in news]
            self.apply_reply(parts[0] if len(parts) == 1 else np.concatenate(parts))
        elif any(news):
            kept = self.in_place and self.local.flags.writeable
            whole = self.local if kept else self.local.copy()
            for new, first, last in zip(news, self.offsets, self.offsets[1:], strict=False):
                if len(new) == 1:
                    whole[first:last] = new[0]
                elif new:
                    whole[first + new[0]] = new[1]
            self.apply_reply(
                whole[:]
            )  # another object, so that those who convert it see that it is new

    def assign(self, value: npt.ArrayLike) -> None:
        """Let the variable take another value on its ps tasks, and in the copy here.

        Raises:
            ValueError: it has another shape.
            UnavailableError: a ps task cannot be reached.
        """
        self.strategy.assign(self, value)
