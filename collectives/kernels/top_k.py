"""Top-k compression: the largest elements of an array with their indices."""

from __future__ import annotations

import math

import numpy as np

from collectives.arrays.host_arrays import Array

__all__ = ["ENTRY", "MOST", "entries"]

ENTRY = np.dtype([("index", np.uint32), ("value", np.float32)])
"""An element of an array: its index and its value."""

MOST = 1 << 32
"""Elements of an array that an index can name."""

# Elements of a slice, which stays in a core's cache (512 KiB) while several loops pass over it.
_SLICE = 1 << 17

# Distance of the elements of a sample, whose largest elements bound the search. 16 MiB then take
# 6 ms on one core, and 40 ms if all elements are compared. Odd, so that samples leave no column
# out.
_SPACING = 61

# All bits of a float32 but its sign.
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def entries(source: Array, fraction: float, divisor: int, residual: Array | None) -> Array:
    """Return the largest elements of an array by magnitude, and keep the others as residual.

    NaNs are larger than infinities. Of equal magnitudes the lower indices are chosen.

    Args:
        source: shape (n,), float32 or float64, n <= `MOST`; not changed.
        fraction: of the elements, rounded up.
        divisor: divides the source before the choice.
        residual: shape and dtype of `source`, added to the quotient and then replaced by the
            rest; values that are not finite are dropped. None without feedback.

    Returns:
        shape (ceil(fraction n),), dtype `ENTRY`, sorted by index.

    Example:
        >>> entries(np.array([1, -4, 0, 3], np.float32), 0.5, 1, None).tolist()
        [(1, -4.0), (3, 3.0)]
    """
    count = math.ceil(fraction * source.size)
    # Overflows are infinities, which a loss scaler must detect.
    with np.errstate(all="ignore"):
        left = _contribution(source, divisor, residual)
        least = _bound(left, count)
        found = _at_least(left, least)
        if found.size < count:  # the sample was not like the array
            found = np.arange(left.size)
        rest = left[found]
        values = rest.astype(np.float32)
        largest = _largest(values, count)
        chosen = np.empty(count, ENTRY)
        chosen["index"], chosen["value"] = found[largest], values[largest]
        if residual is not None:
            rest[largest] -= chosen["value"]
            # Numbers that are not finite are the largest, so the search has found all of them.
            rest[~np.isfinite(rest)] = 0
            residual[found] = rest
    return chosen


def _contribution(source: Array, divisor: int, residual: Array | None) -> Array:
    """Return the quotient, added to the residual in place if there is one."""
    if residual is None:
        return source if divisor == 1 else source / source.dtype.type(divisor)
    for start in range(0, source.size, _SLICE):
        part = slice(start, start + _SLICE)
        quotient = source[part] if divisor == 1 else source[part] / source.dtype.type(divisor)
        residual[part] += quotient
    return residual


def _bound(values: Array, count: int) -> int:
    """Estimate a magnitude that slightly more than `count` elements reach."""
    sample = _magnitudes(values[::_SPACING])
    expected = count / _SPACING
    # Three standard deviations of the number of samples among the largest elements, rounded up.
    wanted = math.ceil(expected + 3 * math.sqrt(expected)) + 1
    if wanted >= sample.size:
        return 0
    return int(np.partition(sample, -wanted)[-wanted])


def _at_least(values: Array, least: int) -> Array:
    """Return the sorted indices of the elements of at least a magnitude."""
    if least == 0:
        return np.arange(values.size)
    found = []
    for start in range(0, values.size, _SLICE):
        indices = np.flatnonzero(_magnitudes(values[start : start + _SLICE]) >= least)
        found.append(indices + start)
    return np.concatenate(found)


def _largest(values: Array, count: int) -> Array:
    """Return the sorted indices of the `count` largest magnitudes of float32 numbers."""
    if count == values.size:
        return np.arange(count)
    magnitudes = _magnitudes(values)
    least = np.partition(magnitudes, -count)[-count]
    chosen = magnitudes > least
    ties = np.flatnonzero(magnitudes == least)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _magnitudes(values: Array) -> Array:
    """Return integers in the order of the magnitudes as float32, NaNs above infinities."""
    bits: Array = values.astype(np.float32, copy=False).view(np.uint32)
    magnitudes: Array = bits & _MAGNITUDE
    return magnitudes
