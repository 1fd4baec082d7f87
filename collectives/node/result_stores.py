"""Plain or streaming stores for results, chosen by measurement.

A plain store fetches the line first; where the caches have it, that is the fastest way, and the
result is at hand afterwards. Of a result that is larger than what they keep from call to call each
line comes from memory to be overwritten, which a store past the caches spares. How much they keep
depends on the processor, on what else the ranks do between two calls, and in a virtual machine on
its neighbours. So each rank times its own copies where a call is made again and again, some calls
by either way, and goes on by the faster one. Nobody else has to know, and the bits are the same.

    two near cores of a Zen 5, 32 MiB of cache, us of a call, plainly / past the caches
                     4 MiB        8 MiB       16 MiB         32 MiB         64 MiB
    all-reduce   317 / 367    648 / 737  1670 / 1682    4130 / 3856    8588 / 8019
    all-gather   151 / 194    305 / 382    663 / 787    1851 / 1678    4491 / 3425
    gather       102 / 134    205 / 264    416 / 516    1261 / 1088    3022 / 2330
    broadcast    164 / 171    318 / 329    638 / 664    1435 / 1360    3106 / 2936
    reading it   138 / 193    294 / 451    644 / 671    1652 / 1662    3043 / 3055
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import copy, stream
from collectives.node.control_block import PLAIN, STREAMING, UNKNOWN
from collectives.node.synchronization import now, state

__all__ = ["PERIOD", "TRIALS", "begin_result", "end_result", "write_result"]

# Bytes of a result from which on a comparison is worth it, and from which on it is stored past the
# caches where none has been made, or the ways of storing are set.
_COMPARED_BYTES, _STREAMED_BYTES = 1 << 22, 1 << 25

# Calls in a row by either way, of which the fastest counts: after the first the caches hold what
# they hold in a row of such calls, and the process may have been interrupted in another one. And
# calls from one comparison to the next, so that the slower way costs less than 1 %.
TRIALS, PERIOD = 3, 1024


@njit
def begin_result(block: Any, nbytes: int) -> None:
    """Begin a call that brings so many bytes: say how they are stored.

    Where it is one of several, whose results all are used later, these count together.
    """
    if nbytes:
        nbytes = max(nbytes, block.result_group_bytes)
    block.result_timed = False
    block.result_mode = STREAMING if nbytes >= _STREAMED_BYTES else UNKNOWN
    if nbytes < _COMPARED_BYTES or state(block).store_forced or block.tune_timed:
        return  # one comparison after the other: how slots were filled tells on who reads them
    call = block.result_calls
    block.result_calls = call % PERIOD + 1
    if call == 0:  # the result may lie in new pages
        return
    if call <= 2 * TRIALS:
        block.result_timed = True
        block.result_ns = 0
        block.result_mode = PLAIN if call <= TRIALS else STREAMING
        return
    if call == 2 * TRIALS + 1:
        plain, streamed = block.result_best_ns[PLAIN], block.result_best_ns[STREAMING]
        block.result_best_mode = STREAMING if 0 < streamed < plain else PLAIN
        block.result_best_ns[STREAMING] = block.result_best_ns[PLAIN] = 0
    block.result_mode = block.result_best_mode


@njit
def write_result(block: Any, dest: int, source: int, nbytes: int, far: bool) -> None:
    """Copy a part of it to where the caller wants it.

    `far` where it comes from a core that shares no cache with this one, and nothing else is known:
    then it goes past them.
    """
    began = now(block) if block.result_timed else 0
    if block.result_mode == STREAMING or (block.result_mode == UNKNOWN and far):
        stream(dest, source, nbytes)
    else:
        copy(dest, source, nbytes)
    if block.result_timed:
        block.result_ns += now(block) - began


@njit
def end_result(block: Any) -> None:
    """End a call that has brought all of it."""
    if block.result_timed:
        best, took = block.result_best_ns, max(1, block.result_ns)
        best[block.result_mode] = min(best[block.result_mode] or took, took)
