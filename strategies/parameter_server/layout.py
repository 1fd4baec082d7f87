"""Which rows of a variable are on which ps task, as pure integers.

A variable is one *part* on one task, or is cut along its first axis into parts of nearly equal
numbers of rows, the first ones a row longer: 10 rows in 4 parts are 3, 3, 2, 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.cluster.scopes import Placeable
from strategies.sparse import Rows
from strategies.variables.partition import offsets

__all__ = ["Part", "Partitioner", "cut", "cut_rows", "number_of_parts", "parts_of"]

Array = npt.NDArray[Any]
Partitioner: TypeAlias = Callable[[tuple[int, ...], Any], Sequence[int]]
"""Shape and dtype -> number of parts along each axis; 1 but for the first."""


class Part(NamedTuple):
    """Some rows of a variable.

    Attributes:
        name: of the variable, or `name/part_2`.
        task: index of the ps task where it is.
        start: its first row; 0 if it is the whole variable.
        stop: the row after its last one; -1 if it is the whole variable.
    """

    name: str
    task: int
    start: int = 0
    stop: int = -1

    @property
    def whole(self) -> bool:
        """Whether it is the whole variable."""
        return self.stop < 0

    def holds(self, indices: Array) -> npt.NDArray[np.bool_]:
        """Tell for each index whether its row is in this part."""
        if self.whole:
            return np.ones(indices.shape, bool)
        return (indices >= self.start) & (indices < self.stop)


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


def parts_of(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    count: int,
    choice: Callable[[Placeable], int],
) -> list[Part]:
    """Give each part of a variable a task.

    Args:
        name: of the variable, as are shape and dtype.
        shape: all of its sizes.
        dtype: what `choice` is told.
        count: into how many parts it is cut.
        choice: index of the task for something.

    Example:
        >>> [(p.start, p.stop, p.task) for p in parts_of("w", (5, 2), "f4", 2, lambda thing: 0)]
        [(0, 3, 0), (3, 5, 0)]
    """

    def task(part: str, rows: int | None) -> int:
        size = shape if rows is None else (rows, *shape[1:])
        return choice(Placeable(part, "Variable", shape=size, dtype=dtype))

    if count == 1:
        return [Part(name, task(name, None))]
    names = [f"{name}/part_{i}" for i in range(count)]
    bounds = itertools.pairwise(offsets(shape, [count, *[1] * (len(shape) - 1)]))
    return [
        Part(part, task(part, stop - start), start, stop)
        for part, (start, stop) in zip(names, bounds, strict=True)
    ]


def cut(array: Array, part: Part) -> Array:
    """Return a part's rows of an array, as a view."""
    return array if part.whole else array[part.start : part.stop]


def cut_rows(rows: Rows, part: Part) -> Rows:
    """Return the rows that lie in a part, by their indices in it."""
    if part.whole:
        return rows
    inside = part.holds(rows.indices)
    return Rows(rows.indices[inside] - part.start, np.asarray(rows.values)[inside])
