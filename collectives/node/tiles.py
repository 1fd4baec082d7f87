"""Reduce the contributions of a node's ranks, tile by tile, in rank order.

A tile stays in the level 1 cache (`collectives.node.control_block.TILE`). The loops over its
elements are from `collectives.kernels.loops`; the block holds their addresses. [Words] in brackets
are explained in `collectives.node.reduce_kernels`.
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
    """Store a contribution in a slot, converted by `block.fill` if the op needs that."""
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
    """Return the address of a contribution outside the slots, converted as `fill` does."""
    if not block.fill:
        return source
    part = block.scratch + (2 + rank % 2) * TILE_BYTES  # two are combined at a time
    call_unary(block.fill, part, source, n, block.size)
    return part


@njit
def accumulate(block: Any, total: int, source: int, n: int, rank: int) -> None:
    """Add one rank's contribution to a sum; called in rank order."""
    if rank == 0:
        block.previous_part = source
    elif rank == 1:
        call_binary(block.start, total, block.previous_part, source, n)
    else:
        call_unary(block.add, total, source, n, block.size)


@njit
def save(block: Any, total: int, n: int) -> int:
    """Return the address of a sum, converted to the arrays' dtype if it grew in another one."""
    if not block.save:
        return total
    call_unary(block.save, total + TILE_BYTES, total, n, block.size)
    return total + TILE_BYTES


@njit
def combine_all(block: Any, at: int, n: int) -> None:
    """Combine `n` elements of all ranks, each read from its slot."""
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
    """Combine `n` elements of two ranks; this rank's are read from `send`.

    The slot of the round begins with element `start`, and the elements are `at` behind it. The
    two-array loops add, divide and round in one pass.

    The own array is read in place, because two slots, whose addresses differ by a power of two,
    evict each other's lines from the level 1 cache of some processors.
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
