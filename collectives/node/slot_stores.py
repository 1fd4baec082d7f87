"""Plain or streaming stores for the slots that other ranks read.

A plain store takes the line from the cache of the core that read it last. Between cores without a
common cache that transfer may be the slowest path. Then a rank stores past the caches (streaming
stores). They halve the rate of readers, so they do not pay between cores with a common cache. Each
rank chooses for its own stores; the other ranks need not know.

    between two cores (of 2026)                 with a common cache         without one
    ns of a line, as timed here (Zen 3)                        25 to 51        134 to 184
    GB/s of 512 KiB, plain stores into such lines                     7        1.5 to 2.2
      (Zen 3)                                                   4 to 15            3 to 5
    streaming stores (Zen 3)                         25 to 48, 17 to 22      20 to 30, 17
    reading after plain stores (Zen 3)                     70, 45 to 54      20 to 30, 12
    reading after streaming stores (Zen 3)                 30, 13 to 16      20 to 30, 14
    us of an all-reduce of 1 MiB (Zen 3), plain                     120               500
      streaming                                                     220               220

Each rank detects its core distance (`collectives.node.core_probe`). All ranks together measure the
faster mode at that distance (`collectives.node.store_autotuner`).
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import copy, fence, store, stream
from collectives.node.control_block import STREAMING
from collectives.node.core_probe import LEAST_TIMED, MOST_TIMED, has_moved
from collectives.node.store_autotuner import best_mode
from collectives.node.synchronization import header, state

__all__ = ["write_slot", "publish_flag"]


@njit
def write_slot(block: Any, dest: int, source: int, nbytes: int) -> None:
    """Copy bytes into a slot that other ranks read; `publish_flag` makes them visible."""
    own = state(block)
    if nbytes >= LEAST_TIMED and not own.store_forced:
        if own.bytes_until_probe <= 0:
            n = min(nbytes, MOST_TIMED)
            if has_moved(block, dest, source, n) and not block.tune_timed:
                own.store_mode = best_mode(block)
            dest, source, nbytes = dest + n, source + n, nbytes - n
        own.bytes_until_probe -= nbytes
    if own.store_mode == STREAMING:
        stream(dest, source, nbytes)
    else:
        copy(dest, source, nbytes)


@njit
def publish_flag(block: Any, flag: int, number: int) -> None:
    """Store a number in a flag of this rank's header, after everything in its slot."""
    if state(block).store_mode == STREAMING:
        fence()  # [fence] a release does not order streaming stores
    store(header(block, block.rank) + flag, number)
