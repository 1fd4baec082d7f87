"""Reuse of memory by reference counts: whether a program still refers to an array."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

__all__ = ["is_referenced_elsewhere"]


def is_referenced_elsewhere(array: npt.NDArray[np.generic] | None) -> bool:
    """Return whether anything but one container refers to an array, also by a view of it.

    If the result is False, other threads can get a reference through the container alone.

    Args:
        array: an attribute or item, as in `is_referenced_elsewhere(self._memory)`. A local variable
            of the caller would be another reference.
    """
    return sys.getrefcount(array) > _ALONE


def _references(array: npt.NDArray[np.generic]) -> int:
    return sys.getrefcount(array)


# Measured by a function of the same form, because the references of a call depend on the version of
# Python.
_ONLY = [np.empty(1)]
_ALONE = _references(_ONLY[0])
