"""How ranks of a node meet: they store words in their headers and wait for those of others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from collectives.kernels.intrinsics import load, pause, pointer, sched_yield, store
from collectives.node import words as w

__all__ = ["agreed", "announce", "end", "header", "next_round", "slot", "state", "wait"]


@njit
def state(block: Any) -> Any:
    """Return the words that outlive the call."""
    return carray(pointer(block[w.STATE]), w.STATE_WORDS, np.int64)


@njit
def wait(block: Any, word: int, target: int) -> bool:
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
def header(block: Any, rank: int) -> int:
    """Return the address of a rank's header."""
    return block[w.HEADERS] + rank * w.HEADER_BYTES


@njit
def slot(block: Any, rank: int, number: int) -> int:
    """Return the address of a rank's slot in a round."""
    return block[w.SLOTS] + (2 * rank + number % 2) * block[w.SLOT_BYTES]


@njit
def announce(block: Any, first: int) -> None:
    """Begin a call: put its hash where the others look for it, before FILLED is stored."""
    block[w.FIRST] = first
    store(header(block, block[w.RANK]) + 8 * (w.HASHES + first % 2), block[w.HASH])


@njit
def agreed(block: Any) -> bool:
    """Compare the hashes of all ranks, each of which has filled the call's first round."""
    for rank in range(block[w.SIZE]):
        if load(header(block, rank) + 8 * (w.HASHES + block[w.FIRST] % 2)) != block[w.HASH]:
            return False
    return True


@njit
def next_round(block: Any) -> int:
    """Return the number of the round that comes next."""
    return state(block)[w.COUNTER] + 1


@njit
def end(block: Any, status: int, rounds: int) -> int:
    """End a call after some rounds, and make the block ready for the next."""
    state(block)[w.COUNTER] = block[w.FIRST] + rounds - 1
    block[w.PHASE] = 0
    block[w.DONE_ROUNDS] = 0
    return status
