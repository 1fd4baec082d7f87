"""Reduction kernels of the node engine, compiled by numba: fill, wait, combine.

A kernel (`one_shot`, ...) runs until its call is done or a wait has polled for long.
`collectives.node.copy_kernels` has the kernels that only move bytes. `collectives.node.tiles`
combines elements by loops whose addresses the block holds, so each kernel is compiled once for all
dtypes. `collectives.node.control_block` explains blocks, headers and slots.

Round k uses slot k mod 2 of every rank. In a round each rank

    1. fills its slot, then stores k in `filled` of its header,
    2. waits until `filled` >= k on all ranks,
    3. reads the slots of other ranks;
    4. if it makes a result for other ranks: writes the result to its slot, stores k in `ready` of
       its header, waits until `ready` >= k on all ranks, and reads the other ranks' results.

A slot may be refilled in round k + 2. By then its rank has seen `ready` >= k or `filled` >= k + 1
on all ranks, and each rank stores either only after it has read all it needs of round k. A header
has two hashes, selected by the parity of a call's first round: a rank that is one call ahead must
not overwrite the hash that a slow rank still compares.

[Words] in brackets name the steps of the model in `tests/unit/node/protocol.py`. The model tries
every order in which processors may execute the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import copy, fence, pointer, record
from collectives.node.control_block import (
    BLOCK,
    DONE,
    ELSEWHERE,
    IN_PLACE,
    MISMATCH,
    TILE,
    WAITING,
    WANT_ALL,
    WANT_NONE,
    WANT_OWN,
)
from collectives.node.copy_kernels import one_shot_copy, pipelined_copy
from collectives.node.result_stores import begin_result, end_result, write_result
from collectives.node.slot_stores import publish_flag, write_slot
from collectives.node.store_autotuner import begin_stores, end_stores
from collectives.node.synchronization import (
    FIELD,
    all_equal,
    begins,
    end,
    ends,
    hashes_match,
    next_round,
    publish_hash,
    slot,
    wait,
)
from collectives.node.tiles import (
    accumulate,
    combine_all,
    combine_two,
    fill,
    own_contribution,
    save,
)

__all__ = ["all_words", "direct", "make", "one_shot", "pipelined", "shared"]

# Bytes that two ranks exchange per round of `direct`: a slot, but less of arrays that exceed the
# caches of their cores. Speed over pipelined, in place, on two cores of a Zen 3:
#     with a common cache, by 512 KiB: 512 KiB 1.11 to 1.19, 1 MiB 1.09 to 1.15, 4 MiB 1.08 to 1.17,
#       8 MiB 1.07 to 1.20, 16 MiB 0.94 to 0.98
#     by 128 KiB: 4 MiB 0.87, 12 MiB 1.11, 16 MiB 1.15, 64 MiB 1.04
#     by 64 KiB: 16 MiB 1.08, 64 MiB 0.96 to 1.07
#     without one, by 512 KiB: 8 MiB 0.97 to 1.00, 16 MiB 1.04
#     by 256 KiB: 1 MiB 1.10, 4 MiB 1.12, 16 MiB 1.17
#     by 128 KiB: 16 and 64 MiB 0.99 to 1.01; by 32 KiB: 16 MiB 0.92
# Out of place, by 512 KiB, with a common cache: 512 KiB to 2 MiB 0.90 to 0.91, 16 MiB 0.72.
_LONG_BYTES, _HANDED_OVER_OF_LONG = 1 << 23, 1 << 17


def one_shot(address: int) -> int:
    """Reduce arrays that fit in a slot: one round, in which every rank combines all arrays.

    All ranks combine in rank order, so all get the same bits.
    """
    block = record(address, BLOCK)
    count = block.count
    if block.phase == 0:
        number = next_round(block)  # [number]
        begin_stores(block, count * block.itemsize)
        fill(block, slot(block, block.rank, number), block.send, count)
        publish_hash(block, number)  # [hash]
        publish_flag(block, FIELD.filled, number)  # [filled]
        block.phase = 1
    if not wait(block, FIELD.filled, block.first_round):  # [all filled]
        return WAITING
    if not hashes_match(block):  # [hashes]
        return end(block, MISMATCH, 1)
    for at in range(0, count, TILE):
        n = min(TILE, count - at)
        if block.size == 2:
            combine_two(block, block.first_round, 0, at, n)
        else:
            combine_all(block, at, n)
    end_stores(block)
    return end(block, DONE, 1)


@njit
def _span(block: Any, owner: int, turn: int) -> tuple[int, int]:
    """Return the first element of a piece of a rank's chunk, and its number of elements."""
    bounds = carray(pointer(block.bounds), block.size + 1, np.int64)
    length = block.piece_bytes // block.itemsize
    start = bounds[owner] + turn * length
    return start, max(0, min(length, bounds[owner + 1] - start))


@njit
def _round_count(block: Any) -> int:
    """Return the number of rounds that the longest chunk needs, at least 1."""
    bounds = carray(pointer(block.bounds), block.size + 1, np.int64)
    longest = 1
    for owner in range(block.size):
        longest = max(longest, bounds[owner + 1] - bounds[owner])
    return -(-longest // (block.piece_bytes // block.itemsize))


@njit
def _number(block: Any, turn: int) -> int:
    return block.first_round + block.sync_rounds + turn


@njit
def _contribute(block: Any, turn: int) -> None:
    """Fill this rank's slot for a round of a pipelined call."""
    number = _number(block, turn)
    own = slot(block, block.rank, number)
    for owner in range(block.size):
        if owner != block.rank:  # the own piece is read from `send`
            start, n = _span(block, owner, turn)
            dest = own + owner * block.piece_bytes
            fill(block, dest, block.send + start * block.itemsize, n)
    publish_flag(block, FIELD.filled, number)  # [filled]


@njit
def _begin_pieces(block: Any) -> None:
    """Fill the slot for the first round of pieces, and choose how the result is stored."""
    elsewhere = block.send != block.out and block.want == WANT_ALL
    begin_result(block, block.count * block.itemsize if elsewhere else 0)
    _contribute(block, 0)
    block.phase = 1


@njit
def _combine_piece(block: Any, turn: int) -> None:
    """Combine all ranks' copies of the own piece, and store the result for the other ranks."""
    number, me, width = _number(block, turn), block.rank, block.itemsize
    place = me * block.piece_bytes
    start, count = _span(block, me, turn)
    for at in range(0, count, TILE):
        n = min(TILE, count - at)
        offset = (start + at) * width
        for rank in range(block.size):
            if rank == me:
                source = own_contribution(block, block.send + offset, n, rank)
            else:
                source = slot(block, rank, number) + place + at * width  # [read]
            accumulate(block, block.scratch, source, n, rank)
        result = save(block, block.scratch, n)
        if block.want != WANT_NONE:
            write_result(block, block.out + offset, result, n * width, False)
        if block.want != WANT_OWN:
            dest = slot(block, me, number) + place + at * width
            write_slot(block, dest, result, n * width)  # [make]
    publish_flag(block, FIELD.ready, number)  # [made]


@njit
def _collect(block: Any, turn: int) -> None:
    """Copy the other ranks' results of a round."""
    number, width = _number(block, turn), block.itemsize
    for owner in range(block.size):
        if owner != block.rank:
            start, n = _span(block, owner, turn)
            source = slot(block, owner, number) + owner * block.piece_bytes  # [take]
            write_result(block, block.out + start * width, source, n * width, False)
    fence()  # [results] orders streaming stores of results before the next flag


@njit
def _continue_pipelined(block: Any) -> int:
    """Run the rounds of `pipelined`, whose first contribution is in the slot."""
    total = _round_count(block)
    while block.done_rounds < total:
        turn = block.done_rounds
        if block.phase == 1:
            if not wait(block, FIELD.filled, _number(block, turn)):  # [all filled]
                return WAITING
            if turn == 0 and not hashes_match(block):  # [hashes]
                return end(block, MISMATCH, 1)
            if turn + 1 < total:  # before combining: other ranks can then enter the next round
                _contribute(block, turn + 1)
            _combine_piece(block, turn)
            block.phase = 2
        if not wait(block, FIELD.ready, _number(block, turn)):  # [all made]
            return WAITING
        if block.want == WANT_ALL:
            _collect(block, turn)
        block.done_rounds = turn + 1
        block.phase = 1
    end_result(block)
    end_stores(block)
    return end(block, DONE, block.sync_rounds + total)


def pipelined(address: int) -> int:
    """Reduce arrays of any size: each rank combines its chunk, piece by piece.

    Round j of the call handles piece j of every chunk. Before a rank waits for the results of a
    round, it stores its contributions to the next round in its other slot. A piece has a fixed
    place in a slot, by its owner. In other ranks' slots the place holds their contributions, in the
    owner's slot the result.
    """
    block = record(address, BLOCK)
    if block.phase == 0:
        publish_hash(block, next_round(block))  # [number] [hash]
        begin_stores(block, block.count * block.itemsize)
        _begin_pieces(block)
    return _continue_pipelined(block)


@njit
def _handed_over(block: Any) -> int:
    """Return the bytes that each rank stores in its slot in a round of `direct`."""
    if block.count * block.itemsize <= _LONG_BYTES:
        return block.slot_bytes
    return min(block.slot_bytes, _HANDED_OVER_OF_LONG)


@njit
def _continue_direct(block: Any) -> int:
    """Run the rounds of `direct`, slot by slot."""
    length = _handed_over(block) // block.itemsize
    total = -(-block.count // length)
    while block.done_rounds < total:
        turn = block.done_rounds
        number, start = _number(block, turn), turn * length
        count = min(length, block.count - start)
        if block.phase == 4:
            source = block.send + start * block.itemsize
            fill(block, slot(block, block.rank, number), source, count)
            publish_flag(block, FIELD.filled, number)  # [filled]
            block.phase = 5
        if not wait(block, FIELD.filled, number):  # [all filled]
            return WAITING
        for at in range(0, count, TILE):
            combine_two(block, number, start, at, min(TILE, count - at))
        block.done_rounds = turn + 1
        block.phase = 4
    end_stores(block)
    return end(block, DONE, block.sync_rounds + total)


def direct(address: int) -> int:
    """Reduce arrays of two ranks: each rank publishes its whole array and adds both.

    As many bytes pass between the cores as with pieces, with half of the waits; but each rank reads
    its own array twice. That pays if the result overwrites the input. So the ranks first exchange
    whether it does (`detail`). If it does not on one rank, both run `pipelined` instead.
    """
    block = record(address, BLOCK)
    if block.phase == 0:
        block.sync_rounds = 1
        block.detail = IN_PLACE if block.send == block.out else ELSEWHERE
        number = next_round(block)  # [number]
        publish_hash(block, number)  # [hash]
        publish_flag(block, FIELD.filled, number)  # [filled]
        block.phase = 3
    if block.phase == 3:
        if not wait(block, FIELD.filled, block.first_round):  # [all filled]
            return WAITING
        if not hashes_match(block):  # [hashes]
            return end(block, MISMATCH, 1)
        in_place = all_equal(block, IN_PLACE)  # [hashes]
        begin_stores(block, block.count * block.itemsize)
        if in_place:
            block.phase = 4
        else:
            _begin_pieces(block)
    return _continue_pipelined(block) if block.phase < 3 else _continue_direct(block)


@njit
def _combine_shared(block: Any) -> None:
    """Combine the own chunk of all ranks' arrays, and write it into all of them."""
    table = carray(pointer(block.table), block.size, np.int64)
    bounds = carray(pointer(block.bounds), block.size + 1, np.int64)
    stop = bounds[block.rank + 1]
    width = block.itemsize
    for at in range(bounds[block.rank], stop, TILE):
        n = min(TILE, stop - at)
        for rank in range(block.size):
            source = own_contribution(block, table[rank] + at * width, n, rank)  # [read arrays]
            accumulate(block, block.scratch, source, n, rank)
        result = save(block, block.scratch, n)
        for rank in range(block.size):
            copy(table[rank] + at * width, result, n * width)  # [write arrays]


def shared(address: int) -> int:
    """Reduce arrays in shared memory in place, without copies.

    Each rank combines its chunk of all arrays, and writes the result into all of them.
    """
    block = record(address, BLOCK)
    if block.phase == 0:
        number = next_round(block)  # [number]
        publish_hash(block, number)  # [hash]
        publish_flag(block, FIELD.filled, number)  # [filled]
        block.phase = 1
    if block.phase == 1:
        if not wait(block, FIELD.filled, block.first_round):  # [all filled]
            return WAITING
        if not hashes_match(block):  # [hashes]
            return end(block, MISMATCH, 1)
        _combine_shared(block)
        publish_flag(block, FIELD.ready, block.first_round)  # [made]
        block.phase = 2
    if not wait(block, FIELD.ready, block.first_round):  # [all made]
        return WAITING
    return end(block, DONE, 1)


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all kernels."""
    return ((kind,) for kind in _KINDS)


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a kernel; arguments as `machine_code.load`."""
    return numba_compiler.python_code(_record_times(_KINDS[kind]), symbol, arguments=3)


def _record_times(kind: Callable[[int], int]) -> Callable[[int, int, int], int]:
    """Return a kernel that also records its times, if it gets the address of a CALL_TIMES."""
    work: Any = njit(kind)

    def run(address: int, times: int, number: int) -> int:
        block = record(address, BLOCK)
        if times:
            begins(block, times, number)
        status: int = work(address)
        if times and status == DONE:
            ends(block, times, number)
        return status

    return run


_KINDS = {
    kind.__name__: kind
    for kind in (one_shot, pipelined, direct, shared, one_shot_copy, pipelined_copy)
}
