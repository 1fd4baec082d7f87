"""Reduce the contributions of a node's ranks, tile by tile, in rank order.

A tile is as many elements as stay in the level 1 cache (`collectives.node.control_block.TILE`). The
loops over its elements are those of `collectives.kernels.loops`, whose addresses the block holds.
[Words] in brackets are those of `collectives.node.reduce_kernels`, whose rounds call this.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import call_binary, call_unary
from collectives.node.control_block import TILE, TILE_BYTES
from collectives.node.slot_stores import write_slot
from collectives.node.synchronization import slot

__all__ = ["accumulate", "combine_all", "combine_two", "fill", "own_contribution", "save"]


@njit
def fill(block: Any, dest: int, source: int, n: int) -> None:
    """Copy a contribution to where others read it."""
    width = block.itemsize
    if not block.fill:
        write_slot(block, dest, source, n * width)  # [fill]
        return
    for at in range(0, n, TILE):
        few = min(TILE, n - at)
        call_unary(block.fill, block.scratch, source + at * width, few, block.size)
        write_slot(block, dest + at * width, block.scratch, few * width)  # [fill]


@njit
def own_contribution(block: Any, source: int, n: int, rank: int) -> int:
    """Return where a contribution that lies in no slot can be read as one that does."""
    if not block.fill:
        return source
    part = block.scratch + (2 + rank % 2) * TILE_BYTES  # two are combined at a time
    call_unary(block.fill, part, source, n, block.size)
    return part


@njit
def accumulate(block: Any, total: int, source: int, n: int, rank: int) -> None:
    """Go on with a sum in rank order."""
    if rank == 0:
        block.previous_part = source
    elif rank == 1:
        call_binary(block.start, total, block.previous_part, source, n)
    else:
        call_unary(block.add, total, source, n, block.size)


@njit
def save(block: Any, total: int, n: int) -> int:
    """Return where a sum that has grown in a tile lies in the type of the arrays."""
    if not block.save:
        return total
    call_unary(block.save, total + TILE_BYTES, total, n, block.size)
    return total + TILE_BYTES


@njit
def combine_all(block: Any, at: int, n: int) -> None:
    """Combine so many elements of all ranks, each of whose slots is read."""
    offset = at * block.itemsize
    dest = block.out + offset
    total = block.scratch if block.save else dest
    for rank in range(block.size):
        source = slot(block, rank, block.first_round) + offset  # [read]
        accumulate(block, total, source, n, rank)
    if block.save:
        call_unary(block.save, dest, total, n, block.size)


@njit
def combine_two(block: Any, number: int, start: int, at: int, n: int) -> None:
    """Combine so many elements of two ranks; this one's are read where they are.

    The slot of a round begins with an element `start`, and these are `at` elements behind it.
    The loops of two arrays do all at once: divide, add and round.

    Two slots, whose addresses differ by a power of two, drive each other's lines out of the level 1
    cache of some processors.
    """
    me, offset = block.rank, (start + at) * block.itemsize
    dest = block.out + offset
    own = block.send + offset
    theirs = slot(block, 1 - me, number) + at * block.itemsize  # [read]
    if own == dest:
        call_unary(block.add if me == 0 else block.add_reversed, dest, theirs, n, 2)
    elif me == 0:
        call_binary(block.start, dest, own, theirs, n)
    else:
        call_binary(block.start, dest, theirs, own, n)
