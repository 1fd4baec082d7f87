"""Flags in shared memory: ranks signal rounds and wait for each other.

Each call begins with `next_round`, has some waits, and ends with `end`: these three note the time,
while tracing is on (`control_block.TRACE`). Otherwise tracing costs a load.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import (
    clock_gettime,
    load,
    pause,
    pointer,
    record,
    sched_yield,
    store,
)
from collectives.kernels.structures import offsets
from collectives.node.control_block import (
    CALL_TIMES,
    DONE,
    END,
    HEADER,
    MAX_EVENTS,
    MOVE,
    NOTED,
    REDUCE,
    STATE,
    STATUS_ENTRY,
    TRACE,
    WAIT_FILLED,
    WAIT_READY,
    WITHOUT_WAITS,
)

__all__ = [
    "FIELD", "all_equal", "begins", "details_match", "end", "ends", "hashes_match", "header",
    "next_round", "now", "publish_hash", "slot", "state", "wait", "wait_for",
]  # fmt: skip

# Bytes in a header before its fields, by which other ranks load and store them.
FIELD = offsets(HEADER)
_HEADER_BYTES = HEADER.itemsize

_MONOTONIC = 1
_CLOCK = offsets(STATE).clock

# A yield takes a microsecond among the ranks alone, but 10 ms where other programs use the cores,
# and 200 of these are 2 s in which nobody looks whether a rank has died.
_MOST_YIELD_NS = 5_000_000


@njit
def state(block: Any) -> Any:
    """Return what outlives the call."""
    return record(block.state, STATE)


@njit
def now(block: Any) -> int:
    """Return nanoseconds of a clock."""
    own = state(block)
    clock_gettime(_MONOTONIC, pointer(block.state + _CLOCK))
    return 1_000_000_000 * own.clock.seconds + own.clock.nanoseconds


@njit
def _publish_status(block: Any, seconds: float, number: int) -> None:
    """Store the time and a number in this rank's entry of the status board."""
    entry = record(block.status_entry, STATUS_ENTRY)
    entry.time = seconds
    entry.number = number


@njit
def begins(block: Any, times: int, number: int) -> None:
    """Record that a call begins; `times` is the address of its CALL_TIMES."""
    call = record(times, CALL_TIMES)
    call.ended = 0.0
    call.began = seconds = 1e-9 * now(block)
    _publish_status(block, seconds, number)


@njit
def ends(block: Any, times: int, number: int) -> None:
    """Record that the call has ended."""
    seconds = 1e-9 * now(block)
    record(times, CALL_TIMES).ended = seconds
    _publish_status(block, seconds, -number)


@njit
def _trace(block: Any, kind: int, began: int, ended: int, last_rank: int) -> None:
    """Add an event; the caller has seen that tracing is on."""
    trace = record(state(block).trace, TRACE)
    if trace.count < MAX_EVENTS:
        event = trace.events[trace.count]
        event.kind, event.last_rank = kind, last_rank
        event.began, event.ended = began, ended
        trace.count += 1


@njit
def _wait_begins(block: Any) -> None:
    trace = record(state(block).trace, TRACE)
    if trace.wait_began == 0:  # else it goes on
        trace.wait_began, trace.late_rank = now(block), -1


@njit
def _wait_ends(block: Any, flag: int, late: int) -> None:
    trace = record(state(block).trace, TRACE)
    kind = WAIT_READY if flag == FIELD.ready else WAIT_FILLED
    _trace(block, kind, trace.wait_began, now(block), trace.late_rank if late < 0 else late)
    trace.wait_began = 0


@njit
def _polls(block: Any, flag: int, rank: int, target: int) -> int:
    """Wait until a flag of a header has reached the target; returns the polls, -1 if too many."""
    address = header(block, rank) + flag
    polls = since = time = 0
    while load(address) < target:
        polls += 1
        if polls <= block.spins:
            pause()
        elif polls <= block.spins + block.yields and time - since < _MOST_YIELD_NS:
            sched_yield()
            time = now(block)
            since = since or time
        else:
            block.missing_rank = rank
            if state(block).trace:
                record(state(block).trace, TRACE).late_rank = rank
            return -1
    return polls


@njit
def _stop(block: Any) -> None:
    """Stop the clock of a call that is timed but for waits; it may stand still already."""
    if block.tune_timed == WITHOUT_WAITS and block.tune_started_ns:
        block.tune_ns += now(block) - block.tune_started_ns
        block.tune_started_ns = 0


@njit
def _go_on(block: Any) -> None:
    if block.tune_timed == WITHOUT_WAITS:
        block.tune_started_ns = now(block)


@njit
def wait(block: Any, flag: int, target: int) -> bool:
    """Wait until a flag of all headers has reached the target; False after too many polls."""
    tracing = state(block).trace
    late = -1
    _stop(block)
    if tracing:
        _wait_begins(block)
    for rank in range(block.size):
        polls = _polls(block, flag, rank, target)
        if polls < 0:
            return False
        if polls:
            late = rank  # in the end the last to come: those before it had come by then
    if tracing:
        _wait_ends(block, flag, late)
    _go_on(block)
    return True


@njit
def wait_for(block: Any, rank: int, target: int) -> bool:
    """Wait until a rank has put so many parts; False after too many polls."""
    if load(header(block, rank) + FIELD.parts) >= target:
        return True  # without an event
    tracing = state(block).trace
    if tracing:
        _wait_begins(block)
    if _polls(block, FIELD.parts, rank, target) < 0:
        return False
    if tracing:
        _wait_ends(block, FIELD.parts, rank)
    return True


@njit
def header(block: Any, rank: int) -> int:
    """Return the address of a rank's header."""
    return block.headers + rank * _HEADER_BYTES


@njit
def slot(block: Any, rank: int, number: int) -> int:
    """Return the address of a rank's slot in a round."""
    return block.slots + (2 * rank + number % 2) * block.slot_bytes


@njit
def publish_hash(block: Any, first: int) -> None:
    """Begin a call: put its hash where the others look for it, before `filled` is stored."""
    block.first_round = first
    own = header(block, block.rank)
    store(own + FIELD.hashes + 8 * (first % 2), block.hash)
    if block.detail:
        store(own + FIELD.details + 8 * (first % 2), block.detail)


@njit
def hashes_match(block: Any) -> bool:
    """Compare the hashes of all ranks, each of which has filled the call's first round."""
    for rank in range(block.size):
        if load(header(block, rank) + FIELD.hashes + 8 * (block.first_round % 2)) != block.hash:
            return False
    return True


@njit
def details_match(block: Any) -> bool:
    """Compare the details of all ranks, which have agreed on the call; notes what comes of it."""
    block.detail_mismatch = 0
    for rank in range(block.size):
        if block.detail:
            own = load(header(block, rank) + FIELD.details + 8 * (block.first_round % 2))
            block.detail_mismatch |= own != block.detail
    return block.detail_mismatch == 0


@njit
def all_equal(block: Any, detail: int) -> bool:
    """Look whether that is the detail of all ranks, which have agreed on the call."""
    for rank in range(block.size):
        if load(header(block, rank) + FIELD.details + 8 * (block.first_round % 2)) != detail:
            return False
    return True


@njit
def next_round(block: Any) -> int:
    """Begin to make a call; returns the number of its first round."""
    number = state(block).rounds + 1
    if state(block).trace:
        record(state(block).trace, TRACE).wait_began = 0
        _trace(block, REDUCE if block.start else MOVE, now(block), number, -1)
    return number


@njit
def end(block: Any, status: int, rounds: int) -> int:
    """End a call after some rounds, and make the block ready for the next."""
    state(block).rounds = block.first_round + rounds - 1
    block.phase = 0
    block.done_rounds = 0
    if state(block).trace:
        _trace(block, END, now(block), 0, -1)
        return NOTED if status == DONE else status
    return status
