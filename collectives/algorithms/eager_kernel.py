"""Compiled part of the eager protocol; `collectives.algorithms.eager` explains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import carray, njit

from collectives.algorithms.eager import (
    BEHIND,
    BLOCK,
    DIFFERENT,
    DONE,
    FAILED,
    HEAD_BYTES,
    NOTHING,
    RECEIVE,
    RESULT,
    SEND,
    STEP,
    WAITING,
)
from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import (
    call_unary,
    copy,
    mpi_start,
    mpi_test,
    pointer,
    record,
    sched_yield,
)
from collectives.kernels.structures import offsets

__all__ = ["all_words", "double", "make"]

# Byte offsets of a block's fields, for MPI, which writes some of them.
_FIELD = offsets(BLOCK)


@njit
def _hashes(message: int) -> Any:
    return carray(pointer(message), 2, np.int64)


@njit
def _contribute(block: Any) -> None:
    """Write this rank's message: hashes and contribution."""
    hashes = _hashes(block.message)
    # Two words, because the minimum of both shows a difference in either direction.
    hashes[0], hashes[1] = block.hash, block.inverse_hash
    dest, count = block.message + HEAD_BYTES, block.count
    # A prepared contribution is copied; others are divided or widened here.
    if block.fill:
        call_unary(block.fill, dest, block.send, count, block.ranks)
    else:
        copy(dest, block.send, count * block.itemsize)


@njit
def _start(block: Any, address: int, dest: int, source: int) -> int:
    """Start the messages of a step; return MPI's error code."""
    # MPI_REQUEST handles of 4 bytes leave the upper half of the words.
    block.requests[SEND] = block.requests[RECEIVE] = 0
    if source >= 0:  # posted first, so that the message lands without a copy
        error = mpi_start(
            # The longest possible message: a rank in another call may send more.
            block.irecv, block.landing, block.longest_bytes, block.byte, source,
            block.tag, block.comm, address + _FIELD.requests + 8 * RECEIVE,
        )  # fmt: skip
        if error:
            return error
        block.pending[RECEIVE] = 1
    if dest >= 0:
        # Only the bytes of this call, which may be few.
        nbytes = HEAD_BYTES + block.count * block.itemsize
        error = mpi_start(
            block.isend, block.message, nbytes, block.byte, dest,
            block.tag, block.comm, address + _FIELD.requests + 8 * SEND,
        )  # fmt: skip
        if error:
            return error
        block.pending[SEND] = 1
    return 0


@njit
def _test(block: Any, address: int, direction: int) -> int:
    """Test a message; return MPI's error code."""
    if not block.pending[direction]:
        return 0
    block.flag = 0
    request = address + _FIELD.requests + 8 * direction
    error = mpi_test(block.test, request, address + _FIELD.flag, address + _FIELD.status)
    if error == 0 and block.flag:
        block.pending[direction] = 0
    return error


@njit
def _wait(block: Any, address: int) -> int:
    """Wait until a step's messages are complete; return DONE, WAITING or FAILED."""
    polls = 0
    while True:
        error = _test(block, address, RECEIVE)
        if error == 0:
            error = _test(block, address, SEND)
        if error:
            block.error = error
            return FAILED
        # Both directions, because the next step reuses both messages.
        if not block.pending[RECEIVE] and not block.pending[SEND]:
            return DONE
        polls += 1
        if polls > block.polls:
            # Python checks deadlines and dead ranks, and calls again.
            if polls > block.polls + block.yields:
                return WAITING
            sched_yield()


@njit
def _take(block: Any, then: int) -> None:
    """Combine the received message with the own one."""
    # Sent only, such as the result for a guest.
    if then == NOTHING:
        return
    if then != BEHIND:
        # The received message becomes the own one, so that the result is left op right.
        block.message, block.landing = block.landing, block.message
    if then == RESULT:
        # The guest takes over the complete message of its proxy.
        return
    ours, theirs = _hashes(block.message), _hashes(block.landing)
    # Different hashes mean other payloads, which must not be combined.
    if ours[0] == theirs[0] and ours[1] == theirs[1] and block.count:
        dest, source = block.message + HEAD_BYTES, block.landing + HEAD_BYTES
        call_unary(block.add, dest, source, block.count, block.ranks)
    # In every case, so that a difference reaches all ranks.
    ours[0], ours[1] = min(ours[0], theirs[0]), min(ours[1], theirs[1])


def double(address: int) -> int:
    """Exchange messages until this rank has all contributions; return a status."""
    block = record(address, BLOCK)
    steps = carray(pointer(block.steps), block.step_count, STEP)
    # Not repeated when the kernel continues after WAITING.
    if block.step == 0 and block.phase == 0:
        _contribute(block)
    while block.step < block.step_count:
        step = steps[block.step]
        if block.phase == 0:
            error = _start(block, address, step.dest, step.source)
            if error:
                block.error = error
                return FAILED
            # Messages are started once; WAITING returns in phase 1.
            block.phase = 1
        status = _wait(block, address)
        if status != DONE:
            return status
        _take(block, step.then)
        block.phase = 0
        block.step += 1
    # Ready for the next call of the block.
    block.step = 0
    hashes = _hashes(block.message)
    # Equal only if all ranks had one hash: min(~h) is ~max(h).
    if hashes[0] != ~hashes[1]:
        return DIFFERENT
    copy(block.out, block.message + HEAD_BYTES, block.count * block.itemsize)
    return DONE


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all kernels."""
    yield ("double",)


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with the kernel; arguments as `machine_code.load`."""
    return numba_compiler.python_code({"double": double}[kind], symbol)
