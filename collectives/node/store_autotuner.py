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
from collectives.node import control_block as w
from collectives.node.synchronization import header, now, state

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


@njit
def best_mode(block: Any) -> int:
    """Return the way that is better here, as far as is known."""
    own = state(block)
    known = block[w.FOUND + own[w.PLACE]]
    return known - 1 if known else own[w.NEAR_WAY + own[w.PLACE]]


@njit
def begin_stores(block: Any, nbytes: int) -> None:
    """Begin a call: say how slots are filled from now on.

    `nbytes` are those that decide whether it is worth a comparison, the same on all ranks; a call
    of 0 never is. Nothing is under way that was stored otherwise: after what it puts, each call
    tells so.
    """
    own = state(block)
    block[w.TRIED] = 0
    if own[w.FIXED]:
        return
    if nbytes >= _COMPARED_BYTES:
        block[w.TRIES] = (block[w.TRIES] + 1) % PERIOD
        turn = block[w.TRIES] % SOONER
        if turn == 1:
            block[w.TRYING] = block[w.TRIES] == 1 or not block[w.FOUND + own[w.PLACE]]
        if block[w.TRYING] and 2 <= turn <= 1 + 2 * TRIALS:
            _begin_trial(block, turn)
            return
        if block[w.TRYING] and turn == 3 + 2 * TRIALS:  # after all ranks have ended the last one
            _decide(block)
    own[w.WAY] = best_mode(block)


@njit
def _begin_trial(block: Any, turn: int) -> None:
    """Begin a call of a comparison, which counts only where this rank does not move in it."""
    own = state(block)
    if turn == 2 or block[w.TRIED_IN] != own[w.PLACE]:
        block[w.TRIED_IN] = own[w.PLACE]
        block[w.FASTEST + w.PLAIN] = block[w.FASTEST + w.STREAMING] = 0
    block[w.TRIED] = w.BUT_FOR_WAITS
    block[w.SPENT], block[w.RUNNING] = 0, now(block)
    own[w.WAY] = w.PLAIN if turn <= 1 + TRIALS else w.STREAMING


@njit
def count_waits(block: Any) -> None:
    """Let all further waits of the call count, after those for ranks that enter it late.

    Who reads what moves part by part waits for it, and the one who puts it is no faster.
    """
    if block[w.TRIED]:
        block[w.TRIED] = w.AFTER_THE_FIRST


@njit
def _row(block: Any) -> int:
    """Return where in a header there are the times of calls like this one."""
    return 8 * (w.TOOK + w.TOOK_WORDS * (block[w.HASH] % w.TOOK_ROWS))


@njit
def end_stores(block: Any) -> None:
    """End the call; the others see how long this rank took before they conclude."""
    if not block[w.TRIED]:
        return
    at = w.FASTEST + state(block)[w.WAY]
    spent = block[w.SPENT] + now(block) - block[w.RUNNING]
    block[at] = min(block[at] or spent, spent)
    row = header(block, block[w.RANK]) + _row(block)
    store(row, 0)  # while it changes; whoever calls something else meanwhile finds nothing
    store(row + 8, block[w.FASTEST + w.PLAIN])
    store(row + 16, block[w.FASTEST + w.STREAMING])
    store(row, block[w.HASH])


@njit
def _slowest(block: Any, way: int) -> int:
    """Return how long a call took by one way, of the rank that was slowest; 0 if not known here."""
    slowest = block[w.FASTEST + way]
    for rank in range(block[w.SIZE]):
        row = header(block, rank) + _row(block)  # [times]
        if slowest and load(row) == block[w.HASH]:
            slowest = max(slowest, load(row + 8 * (1 + way)))
    return slowest


@njit
def _decide(block: Any) -> None:
    """Draw the conclusion of a comparison, if all of it was made here."""
    own = state(block)
    usual = w.PLAIN if own[w.PLACE] == w.NEAR else w.STREAMING
    other = w.PLAIN + w.STREAMING - usual
    took, instead = _slowest(block, usual), _slowest(block, other)
    if took and instead and block[w.TRIED_IN] == own[w.PLACE]:
        way = other if instead < _CLEARLY * took else usual
        block[w.FOUND + own[w.PLACE]] = 1 + way
        own[w.NEAR_WAY + own[w.PLACE]] = way
