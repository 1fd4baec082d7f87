"""Splitting of global batches into per-replica batches.

A batch is an array of shape (n, ...), a *column* of n objects, or a structure of these. A column is
a list or tuple with an object for each row, such as the text that the default collate function of
PyTorch leaves in lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core.pytree import leaves, map_leaves

__all__ = ["cut", "cycle_sizes", "even_sizes", "has_rows", "is_column", "rows_of"]


def is_column(node: Any) -> bool:
    """Return whether this part of a batch is a list or tuple with an object for each row.

    Example:
        >>> is_column(["a", "b"]), is_column([np.ones(2), np.ones(2)]), is_column([("a", "b")])
        (True, False, False)
    """
    is_list = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
    return is_list and all(_is_row(item) for item in node)


def _is_row(item: Any) -> bool:
    """Return whether an item of a list is one row rather than an array or structure of rows."""
    if isinstance(item, dict):
        return all(_is_row(value) for value in item.values())
    if isinstance(item, (str, bytes)):
        return True
    if hasattr(item, "shape"):
        return len(item.shape) == 0
    is_sequence = hasattr(item, "__len__") and hasattr(item, "__getitem__")
    return not is_sequence


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return consecutive parts of a batch; past its end they are shorter, and then empty.

    Args:
        batch: arrays of shape (n, ...) and columns of n objects, or nested tuples, lists and dicts
            of them.
        sizes: rows of each part.

    Raises:
        ValueError: the arrays have different numbers of rows, or none at all.

    Example:
        >>> [part.tolist() for part in cut(np.arange(4), [3, 2, 1])]
        [[0, 1, 2], [3], []]
        >>> cut({"name": ["a", "b"]}, [1, 1])
        [{'name': ['a']}, {'name': ['b']}]
    """
    rows_of(batch)
    ends = [0, *itertools.accumulate(sizes)]

    def sliceable(leaf: Any) -> Any:
        return leaf if hasattr(leaf, "shape") or is_column(leaf) else np.asarray(leaf)

    batch = map_leaves(sliceable, batch, is_column)

    def part(start: int, end: int) -> Any:
        return map_leaves(lambda leaf: leaf[start:end], batch, is_column)

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
    """Return the number of rows that all arrays and columns of a batch have.

    An empty list may also be an empty structure: it counts as 0 rows only if the batch has nothing
    else.

    Raises:
        ValueError: they have different numbers of rows, or none at all.
    """
    found = [_shape(leaf) for leaf in leaves(batch, is_column)]
    rows = {shape[:1] for shape in found if shape is not None} or {(0,) for _ in found}
    if len(rows) != 1 or () in rows:
        raise ValueError(
            f"share: the batch has no common number of rows, expected arrays of shape (n, ...) or "
            f"lists of n objects, got shapes {[shape for shape in found if shape is not None]}"
        )
    return int(rows.pop()[0])


def has_rows(batch: Any) -> bool:
    """Return whether any array or column of a batch has a row."""
    shapes = [_shape(leaf) for leaf in leaves(batch, is_column)]
    return any(shape[:1] != (0,) for shape in shapes if shape is not None)


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape of a leaf; None for an empty column."""
    if is_column(leaf):
        return (len(leaf),) if leaf else None
    return tuple(np.shape(leaf))
