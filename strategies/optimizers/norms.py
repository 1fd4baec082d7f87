"""Euclidean norms without overflow, equal for any memory layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from strategies.core import array_ops

__all__ = ["Squares", "combine", "norm", "squares"]

# Between these limits, a float64 sum of squares has neither overflowed nor underflowed.
_SMALLEST, _LARGEST = 1e-200, 1e300


class Squares(NamedTuple):
    """A sum of squares: scale**2 * total. Infinities and NaNs are in `total` alone."""

    scale: float
    total: float


def squares(array: Any) -> Squares:
    """Return the sum of the squares of all elements.

    Args:
        array: any shape, float16, bfloat16, float32 or float64, of any library.

    Cost: one pass in host memory. On a device, temporary memory of its size and two
    synchronizations.
    """
    view = array_ops.host(array)
    if view is None:
        return _squares_elsewhere(array)
    from strategies.optimizers import host_step

    total = host_step.sum_of_squares(view)
    # float32 and smaller cannot overflow or underflow a float64 sum of squares.
    if _SMALLEST < total < _LARGEST or math.isnan(total) or view.dtype != np.float64:
        return Squares(1.0, total)
    # A temporary array, but only after a sum has overflowed or underflowed.
    scale = float(np.abs(view).max(initial=0))
    # An infinity or NaN is the result; 0 needs no scale.
    if scale == 0 or not math.isfinite(scale):
        return Squares(1.0, scale)
    # Scaled by the largest element, so that the squares are at most 1.
    return Squares(scale, host_step.sum_of_squares(view / scale))


def _squares_elsewhere(array: Any) -> Squares:
    xp = array_api_compat.array_namespace(array)
    array = array_ops.arithmetic_dtype(array)
    # Two reductions: devices compute in float32, whose squares overflow above 1.8e19.
    scale = float(xp.max(xp.abs(array))) if math.prod(array.shape) else 0.0
    if scale == 0 or not math.isfinite(scale):
        return Squares(1.0, scale)
    array = array / scale
    return Squares(scale, float(xp.sum(array * array)))


def combine(parts: Iterable[Squares]) -> Squares:
    """Return the sum of sums of squares, added in order."""
    parts = list(parts)
    # Infinities and NaNs have no scale; their sum is not finite either.
    if not all(math.isfinite(part.total) for part in parts):
        return Squares(1.0, sum(part.total for part in parts))
    # The largest scale, so that no ratio below overflows.
    scale = max((part.scale for part in parts if part.total), default=1.0)
    return Squares(scale, sum(part.total * (part.scale / scale) ** 2 for part in parts))


def norm(part: Squares) -> float:
    """Return the root of a sum of squares."""
    return part.scale * math.sqrt(part.total)
