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
    """Return whether a part of a batch is a column: a list or tuple with one object per row.

    Example:
        >>> is_column(["a", "b"]), is_column([np.ones(2), np.ones(2)]), is_column([("a", "b")])
        (True, False, False)
    """
    # A named tuple of texts is a structure, whose fields are columns.
    is_list = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
    return is_list and all(_is_row(item) for item in node)


def _is_row(item: Any) -> bool:
    """Return whether an item of a list is one row rather than an array or structure of rows."""
    if isinstance(item, dict):
        return all(_is_row(value) for value in item.values())
    if isinstance(item, (str, bytes)):
        return True
    # A NumPy scalar or 0-dimensional tensor is one row, such as a label.
    if hasattr(item, "shape"):
        return len(item.shape) == 0
    # Strings are excluded above: they have a length as well.
    is_sequence = hasattr(item, "__len__") and hasattr(item, "__getitem__")
    return not is_sequence


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return consecutive parts of a batch. Parts beyond its end are shorter or empty.

    Args:
        batch: arrays of shape (n, ...) and columns of n objects, or nested tuples, lists and dicts
            of them.
        sizes: rows of each part.

    Raises:
        ValueError: the arrays have different numbers of rows, or the batch has no array.

    Example:
        >>> [part.tolist() for part in cut(np.arange(4), [3, 2, 1])]
        [[0, 1, 2], [3], []]
        >>> cut({"name": ["a", "b"]}, [1, 1])
        [{'name': ['a']}, {'name': ['b']}]
    """
    # Raises for leaves of different lengths, which slicing would not notice.
    rows_of(batch)
    ends = [0, *itertools.accumulate(sizes)]

    def sliceable(leaf: Any) -> Any:
        return leaf if hasattr(leaf, "shape") or is_column(leaf) else np.asarray(leaf)

    batch = map_leaves(sliceable, batch, is_column)

    def part(start: int, end: int) -> Any:
        return map_leaves(lambda leaf: leaf[start:end], batch, is_column)

    return [part(start, end) for start, end in itertools.pairwise(ends)]


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return sizes for `cut` that are equal for all parts; `cut` shortens the last ones.

    Example:
        >>> even_sizes(7, 3), even_sizes(4, 3)
        ([3, 3, 3], [2, 2, 2])
    """
    # Rounded up, so that the parts cover all rows.
    return [-(-rows // parts)] * parts


def cycle_sizes(rows: int, pipeline: int, pipelines: int, replicas: int) -> list[int]:
    """Return the sizes into which one pipeline cuts its own batches of `rows` rows.

    Every replica of the pipeline takes the next part in each step. In each step all pipelines
    together use `rows` rows. Each pipeline cuts `rows` rows into `replicas` parts.

    Args:
        rows: number of rows of a global batch.
        pipeline: index of this pipeline.
        pipelines: number of pipelines.
        replicas: number of replicas of all pipelines together, a multiple of `pipelines`.

    Example:
        >>> [cycle_sizes(7, pipeline, 2, 4) for pipeline in (0, 1)]
        [[2, 2, 2, 1], [2, 1, 2, 2]]
    """
    small, longer = divmod(rows, replicas)
    # The first parts get one row more, so lengths differ by at most one.
    sizes = [small + 1] * longer + [small] * (replicas - longer)
    # Each pipeline starts at another part, so that long parts do not fall into one step.
    first = pipeline * replicas // pipelines
    return sizes[first:] + sizes[:first]


def rows_of(batch: Any) -> int:
    """Return the number of rows that all arrays and columns of a batch have.

    An empty list may also be an empty structure. It counts as 0 rows only if the batch has no other
    leaf.

    Raises:
        ValueError: the leaves have different numbers of rows, or the batch has no leaf.
    """
    found = [_shape(leaf) for leaf in leaves(batch, is_column)]
    # Without arrays an empty list is a column of 0 rows.
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
        # An empty list may also be an empty structure, so it has no shape to compare.
        return (len(leaf),) if leaf else None
    return tuple(np.shape(leaf))
