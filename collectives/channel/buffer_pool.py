"""Receive buffers for long frames, reused once they are no longer referenced.

Who gets the values of a model in each step still holds the last ones meanwhile, so that memory for
twice the model goes round, in frames of the same lengths each time.
"""

from __future__ import annotations

import mmap
import sys
from collections import OrderedDict, deque

import numpy as np

from collectives.arrays.host_arrays import Array

__all__ = ["BufferPool"]

# Fresh memory costs more than the message (64 MiB on a virtual machine: 140 ms for the first touch,
# 11 ms for the transfer). So much is kept at most, held by others or not, and no longer frames.
_KEPT_BYTES = 1 << 29
_LONGEST = 1 << 27

# Where a frame begins. A copy between processes to a place 1 to 31 bytes behind its source, modulo
# the page, takes more than twice as long on AMD EPYC (64 MiB by process_vm_readv: 39 ms, else 18),
# and arrays of NumPy begin at any multiple of 16. Large ones that have pages of their own begin 16
# bytes into a page, those of PyTorch 64: a frame at its beginning is behind neither.
_PAGE = mmap.PAGESIZE

# Buffers of one length that are looked at. The first is the one that was given away longest ago:
# it is free, unless somebody keeps it for good.
_LOOKS = 8


class BufferPool:
    """Gives memory away, and knows by Python's count of references when it is free again."""

    def __init__(self) -> None:
        # Length -> buffers; both in the order of their last use.
        self._kept: OrderedDict[int, deque[Array]] = OrderedDict()
        self._bytes = 0
        self._free = _holders(deque([np.empty(1, np.uint8)]))  # of one that nobody else holds

    def take(self, length: int) -> Array:
        """Return memory of so many bytes that nobody else holds."""
        if length > _LONGEST:
            return _in_pages(_page_aligned(length), length)
        whole = _round_up(length)
        same = self._kept.setdefault(whole, deque())
        self._kept.move_to_end(whole)
        for _ in range(min(_LOOKS, len(same))):
            same.rotate(-1)
            if _holders(same) <= self._free:
                return _in_pages(same[-1], length)
        same.append(_page_aligned(whole))
        self._bytes += whole
        self._evict()
        return _in_pages(same[-1], length)

    def _evict(self) -> None:
        """Let go what was not used for longest, while this is too much."""
        while self._bytes > _KEPT_BYTES:
            length, oldest = next(iter(self._kept.items()))
            if oldest:
                oldest.popleft()
                self._bytes -= length
            if not oldest:
                del self._kept[length]


def _page_aligned(length: int) -> Array:
    """Return memory in which so many bytes find a place at the beginning of a page."""
    return np.empty(length + _PAGE - 1, np.uint8)


def _in_pages(room: Array, length: int) -> Array:
    """Return the bytes from the first beginning of a page on, a view of that memory."""
    start = -room.__array_interface__["data"][0] % _PAGE
    return room[start : start + length]


def _round_up(length: int) -> int:
    """Return a length that up to 25 % shorter ones share."""
    step = 1 << max(0, length.bit_length() - 3)
    return -(-length // step) * step


def _holders(same: deque[Array]) -> int:
    """Return how many references Python counts to the last buffer, among them its views'."""
    return sys.getrefcount(same[-1])
