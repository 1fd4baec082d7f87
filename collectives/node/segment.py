"""Shared memory segment of one node.

A segment is a file in a directory of its own in `/dev/shm`
(`collectives.node.temporary_directories`), mode 0600. The ranks unlink it once all have mapped it,
so nothing is left when the last rank exits, even after a kill. If rank 0 is killed earlier, the
next rank that creates a directory there removes the stale one. All pages are allocated at once, so
that too little memory raises an error instead of a SIGBUS later. Each rank allocates its own part,
which places the pages on the rank's NUMA node.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.node import temporary_directories
from collectives.transport.transport import Deadline, Transport

__all__ = ["create", "first_error", "broadcast_text"]

log = logging.getLogger(__name__)

_TEXT_BYTES = 256


def create(
    transport: Transport, common: int, each: int, directory: str, deadline: Deadline
) -> Array | None:
    """Create a segment; *collective* over the ranks of `transport`, which are on one node.

    Args:
        transport: the ranks.
        common: bytes at the start that belong to no rank, equal on all ranks; whole pages.
        each: bytes of each rank's part, in rank order, equal on all ranks; whole pages.
        directory: a directory on a file system in memory, equal on all ranks.
        deadline: limit of every wait.

    Returns:
        shape (common + size * each,), uint8, zeros, page-aligned, the same memory on all ranks;
        unmapped with its last view. None on all ranks if one of them could not map it; the reason
        is logged once.
    """
    nbytes = common + transport.size * each
    own = common + transport.rank * each, each
    path, memory, problem = "", None, ""
    with contextlib.ExitStack() as stack:
        if transport.rank == 0:
            try:
                path = f"{stack.enter_context(temporary_directories.temporary(directory))}/segment"
                memory = _make(path, nbytes, (0, common + each))
            except OSError as error:
                path, problem = "", str(error)
        path = broadcast_text(transport, path, deadline)
        if transport.rank != 0 and path:
            try:
                memory = _open(path, nbytes, own)
            except OSError as error:
                problem = str(error)
        problem = first_error(transport, problem, deadline)
    if problem:
        if transport.rank == 0:
            log.warning(
                "no shared memory on this node, so messages serve instead: %s; %s",
                problem, _room(directory, nbytes),
            )  # fmt: skip
        return None
    return memory


def _room(directory: str, nbytes: int) -> str:
    """Return a text that compares the bytes needed with the free space of the file system."""
    needed = -(-nbytes >> 20)
    try:
        facts = os.statvfs(directory)
    except OSError:
        return f"expected {needed} MiB in {directory}, which cannot be read"
    free, size = (blocks * facts.f_frsize >> 20 for blocks in (facts.f_bavail, facts.f_blocks))
    return (
        f"expected {needed} MiB in {directory}, got {free} MiB free of {size} MiB; "
        "in a container `docker run --shm-size=1g` sets its size"
    )


def _make(path: str, nbytes: int, own: tuple[int, int]) -> Array:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        return _map(descriptor, nbytes, own)
    finally:
        os.close(descriptor)


def _open(path: str, nbytes: int, own: tuple[int, int]) -> Array:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise OSError(f"{path} is not the segment of this job")
        if facts.st_size != nbytes:
            raise OSError(f"{path} has {facts.st_size} bytes, expected {nbytes}")
        return _map(descriptor, nbytes, own)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int, own: tuple[int, int]) -> Array:
    """Map a file, after allocating this rank's part of it: (offset, length)."""
    if own[1]:
        os.posix_fallocate(descriptor, *own)
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


def broadcast_text(transport: Transport, text: str, deadline: Deadline) -> str:
    """Return rank 0's text, cut at 256 bytes, on all ranks."""
    line = _encode(text)
    if transport.rank == 0:
        for rank in range(1, transport.size):
            transport.send(line, rank, deadline)
    else:
        transport.receive(line, 0, deadline)
    return _decode(line)


def first_error(transport: Transport, problem: str, deadline: Deadline) -> str:
    """Return the problem of the lowest rank that has one, on all ranks; "" if none has one."""
    first = problem
    line = _encode(problem)
    if transport.rank == 0:
        for rank in range(1, transport.size):
            transport.receive(line, rank, deadline)
            if not first and _decode(line):
                first = f"{transport.parent.name([transport.parent_rank(rank)])}: {_decode(line)}"
    else:
        transport.send(line, 0, deadline)
    # Rank 0 has entered: it has received from, or now waits for, the other ranks.
    before, deadline.peer_has_come = deadline.peer_has_come, True
    found = broadcast_text(transport, first, deadline)
    deadline.peer_has_come = before
    return found


def _encode(text: str) -> Array:
    line = np.zeros(_TEXT_BYTES, np.uint8)
    data = text.encode()[:_TEXT_BYTES]
    line[: len(data)] = np.frombuffer(data, np.uint8)
    return line


def _decode(line: Array) -> str:
    return line.tobytes().rstrip(b"\0").decode(errors="replace")
