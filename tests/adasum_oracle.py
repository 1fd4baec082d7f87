"""Adasum of the arrays of all ranks, on one process in float64."""

import numpy as np

__all__ = ["combined"]


def pair(a, b):
    """Adasum of two arrays, as it is defined."""
    dot, a2, b2 = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - (dot / (2 * a2) if a2 else 0)) * a + (1 - (dot / (2 * b2) if b2 else 0)) * b


def combined(values):
    """Adasum of the arrays of all ranks, on one process in float64."""
    power = 1 << (len(values).bit_length() - 1)
    values = [np.asarray(value, np.float64) for value in values]
    # Ranks from the largest power of two on join one of those below it.
    groups = [values[rank::power] for rank in range(power)]
    left = [pair(*group) if len(group) == 2 else group[0] for group in groups]
    while len(left) > 1:
        left = [pair(*left[i : i + 2]) for i in range(0, len(left), 2)]
    return left[0]
