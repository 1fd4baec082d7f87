"""Detection of core distance: whether ranks of a node run on cores with a common cache.

The cache topology that a system reports is wrong in virtual machines, and processes migrate. So
each rank regularly stores into lines that another rank has read, one line after the other, and
times them. The time per line separates near from far. After two consecutive probes that contradict
its core distance the rank changes it.

The rate of many lines at once does not separate the two, because cores differ in the number of
stores in flight: it is 7 GB/s between near cores of one machine, and up to 9 between far cores of
another.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import copy, store_fence_full
from collectives.node.control_block import FAR, NEAR, TILE_BYTES
from collectives.node.synchronization import now, state

__all__ = ["LEAST_TIMED", "MOST_TIMED", "has_moved"]

# Nanoseconds per line from which the other core shares no cache with this one. Of 2,700 calls none
# took more than 51 near or less than 134 far, except while cores were moved.
_FAR = 80

# Lines that are timed, in groups; the fastest group counts, because another one may touch a new
# page or be interrupted. The stride defeats the hardware prefetcher.
_GROUPS, _GROUP, _STRIDE = 4, 8, 13
_LINE = 64

# Consecutive probes that change the distance: a single one may have been interrupted.
_ENOUGH = 2

# Bytes stored between two probes, and fewer after a change, which may be transient.
_BETWEEN, _SOON = 1 << 25, 1 << 18
# Bytes of a piece that is large enough for a probe, and bytes of it that a probe stores.
LEAST_TIMED, MOST_TIMED = 1 << 12, TILE_BYTES


@njit
def has_moved(block: Any, dest: int, source: int, nbytes: int) -> bool:
    """Store a piece with plain stores, timing some lines one by one; return whether the rank moved.

    The full fence at the end orders earlier streaming stores. So `publish_flag` needs no fence of
    its own if this probe ends streaming.
    """
    own = state(block)
    near = block.scratch
    copy(near, source, nbytes)  # the probe must not depend on the cache state of the source
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
