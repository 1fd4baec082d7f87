"""Receive buffers for long frames, reused once they are no longer referenced.

A worker that receives the values of a model in every step still holds the previous values. So the
pool circulates memory for twice the model, in frames of equal lengths in every step.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.core.references import is_referenced_elsewhere

__all__ = ["BufferPool"]

# Fresh memory costs more than the message (64 MiB on a virtual machine: 140 ms for the first touch,
# 11 ms for the transfer). Most bytes in the pool, in use or free, and the longest pooled frame.
_KEPT_BYTES = 1 << 29
_LONGEST = 1 << 27

# Frames start at a page. On AMD EPYC a copy between processes to an address 1 to 31 bytes behind
# its source, modulo the page, takes twice as long (64 MiB by process_vm_readv: 39 ms, else 18 ms).
# NumPy aligns arrays to 16 bytes only. Large NumPy arrays start 16 bytes into a page, PyTorch
# tensors 64 bytes: a frame at the start of a page is behind neither.
_PAGE = mmap.PAGESIZE

# Buffers of one length that `take` inspects. The first is the least recently used: it is free,
# unless the program keeps it permanently.
_LOOKS = 8


class BufferPool:
    """Pool of buffers; Python's reference counts show which buffers are free."""

    def __init__(self) -> None:
        # Length -> buffers; both in the order of their last use.
        self._kept: OrderedDict[int, deque[Array]] = OrderedDict()
        self._bytes = 0

    def take(self, length: int) -> Array:
        """Return memory of `length` bytes without other references."""
        # Long frames are rare, and would push all other buffers out of the pool.
        if length > _LONGEST:
            return _in_pages(_page_aligned(length), length)
        whole = _round_up(length)
        same = self._kept.setdefault(whole, deque())
        self._kept.move_to_end(whole)
        for _ in range(min(_LOOKS, len(same))):
            same.rotate(-1)
            if not is_referenced_elsewhere(same[-1]):
                return _in_pages(same[-1], length)
        same.append(_page_aligned(whole))
        # Counted while in use, because the pool holds the memory in any case.
        self._bytes += whole
        self._evict()
        return _in_pages(same[-1], length)

    def _evict(self) -> None:
        """Drop the least recently used buffers while the pool is too large."""
        while self._bytes > _KEPT_BYTES:
            length, oldest = next(iter(self._kept.items()))
            if oldest:
                oldest.popleft()
                self._bytes -= length
            if not oldest:
                del self._kept[length]


def _page_aligned(length: int) -> Array:
    """Return memory with room for `length` bytes from the start of a page."""
    return np.empty(length + _PAGE - 1, np.uint8)


def _in_pages(room: Array, length: int) -> Array:
    """Return a view of `length` bytes from the first page boundary in the memory."""
    start = -room.__array_interface__["data"][0] % _PAGE
    return room[start : start + length]


def _round_up(length: int) -> int:
    """Return a length that is shared by lengths up to 25 % shorter."""
    step = 1 << max(0, length.bit_length() - 3)
    return -(-length // step) * step
