"""Compiled part of the eager protocol; `collectives.algorithms.eager` explains it."""

from __future__ import annotations

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

__all__ = ["double", "make"]

# Bytes in a block before its fields, for MPI, which writes some of them.
_FIELD = offsets(BLOCK)


@njit
def _hashes(message: int) -> Any:
    return carray(pointer(message), 2, np.int64)


@njit
def _contribute(block: Any) -> None:
    """Write the own message."""
    hashes = _hashes(block.message)
    hashes[0], hashes[1] = block.hash, block.inverse_hash
    dest, count = block.message + HEAD_BYTES, block.count
    if block.fill:
        call_unary(block.fill, dest, block.send, count, block.ranks)
    else:
        copy(dest, block.send, count * block.itemsize)


@njit
def _start(block: Any, address: int, dest: int, source: int) -> int:
    """Begin the messages of a step; returns MPI's error."""
    block.requests[SEND] = block.requests[RECEIVE] = 0
    if source >= 0:  # first, so that the message arrives where it belongs without a copy
        error = mpi_start(
            block.irecv, block.landing, block.longest_bytes, block.byte, source,
            block.tag, block.comm, address + _FIELD.requests + 8 * RECEIVE,
        )  # fmt: skip
        if error:
            return error
        block.pending[RECEIVE] = 1
    if dest >= 0:
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
    """Look at a message; returns MPI's error."""
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
    """Wait until a step's messages are over."""
    polls = 0
    while True:
        error = _test(block, address, RECEIVE)
        if error == 0:
            error = _test(block, address, SEND)
        if error:
            block.error = error
            return FAILED
        if not block.pending[RECEIVE] and not block.pending[SEND]:
            return DONE
        polls += 1
        if polls > block.polls:
            if polls > block.polls + block.yields:
                return WAITING
            sched_yield()


@njit
def _take(block: Any, then: int) -> None:
    """Combine the message that has come with the own one."""
    if then == NOTHING:
        return
    if then != BEHIND:
        block.message, block.landing = block.landing, block.message
    if then == RESULT:
        return
    ours, theirs = _hashes(block.message), _hashes(block.landing)
    if ours[0] == theirs[0] and ours[1] == theirs[1] and block.count:
        dest, source = block.message + HEAD_BYTES, block.landing + HEAD_BYTES
        call_unary(block.add, dest, source, block.count, block.ranks)
    ours[0], ours[1] = min(ours[0], theirs[0]), min(ours[1], theirs[1])


def double(address: int) -> int:
    """Exchange messages until this rank has what all bring."""
    block = record(address, BLOCK)
    steps = carray(pointer(block.steps), block.step_count, STEP)
    if block.step == 0 and block.phase == 0:
        _contribute(block)
    while block.step < block.step_count:
        step = steps[block.step]
        if block.phase == 0:
            error = _start(block, address, step.dest, step.source)
            if error:
                block.error = error
                return FAILED
            block.phase = 1
        status = _wait(block, address)
        if status != DONE:
            return status
        _take(block, step.then)
        block.phase = 0
        block.step += 1
    block.step = 0
    hashes = _hashes(block.message)
    if hashes[0] != ~hashes[1]:
        return DIFFERENT
    copy(block.out, block.message + HEAD_BYTES, block.count * block.itemsize)
    return DONE


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a kind of call; arguments as `machine_code.load`."""
    return numba_compiler.python_code({"double": double}[kind], symbol)
