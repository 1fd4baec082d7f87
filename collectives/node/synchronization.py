"""Flags in shared memory: ranks signal rounds and wait for each other.

Each call begins with `next_round`, has some waits, and ends with `end`: these three note the time,
where somebody wants to know (`words.TIMES`). Else it is a word that they look at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels.intrinsics import (
    clock_gettime,
    load,
    pause,
    pointer,
    sched_yield,
    store,
)
from collectives.node import control_block as w

__all__ = [
    "all_equal", "begins", "details_match", "end", "ends", "hashes_match", "header", "next_round",
    "now", "publish_hash", "slot", "state", "wait", "wait_for",
]  # fmt: skip

_MONOTONIC = 1

# A yield takes a microsecond among the ranks alone, but 10 ms where other programs use the cores,
# and 200 of these are 2 s in which nobody looks whether a rank has died.
_MOST_YIELD_NS = 5_000_000


@njit
def state(block: Any) -> Any:
    """Return the words that outlive the call."""
    return carray(pointer(block[w.STATE]), w.STATE_WORDS, np.int64)


@njit
def now(block: Any) -> int:
    """Return nanoseconds of a clock."""
    own = state(block)
    clock_gettime(_MONOTONIC, pointer(block[w.STATE] + 8 * w.CLOCK))
    return 1_000_000_000 * own[w.CLOCK] + own[w.CLOCK + 1]


@njit
def _record(block: Any, times: int, at: int, number: int) -> None:
    """Note the time in the record of a call and, with a number, where other ranks look for it."""
    seconds = 1e-9 * now(block)
    carray(pointer(times), 2, np.float64)[at] = seconds
    carray(pointer(block[w.NOTE] + 8), 1, np.float64)[0] = seconds
    carray(pointer(block[w.NOTE]), 1, np.int64)[0] = number


@njit
def begins(block: Any, times: int, number: int) -> None:
    """Record that a call begins; `times` is the address of two float64, when and until when."""
    carray(pointer(times), 2, np.float64)[1] = 0.0  # it has not ended
    _record(block, times, 0, number)


@njit
def ends(block: Any, times: int, number: int) -> None:
    """Record that it has ended."""
    _record(block, times, 1, -number)


@njit
def _note(block: Any, what: int, began: int, ended: int, last: int) -> None:
    """Note what this rank did; the caller has seen that somebody wants to know."""
    times = carray(pointer(state(block)[w.TIMES]), w.TIMES_WORDS, np.int64)
    if times[w.NOTES] < w.MOST_NOTES:
        at = w.FIRST_NOTE + w.NOTE_WORDS * times[w.NOTES]
        times[at + w.WHAT], times[at + w.LAST] = what, last
        times[at + w.FROM_TIME], times[at + w.TO_TIME] = began, ended
        times[w.NOTES] += 1


@njit
def _wait_begins(block: Any) -> None:
    times = carray(pointer(state(block)[w.TIMES]), w.TIMES_WORDS, np.int64)
    if times[w.SINCE] == 0:  # else it goes on
        times[w.SINCE], times[w.LATE] = now(block), -1


@njit
def _wait_ends(block: Any, word: int, late: int) -> None:
    times = carray(pointer(state(block)[w.TIMES]), w.TIMES_WORDS, np.int64)
    _note(block, word, times[w.SINCE], now(block), times[w.LATE] if late < 0 else late)
    times[w.SINCE] = 0


@njit
def _polls(block: Any, word: int, rank: int, target: int) -> int:
    """Wait until a word of a header has reached the target; returns the polls, -1 if too many."""
    address = header(block, rank) + 8 * word
    polls = since = time = 0
    while load(address) < target:
        polls += 1
        if polls <= block[w.SPINS]:
            pause()
        elif polls <= block[w.SPINS] + block[w.YIELDS] and time - since < _MOST_YIELD_NS:
            sched_yield()
            time = now(block)
            since = since or time
        else:
            block[w.MISSING] = rank
            if state(block)[w.TIMES]:
                carray(pointer(state(block)[w.TIMES]), w.TIMES_WORDS, np.int64)[w.LATE] = rank
            return -1
    return polls


@njit
def _stop(block: Any) -> None:
    """Stop the clock of a call that is timed but for waits; it may stand still already."""
    if block[w.TRIED] == w.BUT_FOR_WAITS and block[w.RUNNING]:
        block[w.SPENT] += now(block) - block[w.RUNNING]
        block[w.RUNNING] = 0


@njit
def _go_on(block: Any) -> None:
    if block[w.TRIED] == w.BUT_FOR_WAITS:
        block[w.RUNNING] = now(block)


@njit
def wait(block: Any, word: int, target: int) -> bool:
    """Wait until a word of all headers has reached the target; False after too many polls."""
    noting = state(block)[w.TIMES]
    late = -1
    _stop(block)
    if noting:
        _wait_begins(block)
    for rank in range(block[w.SIZE]):
        polls = _polls(block, word, rank, target)
        if polls < 0:
            return False
        if polls:
            late = rank  # in the end the last to come: those before it had come by then
    if noting:
        _wait_ends(block, word, late)
    _go_on(block)
    return True


@njit
def wait_for(block: Any, rank: int, target: int) -> bool:
    """Wait until a rank has put so many parts; False after too many polls."""
    if load(header(block, rank) + 8 * w.PARTS) >= target:
        return True  # and no note of it
    noting = state(block)[w.TIMES]
    if noting:
        _wait_begins(block)
    if _polls(block, w.PARTS, rank, target) < 0:
        return False
    if noting:
        _wait_ends(block, w.FILLED, rank)  # of whose filling it is a part
    return True


@njit
def header(block: Any, rank: int) -> int:
    """Return the address of a rank's header."""
    return block[w.HEADERS] + rank * w.HEADER_BYTES


@njit
def slot(block: Any, rank: int, number: int) -> int:
    """Return the address of a rank's slot in a round."""
    return block[w.SLOTS] + (2 * rank + number % 2) * block[w.SLOT_BYTES]


@njit
def publish_hash(block: Any, first: int) -> None:
    """Begin a call: put its hash where the others look for it, before FILLED is stored."""
    block[w.FIRST] = first
    own = header(block, block[w.RANK])
    store(own + 8 * (w.HASHES + first % 2), block[w.HASH])
    if block[w.DETAIL]:
        store(own + 8 * (w.DETAILS + first % 2), block[w.DETAIL])


@njit
def hashes_match(block: Any) -> bool:
    """Compare the hashes of all ranks, each of which has filled the call's first round."""
    for rank in range(block[w.SIZE]):
        if load(header(block, rank) + 8 * (w.HASHES + block[w.FIRST] % 2)) != block[w.HASH]:
            return False
    return True


@njit
def details_match(block: Any) -> bool:
    """Compare the details of all ranks, which have agreed on the call; notes what comes of it."""
    block[w.UNLIKE] = 0
    for rank in range(block[w.SIZE]):
        if block[w.DETAIL]:
            own = load(header(block, rank) + 8 * (w.DETAILS + block[w.FIRST] % 2))
            block[w.UNLIKE] |= own != block[w.DETAIL]
    return block[w.UNLIKE] == 0


@njit
def all_equal(block: Any, detail: int) -> bool:
    """Look whether that is the detail of all ranks, which have agreed on the call."""
    for rank in range(block[w.SIZE]):
        if load(header(block, rank) + 8 * (w.DETAILS + block[w.FIRST] % 2)) != detail:
            return False
    return True


@njit
def next_round(block: Any) -> int:
    """Begin to make a call; returns the number of its first round."""
    number = state(block)[w.COUNTER] + 1
    if state(block)[w.TIMES]:
        carray(pointer(state(block)[w.TIMES]), w.TIMES_WORDS, np.int64)[w.SINCE] = 0
        _note(block, w.REDUCES if block[w.START] else w.MOVES, now(block), number, -1)
    return number


@njit
def end(block: Any, status: int, rounds: int) -> int:
    """End a call after some rounds, and make the block ready for the next."""
    state(block)[w.COUNTER] = block[w.FIRST] + rounds - 1
    block[w.PHASE] = 0
    block[w.DONE_ROUNDS] = 0
    if state(block)[w.TIMES]:
        _note(block, w.END, now(block), 0, -1)
        return w.NOTED if status == w.DONE else status
    return status
