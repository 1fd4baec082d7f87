"""How a rank hands bytes to the others: stores into the caches, or past them.

A plain store takes the line from the cache of the core that has read it last. Where the two cores
share no cache that is the slowest way there is; then each rank stores past the caches, which leaves
readers less than half of the rate, so that it does not pay where they do share one. Nobody else has
to know: each rank chooses for what it stores itself.

What systems say of caches is not true in virtual machines, and processes move. So each rank now and
then stores a piece in the plain way and takes the time, and changes its way after two pieces in a
row that speak against it.

    GB/s between two cores, 512 KiB (of 2026)     they share a cache     they share none
    plain stores into lines that another has read         7                1.5 to 2.2
    stores past the caches                             25 to 48             20 to 30
    reading what was stored plainly, past the caches    70, 30             20 to 30
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import copy, drain, fence, store, stream
from collectives.node import words as w
from collectives.node.meeting import header, now, state

__all__ = ["put", "tell"]

# Plain stores at less than this rate, in MB/s, go to a core that shares no cache with this one. The
# least that has been seen where it does, into slots that nobody had used, is 4600.
_SLOW = 3000

# How many timings in a row change the way: in one of them the process may have been interrupted.
_ENOUGH = 2

# Bytes that are stored between two timings; after a change, which a moment may have caused, fewer.
_BETWEEN, _SOON = 1 << 22, 1 << 18
# Of a piece that is worth a timing.
_LEAST, _MOST = 1 << 12, w.TILE_BYTES


@njit
def _timed(block: Any, dest: int, source: int, nbytes: int) -> None:
    """Store a piece in the plain way, and draw the conclusion.

    It ends with all stores in the caches, so that what was streamed before needs no fence where
    `tell` finds that this rank does not stream any more.
    """
    own = state(block)
    near = block[w.SCRATCH]
    copy(near, source, nbytes)  # where the bytes come from should not matter
    drain()
    began = now(block)
    copy(dest, near, nbytes)
    drain()  # [change]
    own[w.RATE] = 1000 * nbytes // max(1, now(block) - began)
    way = w.STREAMING if own[w.RATE] < _SLOW else w.PLAIN
    own[w.AGAINST] = 0 if way == own[w.WAY] else own[w.AGAINST] + 1
    own[w.LEFT] = 0 if own[w.AGAINST] else _BETWEEN
    if own[w.AGAINST] == _ENOUGH:
        own[w.WAY] = way
        own[w.AGAINST] = 0
        own[w.LEFT] = _SOON


@njit
def put(block: Any, dest: int, source: int, nbytes: int) -> None:
    """Copy bytes to where others read them; `tell` says that they are there."""
    own = state(block)
    if nbytes >= _LEAST and not own[w.FIXED]:
        if own[w.LEFT] <= 0:
            n = min(nbytes, _MOST)
            _timed(block, dest, source, n)
            dest, source, nbytes = dest + n, source + n, nbytes - n
        own[w.LEFT] -= nbytes
    if own[w.WAY] == w.STREAMING:
        stream(dest, source, nbytes)
    else:
        copy(dest, source, nbytes)


@njit
def tell(block: Any, word: int, number: int) -> None:
    """Store a number in a word of this rank's header, after all that was put."""
    if state(block)[w.WAY] == w.STREAMING:
        fence()  # [fence]
    store(header(block, block[w.RANK]) + 8 * word, number)
