"""Rows changed since a version, so that a pull returns only those.

::

    update to version   7         8       9
    rows               3 5       5 9      7          of a worker that has version 7: 5 7 9

A worker's copy is of the version of its last answer. Updates by arrays change all rows, and what is
noted of more rows than are worth it is forgotten: who has an older version gets the whole.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["DirtyRows"]

Indices = npt.NDArray[np.int64]


class DirtyRows:
    """The rows of a variable, or of a part of it, that the last updates have changed.

    Args:
        shape: of the variable.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        # To write rows where they belong takes about twice as long as to take over an array.
        self._most = shape[0] // 2 if shape else 0
        self._noted: deque[tuple[int, Indices]] = deque()
        self._count = 0
        self._known_from = 0  # copies of older versions need the whole

    def rows(self, version: int, indices: Indices) -> None:
        """Note what the update that has made this version has changed."""
        self._noted.append((version, indices))
        self._count += len(indices)
        while self._count > self._most:
            self._known_from, oldest = self._noted.popleft()
            self._count -= len(oldest)

    def all(self, version: int) -> None:
        """Note that copies older than this version need the whole."""
        self._noted.clear()
        self._count, self._known_from = 0, version

    def since(self, version: int) -> Indices | None:
        """Return the rows that a copy of this version lacks, in order; None for the whole."""
        if version < self._known_from:
            return None
        newer = [indices for changed, indices in self._noted if changed > version]
        return np.unique(np.concatenate(newer)) if newer else np.empty(0, np.int64)
