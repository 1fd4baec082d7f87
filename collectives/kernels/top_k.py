"""Top-k compression: the largest elements of an array with their indices."""

from __future__ import annotations

import math

import numpy as np

from collectives.arrays.host_arrays import Array

__all__ = ["ENTRY", "entries"]

ENTRY = np.dtype([("index", np.uint32), ("value", np.float32)])
"""An element of an array: its index and its value."""


def entries(source: Array, fraction: float, divisor: int, residual: Array | None) -> Array:
    """Return the largest elements of an array by magnitude, and keep the others as residual.

    NaNs are larger than infinities. Of equal magnitudes the lower indices are chosen.

    Args:
        source: shape (n,), float32 or float64, n < 2^32; not changed.
        fraction: of the elements, rounded up.
        divisor: divides the source before the choice.
        residual: shape and dtype of `source`, added to the quotient and then replaced by what is
            not sent; values that are not finite are dropped. None without feedback.

    Returns:
        shape (ceil(fraction n),), dtype `ENTRY`, sorted by index.

    Example:
        >>> entries(np.array([1, -4, 0, 3], np.float32), 0.5, 1, None).tolist()
        [(1, -4.0), (3, 3.0)]
    """
    # Overflows are infinities, which a loss scaler must detect.
    with np.errstate(all="ignore"):
        left = source / source.dtype.type(divisor)
        if residual is not None:
            left += residual
        values = left.astype(np.float32, copy=False)
        chosen = np.empty(math.ceil(fraction * left.size), ENTRY)
        chosen["index"] = _largest(values, chosen.size)
        chosen["value"] = values[chosen["index"]]
        if residual is not None:
            left[chosen["index"]] -= chosen["value"]
            left[~np.isfinite(left)] = 0
            residual[...] = left
    return chosen


def _largest(values: Array, count: int) -> Array:
    """Return the sorted indices of `count` float32 numbers of the largest magnitude."""
    if count == values.size:
        return np.arange(count)
    # Without the sign, bits of floats are ordered as their magnitudes, NaNs above infinities.
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = np.partition(bits, values.size - count)[values.size - count]
    above = np.flatnonzero(bits > least)
    ties = np.flatnonzero(bits == least)[: count - above.size]
    return np.sort(np.concatenate([above, ties]))
