"""Plain or streaming stores for results, chosen by measurement.

A plain store fetches the line first. That is fastest where the caches hold the line, and the result
is cached afterwards. A result larger than the caches comes from memory line by line, only to be
overwritten; a store past the caches saves that read. How much the caches keep depends on the
processor, on the work between two calls, and in a virtual machine on its neighbours. So each rank
times its own copies of repeated calls, some calls in either mode, and keeps the faster mode. The
other ranks need not know, and the bits are the same.

    two near cores of a Zen 5, 32 MiB of cache, us of a call, plain / streaming stores
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

# Bytes of a result from which a comparison pays, and from which results are streamed without one:
# before the first comparison, or where a setting fixes the mode.
_COMPARED_BYTES, _STREAMED_BYTES = 1 << 22, 1 << 25

# Consecutive calls in each mode; the fastest counts, because the first call runs with the caches of
# the other mode, and any call may be interrupted. PERIOD calls from one comparison to the next keep
# the cost of the slower mode below 1 %.
TRIALS, PERIOD = 3, 1024


@njit
def begin_result(block: Any, nbytes: int) -> None:
    """Begin a call whose result has `nbytes`, and choose its store mode.

    The results of a grouped operation count together, because they are used together later.
    """
    if nbytes:
        nbytes = max(nbytes, block.result_group_bytes)
    block.result_timed = False
    block.result_mode = STREAMING if nbytes >= _STREAMED_BYTES else UNKNOWN
    if nbytes < _COMPARED_BYTES or state(block).store_forced or block.tune_timed:
        return  # one comparison at a time: slot stores change the time of readers
    call = block.result_calls
    block.result_calls = call % PERIOD + 1
    if call == 0:  # the first call may touch new pages
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
    """Copy a part of the result to its destination.

    Args:
        block: the call.
        dest: address in the result.
        source: address of the bytes.
        nbytes: bytes to copy.
        far: whether the source is a core without a common cache; streams if the mode is UNKNOWN.
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
    """End a call after its whole result is stored, and record the time."""
    if block.result_timed:
        best, took = block.result_best_ns, max(1, block.result_ns)
        best[block.result_mode] = min(best[block.result_mode] or took, took)
