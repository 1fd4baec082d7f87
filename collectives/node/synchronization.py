"""Flags in shared memory: ranks signal rounds and wait for each other.

Each call begins with `next_round`, may wait, and finishes with `end`. While tracing is on, all
three record times (`control_block.TRACE`); otherwise tracing costs one load.
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

# Byte offsets of a header's fields, for loads and stores by other ranks.
FIELD = offsets(HEADER)
_HEADER_BYTES = HEADER.itemsize

_MONOTONIC = 1
_CLOCK = offsets(STATE).clock

# A yield takes a microsecond when only the ranks run, but 10 ms when other programs use the cores:
# 200 yields would then last 2 s, during which the rank does not check for dead ranks.
_MOST_YIELD_NS = 5_000_000


@njit
def state(block: Any) -> Any:
    """Return the rank's state that outlives the call."""
    return record(block.state, STATE)


@njit
def now(block: Any) -> int:
    """Return nanoseconds of the monotonic clock."""
    own = state(block)
    clock_gettime(_MONOTONIC, pointer(block.state + _CLOCK))
    return 1_000_000_000 * own.clock.seconds + own.clock.nanoseconds


@njit
def _publish_status(block: Any, seconds: float, number: int) -> None:
    entry = record(block.status_entry, STATUS_ENTRY)
    entry.time = seconds
    entry.number = number


@njit
def begins(block: Any, times: int, number: int) -> None:
    """Record the begin of a call; `times` is the address of its CALL_TIMES."""
    call = record(times, CALL_TIMES)
    call.ended = 0.0
    call.began = seconds = 1e-9 * now(block)
    _publish_status(block, seconds, number)


@njit
def ends(block: Any, times: int, number: int) -> None:
    """Record the end of a call; arguments as `begins`."""
    seconds = 1e-9 * now(block)
    record(times, CALL_TIMES).ended = seconds
    _publish_status(block, seconds, -number)


@njit
def _trace(block: Any, kind: int, began: int, ended: int, last_rank: int) -> None:
    """Add an event, unless the buffer is full; the caller has checked that tracing is on."""
    trace = record(state(block).trace, TRACE)
    if trace.count < MAX_EVENTS:
        event = trace.events[trace.count]
        event.kind, event.last_rank = kind, last_rank
        event.began, event.ended = began, ended
        trace.count += 1


@njit
def _wait_begins(block: Any) -> None:
    trace = record(state(block).trace, TRACE)
    if trace.wait_began == 0:  # else the kernel resumes an earlier wait
        trace.wait_began, trace.late_rank = now(block), -1


@njit
def _wait_ends(block: Any, flag: int, late: int) -> None:
    trace = record(state(block).trace, TRACE)
    kind = WAIT_READY if flag == FIELD.ready else WAIT_FILLED
    _trace(block, kind, trace.wait_began, now(block), trace.late_rank if late < 0 else late)
    trace.wait_began = 0


@njit
def _polls(block: Any, flag: int, rank: int, target: int) -> int:
    """Poll a flag of a rank's header until it reaches the target; return the polls, or -1."""
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
    """Stop the clock of a call that is timed without waits; it may be stopped already."""
    if block.tune_timed == WITHOUT_WAITS and block.tune_started_ns:
        block.tune_ns += now(block) - block.tune_started_ns
        block.tune_started_ns = 0


@njit
def _go_on(block: Any) -> None:
    if block.tune_timed == WITHOUT_WAITS:
        block.tune_started_ns = now(block)


@njit
def wait(block: Any, flag: int, target: int) -> bool:
    """Wait until a flag of all headers reaches the target; return False after too many polls."""
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
            late = rank  # the last such rank was the last to arrive
    if tracing:
        _wait_ends(block, flag, late)
    _go_on(block)
    return True


@njit
def wait_for(block: Any, rank: int, target: int) -> bool:
    """Wait until a rank's `parts` reaches the target; return False after too many polls."""
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
    """Return the address of a rank's slot in a round.

    The bytes of two equal calls have different places, so that a store hits lines that the readers'
    level 2 caches have dropped by then (`collectives.node.engine`).
    """
    first = block.slots + (2 * rank + number % 2) * block.slot_room
    if block.stride:
        first += number // 2 % (block.slot_room // block.stride) * block.stride
    return first


@njit
def publish_hash(block: Any, first: int) -> None:
    """Begin a call: store its hash in this rank's header, before the kernel stores `filled`."""
    block.first_round = first
    own = header(block, block.rank)
    store(own + FIELD.hashes + 8 * (first % 2), block.hash)
    if block.detail:
        store(own + FIELD.details + 8 * (first % 2), block.detail)


@njit
def hashes_match(block: Any) -> bool:
    """Compare the hashes of all ranks; all have filled the call's first round."""
    for rank in range(block.size):
        if load(header(block, rank) + FIELD.hashes + 8 * (block.first_round % 2)) != block.hash:
            return False
    return True


@njit
def details_match(block: Any) -> bool:
    """Compare the details of all ranks, whose hashes match, and set `detail_mismatch`."""
    block.detail_mismatch = 0
    for rank in range(block.size):
        if block.detail:
            own = load(header(block, rank) + FIELD.details + 8 * (block.first_round % 2))
            block.detail_mismatch |= own != block.detail
    return block.detail_mismatch == 0


@njit
def all_equal(block: Any, detail: int) -> bool:
    """Return whether all ranks, whose hashes match, have published this detail."""
    for rank in range(block.size):
        if load(header(block, rank) + FIELD.details + 8 * (block.first_round % 2)) != detail:
            return False
    return True


@njit
def next_round(block: Any) -> int:
    """Begin a call, and return the number of its first round."""
    number = state(block).rounds + 1
    if state(block).trace:
        record(state(block).trace, TRACE).wait_began = 0
        _trace(block, REDUCE if block.start else MOVE, now(block), number, -1)
    return number


@njit
def end(block: Any, status: int, rounds: int) -> int:
    """End a call after some rounds, and reset the block for the next one."""
    state(block).rounds = block.first_round + rounds - 1
    block.phase = 0
    block.done_rounds = 0
    if state(block).trace:
        _trace(block, END, now(block), 0, -1)
        return NOTED if status == DONE else status
    return status
