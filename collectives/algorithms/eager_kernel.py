"""Compiled part of the eager protocol; `collectives.algorithms.eager` explains it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from collectives.algorithms import eager as w
from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import (
    call_unary,
    copy,
    mpi_start,
    mpi_test,
    pointer,
    sched_yield,
)

__all__ = ["double", "make"]


@njit
def _hashes(message: int) -> Any:
    return carray(pointer(message), 2, np.int64)


@njit
def _contribute(block: Any) -> None:
    """Write the own message."""
    hashes = _hashes(block[w.MINE])
    hashes[0], hashes[1] = block[w.HASH], block[w.INVERSE]
    dest, count = block[w.MINE] + w.HEAD_BYTES, block[w.COUNT]
    if block[w.FILL]:
        call_unary(block[w.FILL], dest, block[w.SEND], count, block[w.RANKS])
    else:
        copy(dest, block[w.SEND], count * block[w.WIDTH])


@njit
def _start(block: Any, address: int, to: int, source: int) -> int:
    """Begin the messages of a step; returns MPI's error."""
    block[w.SENT] = block[w.RECEIVED] = 0
    if source >= 0:  # first, so that the message arrives where it belongs without a copy
        error = mpi_start(
            block[w.IRECV], block[w.LANDING], block[w.MOST], block[w.BYTE], source,
            block[w.TAG], block[w.COMM], address + 8 * w.RECEIVED,
        )  # fmt: skip
        if error:
            return error
        block[w.RECEIVING] = 1
    if to >= 0:
        nbytes = w.HEAD_BYTES + block[w.COUNT] * block[w.WIDTH]
        error = mpi_start(
            block[w.ISEND], block[w.MINE], nbytes, block[w.BYTE], to,
            block[w.TAG], block[w.COMM], address + 8 * w.SENT,
        )  # fmt: skip
        if error:
            return error
        block[w.SENDING] = 1
    return 0


@njit
def _over(block: Any, address: int, under_way: int, request: int) -> int:
    """Look at a message; returns MPI's error."""
    if not block[under_way]:
        return 0
    block[w.FLAG] = 0
    error = mpi_test(
        block[w.TEST], address + 8 * request, address + 8 * w.FLAG, address + 8 * w.STATUS
    )
    if error == 0 and block[w.FLAG]:
        block[under_way] = 0
    return error


@njit
def _wait(block: Any, address: int) -> int:
    """Wait until a step's messages are over."""
    polls = 0
    while True:
        error = _over(block, address, w.RECEIVING, w.RECEIVED)
        if error == 0:
            error = _over(block, address, w.SENDING, w.SENT)
        if error:
            block[w.ERROR] = error
            return w.FAILED
        if not block[w.RECEIVING] and not block[w.SENDING]:
            return w.DONE
        polls += 1
        if polls > block[w.POLLS]:
            if polls > block[w.POLLS] + block[w.YIELDS]:
                return w.WAITING
            sched_yield()


@njit
def _take(block: Any, then: int) -> None:
    """Combine the message that has come with the own one."""
    if then == w.NOTHING:
        return
    if then != w.BEHIND:
        block[w.MINE], block[w.LANDING] = block[w.LANDING], block[w.MINE]
    if then == w.RESULT:
        return
    ours, theirs = _hashes(block[w.MINE]), _hashes(block[w.LANDING])
    if ours[0] == theirs[0] and ours[1] == theirs[1] and block[w.COUNT]:
        dest, source = block[w.MINE] + w.HEAD_BYTES, block[w.LANDING] + w.HEAD_BYTES
        call_unary(block[w.ADD], dest, source, block[w.COUNT], block[w.RANKS])
    ours[0], ours[1] = min(ours[0], theirs[0]), min(ours[1], theirs[1])


def double(address: int) -> int:
    """Exchange messages until this rank has what all bring."""
    block = carray(pointer(address), w.WORDS, np.int64)
    steps = carray(pointer(block[w.STEPS]), (block[w.NUMBER_OF_STEPS], 3), np.int64)
    if block[w.STEP] == 0 and block[w.PHASE] == 0:
        _contribute(block)
    while block[w.STEP] < block[w.NUMBER_OF_STEPS]:
        step = block[w.STEP]
        if block[w.PHASE] == 0:
            error = _start(block, address, steps[step, w.TO], steps[step, w.SOURCE])
            if error:
                block[w.ERROR] = error
                return w.FAILED
            block[w.PHASE] = 1
        status = _wait(block, address)
        if status != w.DONE:
            return status
        _take(block, steps[step, w.THEN])
        block[w.PHASE] = 0
        block[w.STEP] = step + 1
    block[w.STEP] = 0
    hashes = _hashes(block[w.MINE])
    if hashes[0] != ~hashes[1]:
        return w.DIFFERENT
    copy(block[w.OUT], block[w.MINE] + w.HEAD_BYTES, block[w.COUNT] * block[w.WIDTH])
    return w.DONE


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a kind of call; arguments as `machine_code.load`."""
    return numba_compiler.python_code({"double": double}[kind], symbol)
