"""Detection of core distance: whether ranks of a node run on cores with a common cache.

What systems say of caches is not true in virtual machines, and processes move. So each rank now and
then stores into lines that another rank has read, one line after the other, and takes the time,
which tells near from far; after two pieces in a row that speak against it, it takes itself to have
moved. (The rate of many lines at once, of which a core has more or fewer under way, does not: on
one machine it is 7 GB/s where cores share a cache, on another one up to 9 where they do not.)
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import copy, store_fence_full
from collectives.node.control_block import FAR, NEAR, TILE_BYTES
from collectives.node.synchronization import now, state

__all__ = ["LEAST_TIMED", "MOST_TIMED", "has_moved"]

# Nanoseconds of a line, from which on the other core shares no cache with this one: 51 at most near
# and 134 at least far, in 2,700 calls in turns, but while cores were moved.
_FAR = 80

# Lines that are timed, in groups of which the fastest counts: in another one a page may be new, or
# the process interrupted. They are taken out of order, so that nothing is fetched ahead of it.
_GROUPS, _GROUP, _STRIDE = 4, 8, 13
_LINE = 64

# How many timings in a row change the place: in one of them the process may have been interrupted.
_ENOUGH = 2

# Bytes that are stored between two timings; after a change, which a moment may have caused, fewer.
_BETWEEN, _SOON = 1 << 25, 1 << 18
# Of a piece that is worth a timing.
LEAST_TIMED, MOST_TIMED = 1 << 12, TILE_BYTES


@njit
def has_moved(block: Any, dest: int, source: int, nbytes: int) -> bool:
    """Store a piece in the plain way, some lines of it one by one; tell whether the rank has moved.

    It ends with all stores in the caches, so that what was streamed before needs no fence where
    `tell` finds that this rank does not stream any more.
    """
    own = state(block)
    near = block.scratch
    copy(near, source, nbytes)  # where the bytes come from should not matter
    head = -dest % _LINE
    fastest = 1 << 62
    for group in range(_GROUPS):
        store_fence_full()
        began = now(block)
        for line in range(group * _GROUP, (group + 1) * _GROUP):
            at = head + _LINE * (line * _STRIDE % (_GROUPS * _GROUP))
            copy(dest + at, near + at, 8)
            store_fence_full()
        fastest = min(fastest, now(block) - began)
    copy(dest, near, nbytes)
    store_fence_full()  # [change]
    own.line_ns = max(1, fastest // _GROUP)
    place = FAR if own.line_ns >= _FAR else NEAR
    own.contrary_probes = 0 if place == own.core_distance else own.contrary_probes + 1
    own.bytes_until_probe = 0 if own.contrary_probes else _BETWEEN
    if own.contrary_probes < _ENOUGH:
        return False
    own.core_distance = place
    own.contrary_probes = 0
    own.bytes_until_probe = _SOON
    return True
