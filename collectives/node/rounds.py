"""The rounds in which ranks of a node meet, compiled by numba at first use: fill, wait, combine.

The ranks of a node share a segment (`collectives.node.segment`). In it each rank has a *header*,
which only it writes, and two *slots* for its data. A kind of call (`one_shot` ...) gets the address
of a *block* of 64-bit integers that describes one call (`RANK` ... below), works until it is done
or has waited for long, and returns `DONE`, `MISMATCH`, or `WAITING`: call it again with the same
block. What happens to single elements is up to the loops of `collectives.kernels.elementwise`,
whose addresses the block holds; so each kind is compiled once, whatever the dtype.

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

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels import compiling, intrinsics
from collectives.kernels.intrinsics import call, copy, load, pause, pointer, sched_yield, store

__all__ = ["DONE", "MISMATCH", "WAITING", "one_shot", "pipelined", "publish", "shared"]

DONE, WAITING, MISMATCH = 0, 1, 2

# Words of a block. The engine's part, the same for all calls:
RANK, SIZE = 0, 1
HEADERS = 2  # address of rank 0's header
SLOTS = 3  # address of rank 0's slots
SLOT_BYTES = 4
COUNTER = 5  # address of the number of rounds so far, this rank's own
SCRATCH = 6  # address of two tiles of the widest type, this rank's own
SPINS, YIELDS = 7, 8  # polls that spin, and polls that yield, before a wait gives up for now
# The call's:
HASH = 9  # of the call's description
SEND, OUT = 10, 11  # addresses of the contribution and the result; may be equal
COUNT = 12  # elements (one_shot), bytes of the stream (publish)
BOUNDS = 13  # address of P + 1 offsets of the ranks' chunks (pipelined, shared)
TAKE = 14  # which results this rank wants (pipelined): TAKE_NONE, TAKE_OWN or TAKE_ALL
TABLE = 15  # address of rows: what this rank wants (publish), the ranks' arrays (shared)
ROWS = 16  # rows of the table (publish)
ROUNDS = 17  # of the call (publish)
WIDTH = 18  # bytes of an element
FILL, START, ADD, SAVE = 19, 20, 21, 22  # addresses of the loops; 0 for a plain copy
# Where the call stands; all 0 before it:
PHASE, DONE_ROUNDS, FIRST = 23, 24, 25
MISSING = 26  # the rank that is waited for, after WAITING
WORDS = 27

TAKE_NONE, TAKE_OWN, TAKE_ALL = 0, 1, 2

# A row of the table of `publish`: whose stream, its first byte, the one after its last, and where
# they go, counted from OUT.
PEER, FROM, TO, DEST = 0, 1, 2, 3

# Words of a header; one cache line with its neighbour, which processors fetch in pairs.
FILLED, READY, HASHES = 0, 1, 2
HEADER_BYTES = 128

# Elements that are combined at a time, so that they stay in the level 1 cache.
TILE = 2048
TILE_BYTES = TILE * 16  # of the widest type, complex128


def _entry(function: Callable[[int], int]) -> Callable[[int], int]:
    """Compile a kind of call."""
    return compiling.compiled(function, includes=[intrinsics.__file__], nogil=True)


@njit(nogil=True)
def _wait(block: Any, word: int, target: int) -> bool:
    """Wait until a word of all headers has reached the target; False after too many polls."""
    spins, yields = block[SPINS], block[YIELDS]
    for rank in range(block[SIZE]):
        address = block[HEADERS] + rank * HEADER_BYTES + 8 * word
        polls = 0
        while load(address) < target:
            polls += 1
            if polls <= spins:
                pause()
            elif polls <= spins + yields:
                sched_yield()
            else:
                block[MISSING] = rank
                return False
    return True


@njit(nogil=True)
def _header(block: Any, rank: int) -> int:
    return block[HEADERS] + rank * HEADER_BYTES


@njit(nogil=True)
def _slot(block: Any, rank: int, number: int) -> int:
    """Return the address of a rank's slot in a round."""
    return block[SLOTS] + (2 * rank + number % 2) * block[SLOT_BYTES]


@njit(nogil=True)
def _announce(block: Any, first: int) -> None:
    """Begin a call: put its hash where the others look for it, before FILLED is stored."""
    block[FIRST] = first
    store(_header(block, block[RANK]) + 8 * (HASHES + first % 2), block[HASH])


@njit(nogil=True)
def _agreed(block: Any) -> bool:
    """Compare the hashes of all ranks, each of which has filled the call's first round."""
    for rank in range(block[SIZE]):
        if load(_header(block, rank) + 8 * (HASHES + block[FIRST] % 2)) != block[HASH]:
            return False
    return True


@njit(nogil=True)
def _end(block: Any, status: int, rounds: int) -> int:
    """End a call after some rounds, and make the block ready for the next."""
    carray(pointer(block[COUNTER]), 1, np.int64)[0] = block[FIRST] + rounds - 1
    block[PHASE] = 0
    block[DONE_ROUNDS] = 0
    return status


@njit(nogil=True)
def _next_round(block: Any) -> int:
    return carray(pointer(block[COUNTER]), 1, np.int64)[0] + 1


@njit(nogil=True)
def _fill(block: Any, source: int, dest: int, n: int) -> None:
    """Copy a contribution to where others read it."""
    if block[FILL]:
        call(block[FILL], dest, source, n, block[SIZE])
    else:
        copy(dest, source, n * block[WIDTH])


@njit(nogil=True)
def _accumulate(block: Any, dest: int, source: int, n: int, first: bool) -> None:
    """Start a sum that belongs at `dest`, or go on with it.

    It grows where it belongs, unless its working type is another than that of the arrays.
    """
    total = block[SCRATCH] if block[SAVE] else dest
    if not first:
        call(block[ADD], total, source, n, block[SIZE])
    elif block[START]:
        call(block[START], total, source, n, block[SIZE])
    elif source != total:
        copy(total, source, n * block[WIDTH])


@njit(nogil=True)
def _save(block: Any, dest: int, n: int) -> None:
    """End a sum that belongs at `dest`."""
    if block[SAVE]:
        call(block[SAVE], dest, block[SCRATCH], n, block[SIZE])


@njit(nogil=True)
def _own(block: Any, source: int, n: int) -> int:
    """Return where this rank's own contribution can be read as the others' can."""
    if not block[FILL]:
        return source
    part = block[SCRATCH] + TILE_BYTES
    _fill(block, source, part, n)
    return part


@_entry
def one_shot(address: int) -> int:
    """Reduce arrays that fit in a slot: one round, in which every rank reads all slots.

    All ranks combine in rank order, so all get the same bits.
    """
    block = carray(pointer(address), WORDS, np.int64)
    count, width = block[COUNT], block[WIDTH]
    if block[PHASE] == 0:
        number = _next_round(block)
        _fill(block, block[SEND], _slot(block, block[RANK], number), count)
        _announce(block, number)
        store(_header(block, block[RANK]) + 8 * FILLED, number)
        block[PHASE] = 1
    number = block[FIRST]
    if not _wait(block, FILLED, number):
        return WAITING
    if not _agreed(block):
        return _end(block, MISMATCH, 1)
    for at in range(0, count, TILE):
        n = min(TILE, count - at)
        dest = block[OUT] + at * width
        for rank in range(block[SIZE]):
            source = _slot(block, rank, number) + at * width
            _accumulate(block, dest, source, n, rank == 0)
        _save(block, dest, n)
    return _end(block, DONE, 1)


@njit(nogil=True)
def _piece(block: Any) -> int:
    """Return the bytes of a piece: a rank's part of a slot, in whole cache lines."""
    return block[SLOT_BYTES] // block[SIZE] // 64 * 64


@njit(nogil=True)
def _span(block: Any, owner: int, turn: int) -> tuple[int, int]:
    """Return the first element of a piece of a rank's chunk, and how many it has."""
    bounds = carray(pointer(block[BOUNDS]), block[SIZE] + 1, np.int64)
    length = _piece(block) // block[WIDTH]
    start = bounds[owner] + turn * length
    return start, max(0, min(length, bounds[owner + 1] - start))


@njit(nogil=True)
def _turns(block: Any) -> int:
    """Return the rounds that the longest chunk needs."""
    bounds = carray(pointer(block[BOUNDS]), block[SIZE] + 1, np.int64)
    longest = 1
    for owner in range(block[SIZE]):
        longest = max(longest, bounds[owner + 1] - bounds[owner])
    return -(-longest // (_piece(block) // block[WIDTH]))


@njit(nogil=True)
def _contribute(block: Any, turn: int) -> None:
    """Fill this rank's slot for a round of a pipelined call."""
    number = block[FIRST] + turn
    slot = _slot(block, block[RANK], number)
    for owner in range(block[SIZE]):
        if owner != block[RANK]:  # the own part is read where it is
            start, n = _span(block, owner, turn)
            dest = slot + owner * _piece(block)
            _fill(block, block[SEND] + start * block[WIDTH], dest, n)
    store(_header(block, block[RANK]) + 8 * FILLED, number)


@njit(nogil=True)
def _combine_piece(block: Any, turn: int) -> None:
    """Combine the own piece of all ranks, and put it where the others look for it."""
    number, me, width = block[FIRST] + turn, block[RANK], block[WIDTH]
    place = me * _piece(block)
    start, count = _span(block, me, turn)
    for at in range(0, count, TILE):
        n = min(TILE, count - at)
        dest = _slot(block, me, number) + place + at * width
        for rank in range(block[SIZE]):
            if rank == me:
                source = _own(block, block[SEND] + (start + at) * width, n)
            else:
                source = _slot(block, rank, number) + place + at * width
            _accumulate(block, dest, source, n, rank == 0)
        _save(block, dest, n)
        if block[TAKE] != TAKE_NONE:
            copy(block[OUT] + (start + at) * width, dest, n * width)
    store(_header(block, me) + 8 * READY, number)


@njit(nogil=True)
def _collect(block: Any, turn: int) -> None:
    """Copy the other ranks' results of a round."""
    number, width = block[FIRST] + turn, block[WIDTH]
    for owner in range(block[SIZE]):
        if owner != block[RANK]:
            start, n = _span(block, owner, turn)
            source = _slot(block, owner, number) + owner * _piece(block)
            copy(block[OUT] + start * width, source, n * width)


@_entry
def pipelined(address: int) -> int:
    """Reduce arrays of any size: each rank combines its chunk, piece by piece.

    Round j of the call handles the j-th piece of every chunk. While a rank waits for the others'
    results of one round, its contributions to the next are in its other slot already. A piece has
    its place in a slot by its owner: what others bring for it, and in the owner's slot the result.
    """
    block = carray(pointer(address), WORDS, np.int64)
    total = _turns(block)
    if block[PHASE] == 0:
        _announce(block, _next_round(block))
        _contribute(block, 0)
        block[PHASE] = 1
    while block[DONE_ROUNDS] < total:
        turn = block[DONE_ROUNDS]
        if block[PHASE] == 1:
            if not _wait(block, FILLED, block[FIRST] + turn):
                return WAITING
            if turn == 0 and not _agreed(block):
                return _end(block, MISMATCH, 1)
            if turn + 1 < total:
                _contribute(block, turn + 1)
            _combine_piece(block, turn)
            block[PHASE] = 2
        if not _wait(block, READY, block[FIRST] + turn):
            return WAITING
        if block[TAKE] == TAKE_ALL:
            _collect(block, turn)
        block[DONE_ROUNDS] = turn + 1
        block[PHASE] = 1
    return _end(block, DONE, total)


@njit(nogil=True)
def _combine_shared(block: Any) -> None:
    """Combine the own chunk of all ranks' arrays, and write it into all of them."""
    table = carray(pointer(block[TABLE]), block[SIZE], np.int64)
    bounds = carray(pointer(block[BOUNDS]), block[SIZE] + 1, np.int64)
    end = bounds[block[RANK] + 1]
    width = block[WIDTH]
    for at in range(bounds[block[RANK]], end, TILE):
        n = min(TILE, end - at)
        dest = table[0] + at * width
        for rank in range(block[SIZE]):
            source = _own(block, table[rank] + at * width, n)
            _accumulate(block, dest, source, n, rank == 0)
        _save(block, dest, n)
        for rank in range(1, block[SIZE]):
            copy(table[rank] + at * width, dest, n * width)


@_entry
def shared(address: int) -> int:
    """Reduce arrays that lie in shared memory, in place: no copy at all.

    Each rank combines its chunk of all arrays and writes the result into all of them.
    """
    block = carray(pointer(address), WORDS, np.int64)
    if block[PHASE] == 0:
        number = _next_round(block)
        _announce(block, number)
        store(_header(block, block[RANK]) + 8 * FILLED, number)
        block[PHASE] = 1
    if block[PHASE] == 1:
        if not _wait(block, FILLED, block[FIRST]):
            return WAITING
        if not _agreed(block):
            return _end(block, MISMATCH, 1)
        _combine_shared(block)
        store(_header(block, block[RANK]) + 8 * READY, block[FIRST])
        block[PHASE] = 2
    if not _wait(block, READY, block[FIRST]):
        return WAITING
    return _end(block, DONE, 1)


@njit(nogil=True)
def _copy_wanted(block: Any, turn: int) -> None:
    """Copy what this rank wants of the others' slots."""
    table = carray(pointer(block[TABLE]), (block[ROWS], 4), np.int64)
    window = turn * block[SLOT_BYTES]
    for row in range(block[ROWS]):
        start = max(table[row, FROM], window)
        stop = min(table[row, TO], window + block[SLOT_BYTES])
        if start < stop:
            source = _slot(block, table[row, PEER], block[FIRST] + turn) + start - window
            dest = block[OUT] + table[row, DEST] + start - table[row, FROM]
            copy(dest, source, stop - start)


@_entry
def publish(address: int) -> int:
    """Let every rank publish a stream of bytes, and copy what it wants of the others' streams.

    Broadcast, gather, all-gather, scatter and all-to-all differ only in who publishes what and who
    copies what.
    """
    block = carray(pointer(address), WORDS, np.int64)
    if block[PHASE] == 0:
        _announce(block, _next_round(block))
    while block[DONE_ROUNDS] < block[ROUNDS]:
        turn = block[DONE_ROUNDS]
        number = block[FIRST] + turn
        if block[PHASE] != 2:
            at = turn * block[SLOT_BYTES]
            n = max(0, min(block[SLOT_BYTES], block[COUNT] - at))
            copy(_slot(block, block[RANK], number), block[SEND] + at, n)
            store(_header(block, block[RANK]) + 8 * FILLED, number)
            block[PHASE] = 2
        if not _wait(block, FILLED, number):
            return WAITING
        if turn == 0 and not _agreed(block):
            return _end(block, MISMATCH, 1)
        _copy_wanted(block, turn)
        block[DONE_ROUNDS] = turn + 1
        block[PHASE] = 1
    return _end(block, DONE, block[ROUNDS])
