"""Cut batches for replicas: who gets how many rows, as integers, and the rows themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.structures import leaves, map_leaves

__all__ = ["cut", "cycle_sizes", "even_sizes", "has_rows", "rows_of"]


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return consecutive parts of a batch; past its end they are shorter, and then empty.

    Args:
        batch: arrays of shape (n, ...) with one n, or nested tuples, lists and dicts of them.
        sizes: rows of each part.

    Raises:
        ValueError: the arrays have different numbers of rows, or none at all.

    Example:
        >>> [part.tolist() for part in cut(np.arange(4), [3, 2, 1])]
        [[0, 1, 2], [3], []]
    """
    rows_of(batch)
    ends = [0, *itertools.accumulate(sizes)]
    batch = map_leaves(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), batch)

    def part(start: int, end: int) -> Any:
        return map_leaves(lambda leaf: leaf[start:end], batch)

    return [part(start, end) for start, end in itertools.pairwise(ends)]


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return sizes for `cut` of which all but the last ones are the same.

    Example:
        >>> even_sizes(7, 3), even_sizes(4, 3)
        ([3, 3, 3], [2, 2, 2])
    """
    return [-(-rows // parts)] * parts


def cycle_sizes(rows: int, pipeline: int, pipelines: int, replicas: int) -> list[int]:
    """Return sizes in which one pipeline cuts its own batches of `rows` rows.

    Every replica of the pipeline takes the next part in each step. All pipelines together take
    `rows` rows per step, and each of them `rows` in as many parts as there are replicas.

    Args:
        rows: of a global batch.
        pipeline: which one.
        pipelines: how many there are.
        replicas: of all pipelines together, a multiple of `pipelines`.

    Example:
        >>> [cycle_sizes(7, pipeline, 2, 4) for pipeline in (0, 1)]
        [[2, 2, 2, 1], [2, 1, 2, 2]]
    """
    small, longer = divmod(rows, replicas)
    sizes = [small + 1] * longer + [small] * (replicas - longer)
    first = pipeline * replicas // pipelines
    return sizes[first:] + sizes[:first]


def rows_of(batch: Any) -> int:
    """Return the number of rows that all arrays of a batch have.

    Raises:
        ValueError: they have different numbers of rows, or none at all.
    """
    rows = {np.shape(leaf)[:1] for leaf in leaves(batch)}
    if len(rows) != 1 or () in rows:
        raise ValueError(
            f"share: the batch has no common number of rows, expected arrays of shape (n, ...), "
            f"got shapes {[np.shape(leaf) for leaf in leaves(batch)]}"
        )
    return int(rows.pop()[0])


def has_rows(batch: Any) -> bool:
    """Return whether any array of a batch has a row."""
    return any(np.shape(leaf)[:1] != (0,) for leaf in leaves(batch))
