"""Autotuner of store instructions for repeated calls: times both kinds, keeps the faster.

All ranks compare the same calls, and the slowest rank decides, because the stores of one rank
change the time of the ranks that read them. Core distance alone does not decide: on a machine whose
host sometimes halves the rate between cores, a line then takes 150 ns
(`collectives.node.core_probe`), yet plain stores remain faster. In us, plain / streaming:
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

# Bytes from which a comparison pays. TRIALS consecutive calls run in each mode, and the fastest
# counts; the first call of a comparison may touch new pages and is not timed. PERIOD calls from one
# comparison to the next keep the cost of the slower mode below 1 %; SOONER calls while the faster
# mode at this core distance is unknown.
_COMPARED_BYTES = 1 << 16
TRIALS, PERIOD, SOONER = 3, 512, 32

# The other mode must take at most this share of the usual mode's time, because some process is
# interrupted in every call where ranks share cores.
_CLEARLY = 0.95

# Bytes of a row of the durations in a header, and of the fields before its times.
_ROW_BYTES = DURATION.itemsize
_NS = offsets(DURATION).ns


@njit
def best_mode(block: Any) -> int:
    """Return the faster mode at this core distance, or the default before a comparison."""
    own = state(block)
    known = block.tune_best_mode[own.core_distance]
    return known - 1 if known else own.default_mode[own.core_distance]


@njit
def begin_stores(block: Any, nbytes: int) -> None:
    """Begin a call, and choose how it fills slots.

    No earlier store is pending in the other mode, because each call publishes a flag after its
    stores.

    Args:
        block: the call.
        nbytes: bytes that decide whether a comparison pays, equal on all ranks; 0 for never.
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
        if block.tune_active and turn == 3 + 2 * TRIALS:  # all ranks have ended the last trial
            _decide(block)
    own.store_mode = best_mode(block)


@njit
def _begin_trial(block: Any, turn: int) -> None:
    """Begin a timed call of a comparison; a change of core distance restarts the comparison."""
    own = state(block)
    if turn == 2 or block.tune_distance != own.core_distance:
        block.tune_distance = own.core_distance
        block.tune_best_ns[PLAIN] = block.tune_best_ns[STREAMING] = 0
    block.tune_timed = WITHOUT_WAITS
    block.tune_ns, block.tune_started_ns = 0, now(block)
    own.store_mode = PLAIN if turn <= 1 + TRIALS else STREAMING


@njit
def count_waits(block: Any) -> None:
    """Include all further waits of the call in its time, except those for late ranks.

    A reader of a pipelined stream waits for its parts, so the time of a slow writer shows only in
    the waits of its readers.
    """
    if block.tune_timed:
        block.tune_timed = WITHOUT_FIRST_WAIT


@njit
def _row(block: Any) -> int:
    """Return the offset in a header of the durations of calls with this hash."""
    return FIELD.durations + _ROW_BYTES * (block.hash % DURATION_ROWS)


@njit
def end_stores(block: Any) -> None:
    """End the call, and publish this rank's times before any rank decides."""
    if not block.tune_timed:
        return
    best, mode = block.tune_best_ns, state(block).store_mode
    spent = block.tune_ns + now(block) - block.tune_started_ns
    best[mode] = min(best[mode] or spent, spent)
    row = header(block, block.rank) + _row(block)
    store(row, 0)  # invalid while it changes: a reader then finds no matching hash
    store(row + _NS, best[PLAIN])
    store(row + _NS + 8, best[STREAMING])
    store(row, block.hash)


@njit
def _slowest(block: Any, way: int) -> int:
    """Return the time of a call in one mode on the slowest rank; 0 if unknown on this rank."""
    slowest = block.tune_best_ns[way]
    for rank in range(block.size):
        row = header(block, rank) + _row(block)  # [times]
        if slowest and load(row) == block.hash:
            slowest = max(slowest, load(row + _NS + 8 * way))
    return slowest


@njit
def _decide(block: Any) -> None:
    """Choose the faster mode, unless core distance changed during the comparison."""
    own = state(block)
    usual = PLAIN if own.core_distance == NEAR else STREAMING
    other = PLAIN + STREAMING - usual
    took, instead = _slowest(block, usual), _slowest(block, other)
    if took and instead and block.tune_distance == own.core_distance:
        way = other if instead < _CLEARLY * took else usual
        block.tune_best_mode[own.core_distance] = 1 + way
        own.default_mode[own.core_distance] = way
