"""Kernels that copy bytes through the slots: published at once, or pipelined.

Both kinds of call meet as those of `collectives.node.reduce_kernels` do. What is short goes into a
slot at once (`one_shot_copy`). What is long is cut into rounds of a slot, these into parts of 32
KiB (`pipelined_copy`):

    the root of a broadcast      filled = k, part 0, parts, part 1, parts, ... wait for filled
    another rank                 filled = k, wait for parts, read part 0, ...  wait for filled

A rank that enters round k has read all that it needs of round k - 1, and publishes that at once by
`filled`, so that a slot is safe as in all rounds. It publishes each part that it then stores by
`parts`, which only grows. In the first round no rank copies before all have published the same
call.

2 ranks, 2 cores of an AMD EPYC that share a cache / that share none, broadcast of 1 MiB in us: by
whole slots of 512 KiB 73 / 140, in parts 39 / 64; by Open MPI, whose receivers have the kernel read
the sender's memory, 83 / 160 (of 2026).
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit

from collectives.kernels.intrinsics import fence, load, pointer, record, store
from collectives.node.control_block import (
    BLOCK,
    COPY,
    DONE,
    MISMATCH,
    PART_BYTES,
    STREAMING,
    WAITING,
)
from collectives.node.result_stores import begin_result, end_result, write_result
from collectives.node.slot_stores import publish_flag, write_slot
from collectives.node.store_autotuner import begin_stores, count_waits, end_stores
from collectives.node.synchronization import (
    FIELD,
    details_match,
    end,
    hashes_match,
    header,
    next_round,
    publish_hash,
    slot,
    state,
    wait,
    wait_for,
)

__all__ = ["pipelined_copy", "one_shot_copy"]


@njit
def _put_own(block: Any, dest: int, first: int, stop: int) -> None:
    """Put a part of this rank's stream where others read it, but for what nobody else wants."""
    before, after = min(stop, max(first, block.own_first)), max(first, min(stop, block.own_stop))
    if before >= after:
        before = after = stop
    write_slot(block, dest, block.send + first, before - first)  # [fill]
    write_slot(block, dest + after - first, block.send + after, stop - after)  # [fill]


@njit
def _table(block: Any) -> Any:
    """Return what this rank wants of all streams."""
    return carray(pointer(block.table), block.rows, COPY)


@njit
def _copy_row(block: Any, row: Any, source: int, first: int, stop: int, far: bool) -> None:
    """Copy a part of a stream, which begins at an address, to where this rank wants the row."""
    dest = block.out + row.dest + first - row.first
    if dest != source:  # else it is in its place already
        write_result(block, dest, source, stop - first, far)


@njit
def _copy_own(block: Any, first: int, stop: int) -> None:
    """Copy what this rank wants of a window of its own stream."""
    for row in _table(block):
        start, end = max(row.first, first), min(row.stop, stop)
        if row.peer == block.rank and start < end:
            _copy_row(block, row, block.send + start, start, end, False)


def one_shot_copy(address: int) -> int:
    """Let every rank publish a few bytes, and copy what it wants of the others' bytes.

    Broadcast, gather, all-gather, scatter and all-to-all differ only in who publishes what and who
    copies what. Nothing is copied where the ranks agree on the call, but not on its details.
    """
    block = record(address, BLOCK)
    if block.phase == 0:
        number = next_round(block)  # [number]
        publish_hash(block, number)  # [hash]
        begin_stores(block, 0)
        _put_own(block, slot(block, block.rank, number), 0, block.count)
        publish_flag(block, FIELD.filled, number)  # [filled]
        block.phase = 1
    number = block.first_round
    if not wait(block, FIELD.filled, number):  # [all filled]
        return WAITING
    if not hashes_match(block):  # [hashes]
        return end(block, MISMATCH, 1)
    if not details_match(block):  # [hashes]
        return end(block, DONE, 1)
    _copy_own(block, 0, block.count)
    for row in _table(block):
        if row.peer != block.rank:
            source = slot(block, row.peer, number) + row.first  # [read]
            _copy_row(block, row, source, row.first, row.stop, False)
    return end(block, DONE, 1)


@njit
def _part_number(block: Any, number: int, part: int) -> int:
    """Return how many parts a rank has put, as told, after one of a round; it only grows."""
    return number * -(-block.slot_bytes // PART_BYTES) + part + 1


@njit
def _slot_offset(block: Any, rank: int, number: int) -> int:
    """Return where in a rank's slot a round of a flow begins: what is short takes turns in it.

    So that it is stored into lines that the readers' level 2 caches have dropped by then.
    """
    fit = max(1, block.slot_bytes // block.longest_bytes)
    return slot(block, rank, number) + number // 2 % fit * block.longest_bytes


@njit
def _put_parts(block: Any, turn: int) -> None:
    """Fill this rank's slot for a round of a flow, and tell of each part."""
    number, window = block.first_round + turn, turn * block.slot_bytes
    own = _slot_offset(block, block.rank, number)
    stop = min(block.count, window + block.slot_bytes)
    for first in range(window, stop, PART_BYTES):
        _put_own(block, own + first - window, first, min(stop, first + PART_BYTES))
        store(header(block, block.rank) + FIELD.part_mode, state(block).store_mode)  # [hint]
        told = _part_number(block, number, (first - window) // PART_BYTES)
        publish_flag(block, FIELD.parts, told)  # [part]


@njit
def _copy_parts(block: Any, turn: int) -> bool:
    """Copy what this rank wants of the others' slots, part by part; False if one has not come."""
    number, window = block.first_round + turn, turn * block.slot_bytes
    if block.parts_read == 0:
        _copy_own(block, window, window + block.slot_bytes)
    while block.parts_read * PART_BYTES < block.slot_bytes:
        at = window + block.parts_read * PART_BYTES
        stop = min(at + PART_BYTES, window + block.slot_bytes)
        told = _part_number(block, number, block.parts_read)
        for row in _table(block):
            first, last = max(row.first, at), min(row.stop, stop)
            if row.peer != block.rank and first < last:
                if not wait_for(block, row.peer, told):  # [part is there]
                    return False
                far = load(header(block, row.peer) + FIELD.part_mode) == STREAMING  # [hint]
                source = _slot_offset(block, row.peer, number) + first - window  # [read]
                _copy_row(block, row, source, first, last, far)
        block.parts_read += 1
    block.parts_read = 0
    fence()  # [results] that were stored past the caches
    return True


def pipelined_copy(address: int) -> int:
    """As `one_shot_copy`, for streams of many parts: each is read while the next is put."""
    block = record(address, BLOCK)
    if block.phase == 0:
        publish_hash(block, next_round(block))  # [number] [hash]
        begin_stores(block, block.longest_bytes)
        begin_result(block, block.want_bytes)
        block.phase = 1
    while block.done_rounds < block.rounds:
        turn = block.done_rounds
        number = block.first_round + turn
        if block.phase == 1:
            publish_flag(block, FIELD.filled, number)  # [filled]
            _put_parts(block, turn)
            block.phase = 2
        if block.phase == 2 and turn == 0:  # compare all hashes before copying
            if not wait(block, FIELD.filled, number):  # [all filled]
                return WAITING
            if not hashes_match(block):  # [hashes]
                return end(block, MISMATCH, 1)
            if not details_match(block):  # [hashes]
                return end(block, DONE, 1)
            count_waits(block)
        if block.phase == 2:
            block.phase = 3
        if block.phase == 3:
            if not _copy_parts(block, turn):
                return WAITING
            block.phase = 4
        if not wait(block, FIELD.filled, number):  # [all filled]
            return WAITING
        block.done_rounds = turn + 1
        block.phase = 1
    end_result(block)
    end_stores(block)
    return end(block, DONE, block.rounds)
