"""Weighted means of gradients that several workers have pushed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.sparse import Rows, in_order

__all__ = ["Gradient", "check", "mean"]

Array = npt.NDArray[Any]
Gradient: TypeAlias = "Array | Rows"


def check(
    gradient: Gradient,
    shape: tuple[int, ...],
    dtype: Any,
    name: str,
    operation: str = "apply_gradients",
) -> None:
    """Refuse a gradient that does not fit its variable.

    Raises:
        ValueError: its shape or dtype differs, or an index is out of range.
        TypeError: the indices are no integers.
    """
    array = gradient.values if isinstance(gradient, Rows) else gradient
    expected = shape
    if isinstance(gradient, Rows):
        if not shape:
            raise ValueError(f"{operation}: a scalar has no rows (variable: {name})")
        in_order(gradient, operation, f"variable {name!r}", length=shape[0])
        expected = (*array.shape[:1], *shape[1:])
    if (array.shape, array.dtype) != (expected, dtype):
        raise ValueError(
            f"{operation}: gradient does not fit, expected {dtype} of shape {expected}, got "
            f"{array.dtype} of shape {array.shape} (variable: {name})"
        )


def mean(column: Sequence[tuple[Gradient, float]], total: float, like: Array) -> Gradient:
    """Return the sum of gradients times their weights, divided by a total weight.

    Args:
        column: (gradient, weight), at least one; summed in this order.
        total: also of gradients that are missing, which count as zero.
        like: the variable.

    Returns:
        `Rows` if all of them are, else an array. 16-bit floats are summed as float32.
    """
    weighted = [(gradient, weight / total) for gradient, weight in column]
    rows = [(g, weight) for g, weight in weighted if isinstance(g, Rows)]
    if len(rows) == len(weighted):
        indices = np.concatenate([g.indices for g, _ in rows])
        values = np.concatenate([_wide(g.values) * weight for g, weight in rows])
        return Rows(indices, values.astype(like.dtype, copy=False))
    result = np.zeros(like.shape, _wide(like[:0] if like.ndim else like).dtype)
    for gradient, weight in weighted:
        if isinstance(gradient, Rows):
            np.add.at(result, gradient.indices, _wide(gradient.values) * weight)
        else:
            result += _wide(gradient) * weight
    return result.astype(like.dtype, copy=False)


def _wide(array: Array) -> Array:
    """Return an array in which sums do not lose bits: 16-bit floats as float32."""
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array
