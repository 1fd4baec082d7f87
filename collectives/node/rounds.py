"""The rounds in which ranks of a node meet, compiled by numba at first use: fill, wait, combine.

`collectives.node.words` says what a kind of call (`one_shot` ...) gets and returns, and what it
works on. What happens to single elements is up to the loops of `collectives.kernels.loops`, whose
addresses the block holds; so each kind is compiled once, whatever the dtype.

All calls of a communicator are cut into numbered *rounds*; round k uses slot k mod 2 of every rank.
In a round each rank

    1. fills its slot, then stores k in its word FILLED,
    2. waits until FILLED >= k on all ranks,
    3. reads the slots of others;
    4. where it makes something that others read: writes it to its slot, stores k in its word READY,
       waits until READY >= k on all ranks, and reads what the others have made.

Why a slot may be filled again in round k + 2: before that its rank has seen either READY >= k, or
FILLED >= k + 1, on all ranks, and each of them stores these only after it has read all that it
needs of round k. Why hashes lie in two words, by the parity of a call's first round: a rank that is
one call ahead must not overwrite what a slow one still compares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels import compiling
from collectives.kernels.intrinsics import call, copy, load, pause, pointer, sched_yield, store
from collectives.node import words as w

__all__ = ["make", "one_shot", "pipelined", "publish", "shared"]


@njit
def _wait(block: Any, word: int, target: int) -> bool:
    """Wait until a word of all headers has reached the target; False after too many polls."""
    spins, yields = block[w.SPINS], block[w.YIELDS]
    for rank in range(block[w.SIZE]):
        address = block[w.HEADERS] + rank * w.HEADER_BYTES + 8 * word
        polls = 0
        while load(address) < target:
            polls += 1
            if polls <= spins:
                pause()
            elif polls <= spins + yields:
                sched_yield()
            else:
                block[w.MISSING] = rank
                return False
    return True


@njit
def _header(block: Any, rank: int) -> int:
    return block[w.HEADERS] + rank * w.HEADER_BYTES


@njit
def _slot(block: Any, rank: int, number: int) -> int:
    """Return the address of a rank's slot in a round."""
    return block[w.SLOTS] + (2 * rank + number % 2) * block[w.SLOT_BYTES]


@njit
def _announce(block: Any, first: int) -> None:
    """Begin a call: put its hash where the others look for it, before FILLED is stored."""
    block[w.FIRST] = first
    store(_header(block, block[w.RANK]) + 8 * (w.HASHES + first % 2), block[w.HASH])


@njit
def _agreed(block: Any) -> bool:
    """Compare the hashes of all ranks, each of which has filled the call's first round."""
    for rank in range(block[w.SIZE]):
        if load(_header(block, rank) + 8 * (w.HASHES + block[w.FIRST] % 2)) != block[w.HASH]:
            return False
    return True


@njit
def _end(block: Any, status: int, rounds: int) -> int:
    """End a call after some rounds, and make the block ready for the next."""
    carray(pointer(block[w.COUNTER]), 1, np.int64)[0] = block[w.FIRST] + rounds - 1
    block[w.PHASE] = 0
    block[w.DONE_ROUNDS] = 0
    return status


@njit
def _next_round(block: Any) -> int:
    return carray(pointer(block[w.COUNTER]), 1, np.int64)[0] + 1


@njit
def _fill(block: Any, source: int, dest: int, n: int) -> None:
    """Copy a contribution to where others read it."""
    if block[w.FILL]:
        call(block[w.FILL], dest, source, n, block[w.SIZE])
    else:
        copy(dest, source, n * block[w.WIDTH])


@njit
def _accumulate(block: Any, dest: int, source: int, n: int, first: bool) -> None:
    """Start a sum that belongs at `dest`, or go on with it.

    It grows where it belongs, unless its working type is another than that of the arrays.
    """
    total = block[w.SCRATCH] if block[w.SAVE] else dest
    if not first:
        call(block[w.ADD], total, source, n, block[w.SIZE])
    elif block[w.START]:
        call(block[w.START], total, source, n, block[w.SIZE])
    elif source != total:
        copy(total, source, n * block[w.WIDTH])


@njit
def _save(block: Any, dest: int, n: int) -> None:
    """End a sum that belongs at `dest`."""
    if block[w.SAVE]:
        call(block[w.SAVE], dest, block[w.SCRATCH], n, block[w.SIZE])


@njit
def _own(block: Any, source: int, n: int) -> int:
    """Return where this rank's own contribution can be read as the others' can."""
    if not block[w.FILL]:
        return source
    part = block[w.SCRATCH] + w.TILE_BYTES
    _fill(block, source, part, n)
    return part


def one_shot(address: int) -> int:
    """Reduce arrays that fit in a slot: one round, in which every rank reads all slots.

    All ranks combine in rank order, so all get the same bits.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    count, width = block[w.COUNT], block[w.WIDTH]
    if block[w.PHASE] == 0:
        number = _next_round(block)
        _fill(block, block[w.SEND], _slot(block, block[w.RANK], number), count)
        _announce(block, number)
        store(_header(block, block[w.RANK]) + 8 * w.FILLED, number)
        block[w.PHASE] = 1
    number = block[w.FIRST]
    if not _wait(block, w.FILLED, number):
        return w.WAITING
    if not _agreed(block):
        return _end(block, w.MISMATCH, 1)
    for at in range(0, count, w.TILE):
        n = min(w.TILE, count - at)
        dest = block[w.OUT] + at * width
        for rank in range(block[w.SIZE]):
            source = _slot(block, rank, number) + at * width
            _accumulate(block, dest, source, n, rank == 0)
        _save(block, dest, n)
    return _end(block, w.DONE, 1)


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
def _turns(block: Any) -> int:
    """Return the rounds that the longest chunk needs."""
    bounds = carray(pointer(block[w.BOUNDS]), block[w.SIZE] + 1, np.int64)
    longest = 1
    for owner in range(block[w.SIZE]):
        longest = max(longest, bounds[owner + 1] - bounds[owner])
    return -(-longest // (_piece(block) // block[w.WIDTH]))


@njit
def _contribute(block: Any, turn: int) -> None:
    """Fill this rank's slot for a round of a pipelined call."""
    number = block[w.FIRST] + turn
    slot = _slot(block, block[w.RANK], number)
    for owner in range(block[w.SIZE]):
        if owner != block[w.RANK]:  # the own part is read where it is
            start, n = _span(block, owner, turn)
            dest = slot + owner * _piece(block)
            _fill(block, block[w.SEND] + start * block[w.WIDTH], dest, n)
    store(_header(block, block[w.RANK]) + 8 * w.FILLED, number)


@njit
def _combine_piece(block: Any, turn: int) -> None:
    """Combine the own piece of all ranks, and put it where the others look for it."""
    number, me, width = block[w.FIRST] + turn, block[w.RANK], block[w.WIDTH]
    place = me * _piece(block)
    start, count = _span(block, me, turn)
    for at in range(0, count, w.TILE):
        n = min(w.TILE, count - at)
        dest = _slot(block, me, number) + place + at * width
        for rank in range(block[w.SIZE]):
            if rank == me:
                source = _own(block, block[w.SEND] + (start + at) * width, n)
            else:
                source = _slot(block, rank, number) + place + at * width
            _accumulate(block, dest, source, n, rank == 0)
        _save(block, dest, n)
        if block[w.TAKE] != w.TAKE_NONE:
            copy(block[w.OUT] + (start + at) * width, dest, n * width)
    store(_header(block, me) + 8 * w.READY, number)


@njit
def _collect(block: Any, turn: int) -> None:
    """Copy the other ranks' results of a round."""
    number, width = block[w.FIRST] + turn, block[w.WIDTH]
    for owner in range(block[w.SIZE]):
        if owner != block[w.RANK]:
            start, n = _span(block, owner, turn)
            source = _slot(block, owner, number) + owner * _piece(block)
            copy(block[w.OUT] + start * width, source, n * width)


def pipelined(address: int) -> int:
    """Reduce arrays of any size: each rank combines its chunk, piece by piece.

    Round j of the call handles the j-th piece of every chunk. While a rank waits for the others'
    results of one round, its contributions to the next are in its other slot already. A piece has
    its place in a slot by its owner: what others bring for it, and in the owner's slot the result.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    total = _turns(block)
    if block[w.PHASE] == 0:
        _announce(block, _next_round(block))
        _contribute(block, 0)
        block[w.PHASE] = 1
    while block[w.DONE_ROUNDS] < total:
        turn = block[w.DONE_ROUNDS]
        if block[w.PHASE] == 1:
            if not _wait(block, w.FILLED, block[w.FIRST] + turn):
                return w.WAITING
            if turn == 0 and not _agreed(block):
                return _end(block, w.MISMATCH, 1)
            if turn + 1 < total:
                _contribute(block, turn + 1)
            _combine_piece(block, turn)
            block[w.PHASE] = 2
        if not _wait(block, w.READY, block[w.FIRST] + turn):
            return w.WAITING
        if block[w.TAKE] == w.TAKE_ALL:
            _collect(block, turn)
        block[w.DONE_ROUNDS] = turn + 1
        block[w.PHASE] = 1
    return _end(block, w.DONE, total)


@njit
def _combine_shared(block: Any) -> None:
    """Combine the own chunk of all ranks' arrays, and write it into all of them."""
    table = carray(pointer(block[w.TABLE]), block[w.SIZE], np.int64)
    bounds = carray(pointer(block[w.BOUNDS]), block[w.SIZE] + 1, np.int64)
    end = bounds[block[w.RANK] + 1]
    width = block[w.WIDTH]
    for at in range(bounds[block[w.RANK]], end, w.TILE):
        n = min(w.TILE, end - at)
        dest = table[0] + at * width
        for rank in range(block[w.SIZE]):
            source = _own(block, table[rank] + at * width, n)
            _accumulate(block, dest, source, n, rank == 0)
        _save(block, dest, n)
        for rank in range(1, block[w.SIZE]):
            copy(table[rank] + at * width, dest, n * width)


def shared(address: int) -> int:
    """Reduce arrays that lie in shared memory, in place: no copy at all.

    Each rank combines its chunk of all arrays and writes the result into all of them.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        number = _next_round(block)
        _announce(block, number)
        store(_header(block, block[w.RANK]) + 8 * w.FILLED, number)
        block[w.PHASE] = 1
    if block[w.PHASE] == 1:
        if not _wait(block, w.FILLED, block[w.FIRST]):
            return w.WAITING
        if not _agreed(block):
            return _end(block, w.MISMATCH, 1)
        _combine_shared(block)
        store(_header(block, block[w.RANK]) + 8 * w.READY, block[w.FIRST])
        block[w.PHASE] = 2
    if not _wait(block, w.READY, block[w.FIRST]):
        return w.WAITING
    return _end(block, w.DONE, 1)


@njit
def _copy_wanted(block: Any, turn: int) -> None:
    """Copy what this rank wants of the others' slots."""
    table = carray(pointer(block[w.TABLE]), (block[w.ROWS], 4), np.int64)
    window = turn * block[w.SLOT_BYTES]
    for row in range(block[w.ROWS]):
        start = max(table[row, w.FROM], window)
        stop = min(table[row, w.TO], window + block[w.SLOT_BYTES])
        if start < stop:
            source = _slot(block, table[row, w.PEER], block[w.FIRST] + turn) + start - window
            dest = block[w.OUT] + table[row, w.DEST] + start - table[row, w.FROM]
            copy(dest, source, stop - start)


def publish(address: int) -> int:
    """Let every rank publish a stream of bytes, and copy what it wants of the others' streams.

    Broadcast, gather, all-gather, scatter and all-to-all differ only in who publishes what and who
    copies what.
    """
    block = carray(pointer(address), w.WORDS, np.int64)
    if block[w.PHASE] == 0:
        _announce(block, _next_round(block))
    while block[w.DONE_ROUNDS] < block[w.ROUNDS]:
        turn = block[w.DONE_ROUNDS]
        number = block[w.FIRST] + turn
        if block[w.PHASE] != 2:
            at = turn * block[w.SLOT_BYTES]
            n = max(0, min(block[w.SLOT_BYTES], block[w.COUNT] - at))
            copy(_slot(block, block[w.RANK], number), block[w.SEND] + at, n)
            store(_header(block, block[w.RANK]) + 8 * w.FILLED, number)
            block[w.PHASE] = 2
        if not _wait(block, w.FILLED, number):
            return w.WAITING
        if turn == 0 and not _agreed(block):
            return _end(block, w.MISMATCH, 1)
        _copy_wanted(block, turn)
        block[w.DONE_ROUNDS] = turn + 1
        block[w.PHASE] = 1
    return _end(block, w.DONE, block[w.ROUNDS])


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a kind of call; arguments as `machine_code.address`."""
    return compiling.python_code(_KINDS[kind], symbol)


_KINDS = {kind.__name__: kind for kind in (one_shot, pipelined, shared, publish)}
