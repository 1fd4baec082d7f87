"""Kernels that copy bytes through the slots: published at once, or pipelined.

Both kinds of call meet as those of `collectives.node.reduce_kernels` do. What is short goes into a
slot at once (`one_shot_copy`). What is long is cut into rounds of a slot, these into parts of 32
KiB (`pipelined_copy`):

    the root of a broadcast      FILLED = k, part 0, PARTS, part 1, PARTS, ... wait for FILLED
    another rank                 FILLED = k, wait for PARTS, read part 0, ...  wait for FILLED

Who enters round k has read all that it needs of round k - 1, and tells that at once by FILLED, so
that a slot is safe as in all rounds. What it then puts it tells by PARTS, which only grows. Nobody
copies anything in the first round before all are known to make the same call.

2 ranks, 2 cores of an AMD EPYC that share a cache / that share none, broadcast of 1 MiB in us: by
whole slots of 512 KiB 73 / 140, in parts 39 / 64; by Open MPI, whose receivers have the kernel read
the sender's memory, 83 / 160 (of 2026).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels.intrinsics import fence, load, pointer, store
from collectives.node import control_block as w
from collectives.node.result_stores import begin_result, end_result, write_result
from collectives.node.slot_stores import publish_flag, write_slot
from collectives.node.store_autotuner import begin_stores, count_waits, end_stores
from collectives.node.synchronization import (
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

# A row of the table of `one_shot_copy` and `pipelined_copy`: whose stream, its first byte, the one
# after its last, and where they go, counted from OUT.
PEER, FROM, TO, DEST = 0, 1, 2, 3


@njit
def _put_own(block: Any, dest: int, first: int, stop: int) -> None:
    """Put a part of this rank's stream where others read it, but for what nobody else wants."""
    before, after = min(stop, max(first, block[w.KEPT])), max(first, min(stop, block[w.KEPT_TO]))
    if before >= after:
        before = after = stop
    write_slot(block, dest, block[w.SEND] + first, before - first)  # [fill]
    write_slot(block, dest + after - first, block[w.SEND] + after, stop - after)  # [fill]


@njit
def _copy_row(block: Any, row: int, source: int, first: int, stop: int, far: bool) -> None:
    """Copy a part of a stream, which begins at an address, to where this rank wants the row."""
    table = carray(pointer(block[w.TABLE]), (block[w.ROWS], 4), np.int64)
    dest = block[w.OUT] + table[row, DEST] + first - table[row, FROM]
    if dest != source:  # else it is in its place already
        write_result(block, dest, source, stop - first, far)


@njit
def _copy_own(block: Any, first: int, stop: int) -> None:
    """Copy what this rank wants of a window of its own stream."""
    table = carray(pointer(block[w.TABLE]), (block[w.ROWS], 4), np.int64)
    for row in range(block[w.ROWS]):
        start, end = max(table[row, FROM], first), min(table[row, TO], stop)
        if table[row, PEER] == block[w.RANK] and start < end:
            _copy_row(block, row, block[w.SEND] + start, start, end, False)


def one_shot_copy(address: int) -> int:
    """Let every rank publish a few bytes, and copy what it wants of the others' bytes.

    Broadcast, gather, all-gather, scatter and all-to-all differ only in who publishes what and who
    copies what. Nothing is copied where the ranks agree on the call, but not on its details.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        number = next_round(block)  # [number]
        publish_hash(block, number)  # [hash]
        begin_stores(block, 0)
        _put_own(block, slot(block, block[w.RANK], number), 0, block[w.COUNT])
        publish_flag(block, w.FILLED, number)  # [filled]
        block[w.PHASE] = 1
    number = block[w.FIRST]
    if not wait(block, w.FILLED, number):  # [all filled]
        return w.WAITING
    if not hashes_match(block):  # [hashes]
        return end(block, w.MISMATCH, 1)
    if not details_match(block):  # [hashes]
        return end(block, w.DONE, 1)
    _copy_own(block, 0, block[w.COUNT])
    table = carray(pointer(block[w.TABLE]), (block[w.ROWS], 4), np.int64)
    for row in range(block[w.ROWS]):
        peer, first = table[row, PEER], table[row, FROM]
        if peer != block[w.RANK]:
            source = slot(block, peer, number) + first  # [read]
            _copy_row(block, row, source, first, table[row, TO], False)
    return end(block, w.DONE, 1)


@njit
def _part_number(block: Any, number: int, part: int) -> int:
    """Return how many parts a rank has put, as told, after one of a round; it only grows."""
    return number * -(-block[w.SLOT_BYTES] // w.PART_BYTES) + part + 1


@njit
def _slot_offset(block: Any, rank: int, number: int) -> int:
    """Return where in a rank's slot a round of a flow begins: what is short takes turns in it.

    So that it is stored into lines that the readers' level 2 caches have dropped by then.
    """
    fit = max(1, block[w.SLOT_BYTES] // block[w.LONGEST])
    return slot(block, rank, number) + number // 2 % fit * block[w.LONGEST]


@njit
def _put_parts(block: Any, turn: int) -> None:
    """Fill this rank's slot for a round of a flow, and tell of each part."""
    number, window = block[w.FIRST] + turn, turn * block[w.SLOT_BYTES]
    own = _slot_offset(block, block[w.RANK], number)
    stop = min(block[w.COUNT], window + block[w.SLOT_BYTES])
    for first in range(window, stop, w.PART_BYTES):
        _put_own(block, own + first - window, first, min(stop, first + w.PART_BYTES))
        store(header(block, block[w.RANK]) + 8 * w.STORED, state(block)[w.WAY])  # [hint]
        told = _part_number(block, number, (first - window) // w.PART_BYTES)
        publish_flag(block, w.PARTS, told)  # [part]


@njit
def _copy_parts(block: Any, turn: int) -> bool:
    """Copy what this rank wants of the others' slots, part by part; False if one has not come."""
    number, window = block[w.FIRST] + turn, turn * block[w.SLOT_BYTES]
    table = carray(pointer(block[w.TABLE]), (block[w.ROWS], 4), np.int64)
    if block[w.AT] == 0:
        _copy_own(block, window, window + block[w.SLOT_BYTES])
    while block[w.AT] * w.PART_BYTES < block[w.SLOT_BYTES]:
        at = window + block[w.AT] * w.PART_BYTES
        stop = min(at + w.PART_BYTES, window + block[w.SLOT_BYTES])
        told = _part_number(block, number, block[w.AT])
        for row in range(block[w.ROWS]):
            peer = table[row, PEER]
            first, last = max(table[row, FROM], at), min(table[row, TO], stop)
            if peer != block[w.RANK] and first < last:
                if not wait_for(block, peer, told):  # [part is there]
                    return False
                far = load(header(block, peer) + 8 * w.STORED) == w.STREAMING  # [hint]
                source = _slot_offset(block, peer, number) + first - window  # [read]
                _copy_row(block, row, source, first, last, far)
        block[w.AT] += 1
    block[w.AT] = 0
    fence()  # [results] that were stored past the caches
    return True


def pipelined_copy(address: int) -> int:
    """As `one_shot_copy`, for streams of many parts: each is read while the next is put."""
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        publish_hash(block, next_round(block))  # [number] [hash]
        begin_stores(block, block[w.LONGEST])
        begin_result(block, block[w.TAKEN])
        block[w.PHASE] = 1
    while block[w.DONE_ROUNDS] < block[w.ROUNDS]:
        turn = block[w.DONE_ROUNDS]
        number = block[w.FIRST] + turn
        if block[w.PHASE] == 1:
            publish_flag(block, w.FILLED, number)  # [filled]
            _put_parts(block, turn)
            block[w.PHASE] = 2
        if block[w.PHASE] == 2 and turn == 0:  # nobody copies before all are known to be alike
            if not wait(block, w.FILLED, number):  # [all filled]
                return w.WAITING
            if not hashes_match(block):  # [hashes]
                return end(block, w.MISMATCH, 1)
            if not details_match(block):  # [hashes]
                return end(block, w.DONE, 1)
            count_waits(block)
        if block[w.PHASE] == 2:
            block[w.PHASE] = 3
        if block[w.PHASE] == 3:
            if not _copy_parts(block, turn):
                return w.WAITING
            block[w.PHASE] = 4
        if not wait(block, w.FILLED, number):  # [all filled]
            return w.WAITING
        block[w.DONE_ROUNDS] = turn + 1
        block[w.PHASE] = 1
    end_result(block)
    end_stores(block)
    return end(block, w.DONE, block[w.ROUNDS])
