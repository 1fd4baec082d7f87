"""How many parts a variable has, and on which ps task each of them is.

A variable is one *part* on one task, or is cut along its first axis as `variables.partition` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from strategies.cluster.scopes import Placeable
from strategies.variables import partition
from strategies.variables.partition import Partitioner

__all__ = ["Part", "number_of_parts", "offsets", "parts_of"]


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
        >>> parts_of("w", (5, 2), "f4", 2, lambda thing: thing.shape[0])
        [Part(name='w/part_0', task=3), Part(name='w/part_1', task=2)]
    """
    names = [name] if count == 1 else [f"{name}/part_{i}" for i in range(count)]
    sizes = [
        (stop - start, *shape[1:]) if shape else ()
        for start, stop in itertools.pairwise(offsets(shape, count))
    ]
    return [
        Part(part, choice(Placeable(part, "Variable", shape=size, dtype=dtype)))
        for part, size in zip(names, sizes, strict=True)
    ]
