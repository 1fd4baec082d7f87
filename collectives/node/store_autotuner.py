"""Autotuner of store instructions for repeated calls: times both kinds, keeps the faster.

On all ranks the same ones, and the slowest rank decides, since who reads pays for how others have
stored. On a machine whose host halves at times what its cores hand over, a line takes 150 ns then
(`collectives.node.core_probe`), and yet the plain way is the better one, us plainly / past the
caches:

                     64 KiB      256 KiB        1 MiB        4 MiB         16 MiB
    all-reduce    4.3 / 4.9  13.9 / 16.4  55.8 / 64.9  222 / 253  1009 / 1125
    broadcast     4.9 / 6.3  10.7 / 13.3  35.2 / 43.5  131 / 165   524 /  650
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import load, store
from collectives.kernels.structures import offsets
from collectives.node.control_block import (
    DURATION,
    DURATION_ROWS,
    NEAR,
    PLAIN,
    STREAMING,
    WITHOUT_FIRST_WAIT,
    WITHOUT_WAITS,
)
from collectives.node.synchronization import FIELD, header, now, state

__all__ = [
    "PERIOD", "SOONER", "TRIALS", "begin_stores", "count_waits", "end_stores", "best_mode",
]  # fmt: skip

# Bytes of an array that is worth a comparison. Calls in a row by either way, of which the fastest
# counts; the first of all, which may touch new pages, is none of them. Calls from one comparison to
# the next, so that the slower way costs less than 1 %, and where nothing is known of the place.
_COMPARED_BYTES = 1 << 16
TRIALS, PERIOD, SOONER = 3, 512, 32

# What the other way must take of the time of the usual one: where ranks share cores, some process
# is interrupted in every call.
_CLEARLY = 0.95

# Bytes of a row of the durations in a header, and of what comes before the times in it.
_ROW_BYTES = DURATION.itemsize
_NS = offsets(DURATION).ns


@njit
def best_mode(block: Any) -> int:
    """Return the way that is better here, as far as is known."""
    own = state(block)
    known = block.tune_best_mode[own.core_distance]
    return known - 1 if known else own.default_mode[own.core_distance]


@njit
def begin_stores(block: Any, nbytes: int) -> None:
    """Begin a call: say how slots are filled from now on.

    `nbytes` are those that decide whether it is worth a comparison, the same on all ranks; a call
    of 0 never is. Nothing is under way that was stored otherwise: after what it puts, each call
    tells so.
    """
    own = state(block)
    block.tune_timed = 0
    if own.store_forced:
        return
    if nbytes >= _COMPARED_BYTES:
        block.tune_calls = (block.tune_calls + 1) % PERIOD
        turn = block.tune_calls % SOONER
        if turn == 1:
            block.tune_active = block.tune_calls == 1 or not block.tune_best_mode[own.core_distance]
        if block.tune_active and 2 <= turn <= 1 + 2 * TRIALS:
            _begin_trial(block, turn)
            return
        if block.tune_active and turn == 3 + 2 * TRIALS:  # after all ranks have ended the last one
            _decide(block)
    own.store_mode = best_mode(block)


@njit
def _begin_trial(block: Any, turn: int) -> None:
    """Begin a call of a comparison, which counts only where this rank does not move in it."""
    own = state(block)
    if turn == 2 or block.tune_distance != own.core_distance:
        block.tune_distance = own.core_distance
        block.tune_best_ns[PLAIN] = block.tune_best_ns[STREAMING] = 0
    block.tune_timed = WITHOUT_WAITS
    block.tune_ns, block.tune_started_ns = 0, now(block)
    own.store_mode = PLAIN if turn <= 1 + TRIALS else STREAMING


@njit
def count_waits(block: Any) -> None:
    """Let all further waits of the call count, after those for ranks that enter it late.

    Who reads what moves part by part waits for it, and the one who puts it is no faster.
    """
    if block.tune_timed:
        block.tune_timed = WITHOUT_FIRST_WAIT


@njit
def _row(block: Any) -> int:
    """Return where in a header the durations of calls like this one are."""
    return FIELD.durations + _ROW_BYTES * (block.hash % DURATION_ROWS)


@njit
def end_stores(block: Any) -> None:
    """End the call; the others see how long this rank took before they conclude."""
    if not block.tune_timed:
        return
    best, mode = block.tune_best_ns, state(block).store_mode
    spent = block.tune_ns + now(block) - block.tune_started_ns
    best[mode] = min(best[mode] or spent, spent)
    row = header(block, block.rank) + _row(block)
    store(row, 0)  # while it changes; whoever calls something else meanwhile finds nothing
    store(row + _NS, best[PLAIN])
    store(row + _NS + 8, best[STREAMING])
    store(row, block.hash)


@njit
def _slowest(block: Any, way: int) -> int:
    """Return how long a call took by one way, of the rank that was slowest; 0 if not known here."""
    slowest = block.tune_best_ns[way]
    for rank in range(block.size):
        row = header(block, rank) + _row(block)  # [times]
        if slowest and load(row) == block.hash:
            slowest = max(slowest, load(row + _NS + 8 * way))
    return slowest


@njit
def _decide(block: Any) -> None:
    """Draw the conclusion of a comparison, if all of it was made here."""
    own = state(block)
    usual = PLAIN if own.core_distance == NEAR else STREAMING
    other = PLAIN + STREAMING - usual
    took, instead = _slowest(block, usual), _slowest(block, other)
    if took and instead and block.tune_distance == own.core_distance:
        way = other if instead < _CLEARLY * took else usual
        block.tune_best_mode[own.core_distance] = 1 + way
        own.default_mode[own.core_distance] = way
