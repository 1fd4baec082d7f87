"""Reduction kernels of the node engine, compiled by numba: fill, wait, combine.

Each kind of call (`one_shot` ...) works until it is done or has waited for long; kinds that only
move bytes are in `collectives.node.copy_kernels`. What happens to single elements is up to the
loops of `collectives.kernels.loops`, whose addresses the block holds; so each kind is compiled
once, whatever the dtype. Words, headers and slots are explained in
`collectives.node.control_block`.

Round k uses slot k mod 2 of every rank. In a round each rank

    1. fills its slot, then stores k in its word FILLED,
    2. waits until FILLED >= k on all ranks,
    3. reads the slots of others;
    4. where it makes something that others read: writes it to its slot, stores k in its word READY,
       waits until READY >= k on all ranks, and reads what the others have made.

Why a slot may be filled again in round k + 2: before that its rank has seen either READY >= k, or
FILLED >= k + 1, on all ranks, and each of them stores these only after it has read all that it
needs of round k. Why hashes lie in two words, by the parity of a call's first round: a rank that is
one call ahead must not overwrite what a slow one still compares.

[Words] in brackets name the steps of the model in `tests/unit/node/protocol.py`, which tries every
order in which processors may take them: what one of the two does for others, the other does, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import call_binary, call_unary, copy, fence, pointer
from collectives.node import control_block as w
from collectives.node.copy_kernels import one_shot_copy, pipelined_copy
from collectives.node.result_stores import begin_result, end_result, write_result
from collectives.node.slot_stores import publish_flag, write_slot
from collectives.node.store_autotuner import begin_stores, end_stores
from collectives.node.synchronization import (
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

__all__ = ["direct", "make", "one_shot", "pipelined", "shared"]

# Bytes that two ranks hand over at a time, each adding all that the other brings: a slot, but less
# of arrays that are longer than what their cores' caches keep of them. How many times as fast as
# pipelined, in place, two cores of a Zen 3 that share a cache: by slots of 512 KiB, 512 KiB 1.11 to
# 1.19, 1 MiB 1.09 to 1.15, 4 MiB 1.08 to 1.17, 8 MiB 1.07 to 1.20, 16 MiB 0.94 to 0.98; by 128 KiB,
# 4 MiB 0.87, 12 MiB 1.11, 16 MiB 1.15, 64 MiB 1.04; by 64 KiB, 16 MiB 1.08, 64 MiB 0.96 to 1.07.
# Where they share none: by 512 KiB, 8 MiB 0.97 to 1.00, 16 MiB 1.04; by 256 KiB, 1 MiB 1.10, 4 MiB
# 1.12, 16 MiB 1.17; by 128 KiB, 16 and 64 MiB 0.99 to 1.01; by 32 KiB, 16 MiB 0.92. Elsewhere than
# in place, by 512 KiB, sharing: 512 KiB to 2 MiB 0.90 to 0.91, 16 MiB 0.72.
_LONG_BYTES, _HANDED_OVER_OF_LONG = 1 << 23, 1 << 17


@njit
def _fill(block: Any, dest: int, source: int, n: int) -> None:
    """Copy a contribution to where others read it."""
    width = block[w.WIDTH]
    if not block[w.FILL]:
        write_slot(block, dest, source, n * width)  # [fill]
        return
    for at in range(0, n, w.TILE):
        few = min(w.TILE, n - at)
        call_unary(block[w.FILL], block[w.SCRATCH], source + at * width, few, block[w.SIZE])
        write_slot(block, dest + at * width, block[w.SCRATCH], few * width)  # [fill]


@njit
def _own_contribution(block: Any, source: int, n: int, rank: int) -> int:
    """Return where a contribution that lies in no slot can be read as one that does."""
    if not block[w.FILL]:
        return source
    part = block[w.SCRATCH] + (2 + rank % 2) * w.TILE_BYTES  # two are combined at a time
    call_unary(block[w.FILL], part, source, n, block[w.SIZE])
    return part


@njit
def _accumulate(block: Any, total: int, source: int, n: int, rank: int) -> None:
    """Go on with a sum in rank order."""
    if rank == 0:
        block[w.EARLIER] = source
    elif rank == 1:
        call_binary(block[w.START], total, block[w.EARLIER], source, n)
    else:
        call_unary(block[w.ADD], total, source, n, block[w.SIZE])


@njit
def _save(block: Any, total: int, n: int) -> int:
    """Return where a sum that has grown in a tile lies in the type of the arrays."""
    if not block[w.SAVE]:
        return total
    call_unary(block[w.SAVE], total + w.TILE_BYTES, total, n, block[w.SIZE])
    return total + w.TILE_BYTES


@njit
def _combine_all(block: Any, at: int, n: int) -> None:
    """Combine so many elements of all ranks, each of whose slots is read."""
    offset = at * block[w.WIDTH]
    dest = block[w.OUT] + offset
    total = block[w.SCRATCH] if block[w.SAVE] else dest
    for rank in range(block[w.SIZE]):
        source = slot(block, rank, block[w.FIRST]) + offset  # [read]
        _accumulate(block, total, source, n, rank)
    if block[w.SAVE]:
        call_unary(block[w.SAVE], dest, total, n, block[w.SIZE])


@njit
def _combine_two(block: Any, number: int, start: int, at: int, n: int) -> None:
    """Combine so many elements of two ranks; this one's are read where they are.

    The slot of a round begins with an element `start`, and these are `at` elements behind it.
    The loops of two arrays do all at once: divide, add and round.

    Two slots, whose addresses differ by a power of two, drive each other's lines out of the level 1
    cache of some processors.
    """
    me, offset = block[w.RANK], (start + at) * block[w.WIDTH]
    dest = block[w.OUT] + offset
    own = block[w.SEND] + offset
    theirs = slot(block, 1 - me, number) + at * block[w.WIDTH]  # [read]
    if own == dest:
        call_unary(block[w.ADD] if me == 0 else block[w.BEHIND], dest, theirs, n, 2)
    elif me == 0:
        call_binary(block[w.START], dest, own, theirs, n)
    else:
        call_binary(block[w.START], dest, theirs, own, n)


def one_shot(address: int) -> int:
    """Reduce arrays that fit in a slot: one round, in which every rank combines all arrays.

    All ranks combine in rank order, so all get the same bits.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    count = block[w.COUNT]
    if block[w.PHASE] == 0:
        number = next_round(block)  # [number]
        begin_stores(block, count * block[w.WIDTH])
        _fill(block, slot(block, block[w.RANK], number), block[w.SEND], count)
        publish_hash(block, number)  # [hash]
        publish_flag(block, w.FILLED, number)  # [filled]
        block[w.PHASE] = 1
    if not wait(block, w.FILLED, block[w.FIRST]):  # [all filled]
        return w.WAITING
    if not hashes_match(block):  # [hashes]
        return end(block, w.MISMATCH, 1)
    for at in range(0, count, w.TILE):
        n = min(w.TILE, count - at)
        if block[w.SIZE] == 2:
            _combine_two(block, block[w.FIRST], 0, at, n)
        else:
            _combine_all(block, at, n)
    end_stores(block)
    return end(block, w.DONE, 1)


@njit
def _piece(block: Any) -> int:
    """Return the bytes of a piece: a rank's part of a slot, in whole cache lines."""
    return block[w.SLOT_BYTES] // block[w.SIZE] // 64 * 64


@njit
def _span(block: Any, owner: int, turn: int) -> tuple[int, int]:
    """Return the first element of a piece of a rank's chunk, and how many it has."""
    bounds = carray(pointer(block[w.BOUNDS]), block[w.SIZE] + 1, np.int64)
    length = _piece(block) // block[w.WIDTH]
    start = bounds[owner] + turn * length
    return start, max(0, min(length, bounds[owner + 1] - start))


@njit
def _round_count(block: Any) -> int:
    """Return the rounds that the longest chunk needs."""
    bounds = carray(pointer(block[w.BOUNDS]), block[w.SIZE] + 1, np.int64)
    longest = 1
    for owner in range(block[w.SIZE]):
        longest = max(longest, bounds[owner + 1] - bounds[owner])
    return -(-longest // (_piece(block) // block[w.WIDTH]))


@njit
def _number(block: Any, turn: int) -> int:
    """Return the number of a round of a call that has several."""
    return block[w.FIRST] + block[w.MET] + turn


@njit
def _contribute(block: Any, turn: int) -> None:
    """Fill this rank's slot for a round of a pipelined call."""
    number = _number(block, turn)
    own = slot(block, block[w.RANK], number)
    for owner in range(block[w.SIZE]):
        if owner != block[w.RANK]:  # the own part is read where it is
            start, n = _span(block, owner, turn)
            dest = own + owner * _piece(block)
            _fill(block, dest, block[w.SEND] + start * block[w.WIDTH], n)
    publish_flag(block, w.FILLED, number)  # [filled]


@njit
def _begin_pieces(block: Any) -> None:
    """Fill the slot for the first round of pieces, and say how the result is stored."""
    elsewhere = block[w.SEND] != block[w.OUT] and block[w.TAKE] == w.TAKE_ALL
    begin_result(block, block[w.COUNT] * block[w.WIDTH] if elsewhere else 0)
    _contribute(block, 0)
    block[w.PHASE] = 1


@njit
def _combine_piece(block: Any, turn: int) -> None:
    """Combine the own piece of all ranks, and put it where the others look for it."""
    number, me, width = _number(block, turn), block[w.RANK], block[w.WIDTH]
    place = me * _piece(block)
    start, count = _span(block, me, turn)
    for at in range(0, count, w.TILE):
        n = min(w.TILE, count - at)
        offset = (start + at) * width
        for rank in range(block[w.SIZE]):
            if rank == me:
                source = _own_contribution(block, block[w.SEND] + offset, n, rank)
            else:
                source = slot(block, rank, number) + place + at * width  # [read]
            _accumulate(block, block[w.SCRATCH], source, n, rank)
        result = _save(block, block[w.SCRATCH], n)
        if block[w.TAKE] != w.TAKE_NONE:
            write_result(block, block[w.OUT] + offset, result, n * width, False)
        if block[w.TAKE] != w.TAKE_OWN:
            dest = slot(block, me, number) + place + at * width
            write_slot(block, dest, result, n * width)  # [make]
    publish_flag(block, w.READY, number)  # [made]


@njit
def _collect(block: Any, turn: int) -> None:
    """Copy the other ranks' results of a round."""
    number, width = _number(block, turn), block[w.WIDTH]
    for owner in range(block[w.SIZE]):
        if owner != block[w.RANK]:
            start, n = _span(block, owner, turn)
            source = slot(block, owner, number) + owner * _piece(block)  # [take]
            write_result(block, block[w.OUT] + start * width, source, n * width, False)
    fence()  # [results] that were stored past the caches


@njit
def _continue_pipelined(block: Any) -> int:
    """Go on with `pipelined`, whose first contribution is in the slot."""
    total = _round_count(block)
    while block[w.DONE_ROUNDS] < total:
        turn = block[w.DONE_ROUNDS]
        if block[w.PHASE] == 1:
            if not wait(block, w.FILLED, _number(block, turn)):  # [all filled]
                return w.WAITING
            if turn == 0 and not hashes_match(block):  # [hashes]
                return end(block, w.MISMATCH, 1)
            if turn + 1 < total:
                _contribute(block, turn + 1)
            _combine_piece(block, turn)
            block[w.PHASE] = 2
        if not wait(block, w.READY, _number(block, turn)):  # [all made]
            return w.WAITING
        if block[w.TAKE] == w.TAKE_ALL:
            _collect(block, turn)
        block[w.DONE_ROUNDS] = turn + 1
        block[w.PHASE] = 1
    end_result(block)
    end_stores(block)
    return end(block, w.DONE, block[w.MET] + total)


def pipelined(address: int) -> int:
    """Reduce arrays of any size: each rank combines its chunk, piece by piece.

    Round j of the call handles the j-th piece of every chunk. While a rank waits for the others'
    results of one round, its contributions to the next are in its other slot already. A piece has
    its place in a slot by its owner: what others bring for it, and in the owner's slot the result.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        publish_hash(block, next_round(block))  # [number] [hash]
        begin_stores(block, block[w.COUNT] * block[w.WIDTH])
        _begin_pieces(block)
    return _continue_pipelined(block)


@njit
def _handed_over(block: Any) -> int:
    """Return the bytes that go into a slot in a round of `direct`."""
    if block[w.COUNT] * block[w.WIDTH] <= _LONG_BYTES:
        return block[w.SLOT_BYTES]
    return min(block[w.SLOT_BYTES], _HANDED_OVER_OF_LONG)


@njit
def _continue_direct(block: Any) -> int:
    """Go on with `direct`, slot by slot."""
    length = _handed_over(block) // block[w.WIDTH]
    total = -(-block[w.COUNT] // length)
    while block[w.DONE_ROUNDS] < total:
        turn = block[w.DONE_ROUNDS]
        number, start = _number(block, turn), turn * length
        count = min(length, block[w.COUNT] - start)
        if block[w.PHASE] == 4:
            source = block[w.SEND] + start * block[w.WIDTH]
            _fill(block, slot(block, block[w.RANK], number), source, count)
            publish_flag(block, w.FILLED, number)  # [filled]
            block[w.PHASE] = 5
        if not wait(block, w.FILLED, number):  # [all filled]
            return w.WAITING
        for at in range(0, count, w.TILE):
            _combine_two(block, number, start, at, min(w.TILE, count - at))
        block[w.DONE_ROUNDS] = turn + 1
        block[w.PHASE] = 4
    end_stores(block)
    return end(block, w.DONE, block[w.MET] + total)


def direct(address: int) -> int:
    """Reduce arrays of two ranks, each of which brings all that it has, a slot at a time, and adds.

    As many bytes as by pieces go from core to core, with half of the waits; but each rank reads its
    own array twice. That pays where the result takes its place. So the ranks meet before, say
    whether it does (DETAIL), and go on as `pipelined` where it does not for one of them.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        block[w.MET] = 1
        block[w.DETAIL] = w.IN_PLACE if block[w.SEND] == block[w.OUT] else w.ELSEWHERE
        number = next_round(block)  # [number]
        publish_hash(block, number)  # [hash]
        publish_flag(block, w.FILLED, number)  # [filled]
        block[w.PHASE] = 3
    if block[w.PHASE] == 3:
        if not wait(block, w.FILLED, block[w.FIRST]):  # [all filled]
            return w.WAITING
        if not hashes_match(block):  # [hashes]
            return end(block, w.MISMATCH, 1)
        in_place = all_equal(block, w.IN_PLACE)  # [hashes]
        begin_stores(block, block[w.COUNT] * block[w.WIDTH])
        if in_place:
            block[w.PHASE] = 4
        else:
            _begin_pieces(block)
    return _continue_pipelined(block) if block[w.PHASE] < 3 else _continue_direct(block)


@njit
def _combine_shared(block: Any) -> None:
    """Combine the own chunk of all ranks' arrays, and write it into all of them."""
    table = carray(pointer(block[w.TABLE]), block[w.SIZE], np.int64)
    bounds = carray(pointer(block[w.BOUNDS]), block[w.SIZE] + 1, np.int64)
    stop = bounds[block[w.RANK] + 1]
    width = block[w.WIDTH]
    for at in range(bounds[block[w.RANK]], stop, w.TILE):
        n = min(w.TILE, stop - at)
        for rank in range(block[w.SIZE]):
            source = _own_contribution(block, table[rank] + at * width, n, rank)  # [read arrays]
            _accumulate(block, block[w.SCRATCH], source, n, rank)
        result = _save(block, block[w.SCRATCH], n)
        for rank in range(block[w.SIZE]):
            copy(table[rank] + at * width, result, n * width)  # [write arrays]


def shared(address: int) -> int:
    """Reduce arrays that lie in shared memory, in place: no copy at all.

    Each rank combines its chunk of all arrays and writes the result into all of them.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        number = next_round(block)  # [number]
        publish_hash(block, number)  # [hash]
        publish_flag(block, w.FILLED, number)  # [filled]
        block[w.PHASE] = 1
    if block[w.PHASE] == 1:
        if not wait(block, w.FILLED, block[w.FIRST]):  # [all filled]
            return w.WAITING
        if not hashes_match(block):  # [hashes]
            return end(block, w.MISMATCH, 1)
        _combine_shared(block)
        publish_flag(block, w.READY, block[w.FIRST])  # [made]
        block[w.PHASE] = 2
    if not wait(block, w.READY, block[w.FIRST]):  # [all made]
        return w.WAITING
    return end(block, w.DONE, 1)


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a kind of call; arguments as `machine_code.load`."""
    return numba_compiler.python_code(_record_times(_KINDS[kind]), symbol, arguments=3)


def _record_times(kind: Callable[[int], int]) -> Callable[[int, int, int], int]:
    """Let a kind of call record when it begins and ends, if it is given where, and its number."""
    work: Any = njit(kind)

    def run(address: int, times: int, number: int) -> int:
        block = carray(pointer(address), w.WORDS, np.int64)
        if times:
            begins(block, times, number)
        status: int = work(address)
        if times and status == w.DONE:
            ends(block, times, number)
        return status

    return run


_KINDS = {
    kind.__name__: kind
    for kind in (one_shot, pipelined, direct, shared, one_shot_copy, pipelined_copy)
}
