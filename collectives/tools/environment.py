"""Environment checks: versions, threads, clocks, shared memory, bandwidth.

Every function is *collective* and returns the same lines on all ranks. `reports` is a communicator
for exchanging results, separate from the one that is tested.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from collectives.arrays.reduction import SUM
from collectives.communicator import Communicator, group_of
from collectives.core.errors import CollectiveError, counted, some
from collectives.tools import info
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Deadline

__all__ = [
    "CheckLine", "Verdict", "bandwidth", "clocks", "node_engine", "nodes", "stores", "threads",
    "versions",
]  # fmt: skip

Verdict = Literal["ok", "note", "FAILED"]

# Clock differences that need no note: people compare times in logs of several machines, and job
# schedulers and file systems compare them by the second.
SKEW_SECONDS = 0.5

BANDWIDTH_BYTES = 64 << 20
# Largest time of an all-reduce of 64 MiB on one node, in plain copies, that needs no note. The
# engine needs 0.8 if every rank has a core (`docs/benchmarks`).
MOST_COPIES = 20.0


class CheckLine(NamedTuple):
    """One line of the report; a note does not change the exit status."""

    name: str
    verdict: Verdict
    text: str


class _Keep(logging.Handler):
    """Stores the last warning of a logger."""

    text: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def versions(reports: Communicator) -> Iterator[CheckLine]:
    """Compare installed versions on all ranks, and name ranks that differ."""
    everywhere = reports.allgather_object(info.versions())
    for name in everywhere[0]:
        found = [versions[name] for versions in everywhere]
        # The most frequent version counts as right.
        usual, number = Counter(found).most_common(1)[0]
        others = [f"rank {r} has {v}" for r, v in enumerate(found) if v != usual]
        if not others:
            yield CheckLine(name, "ok", usual)
        else:
            text = f"{number} of {len(found)} ranks have {usual}, but {some(others)}"
            yield CheckLine(name, "FAILED", text)


def threads(reports: Communicator) -> CheckLine:
    """Report the MPI library's thread level; requests need "multiple"."""
    levels = Counter(reports.allgather_object(info.thread_level()))
    text = ", ".join(f"{level} on {counted(n, 'rank')}" for level, n in levels.items())
    return CheckLine("MPI threads", "ok" if list(levels) == ["multiple"] else "note", text)


def clocks(transport: MpiTransport, reports: Communicator, limit: float) -> CheckLine:
    """Compare the ranks' clocks with rank 0's, each by the fastest of 16 round trips."""
    problem, worst = None, (0.0, 0.0, 0)
    deadline = Deadline("clock", limit)
    clock = np.zeros(1)
    try:
        # Rank 0 asks one rank after the other, and every other rank answers.
        for rank in range(1, transport.size) if transport.rank == 0 else [0]:
            trips = []
            for _ in range(16 if transport.size > 1 else 0):
                if transport.rank == 0:
                    # Wall-clock time, which people compare in logs.
                    began = time.time()
                    transport.send(clock, rank, deadline)
                    transport.receive(clock, rank, deadline)
                    ended = time.time()
                    trips.append((ended - began, float(clock[0]) - (began + ended) / 2))
                else:
                    transport.receive(clock, 0, deadline)
                    clock[0] = time.time()
                    transport.send(clock, 0, deadline)
            if trips:
                # The fastest trip has the smallest error.
                trip, offset = min(trips)
                worst = max(worst, (abs(offset), trip, rank))
    except CollectiveError as error:
        problem = str(error)
    problems = [f"rank {r}: {p}" for r, p in enumerate(reports.allgather_object(problem)) if p]
    skew, trip, rank = reports.broadcast_object(worst)
    if problems:
        return CheckLine("clocks", "FAILED", problems[0])
    text = f"at most {1e3 * skew:.3f} ms from rank 0"
    if rank:
        # Half of the round trip bounds the error; 5e2 is half of 1e3 ms.
        text += f" (rank {rank}, known to {5e2 * trip:.3f} ms)"
    return CheckLine("clocks", "note" if skew > SKEW_SECONDS else "ok", text)


def nodes(reports: Communicator) -> CheckLine:
    """Report ranks of one machine that MPI places on different nodes, which share no memory."""
    try:
        # Containers share the kernel's number, but not the network.
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
        machine = kernel, os.stat("/proc/self/ns/net").st_ino
    except OSError:  # hidden from this process; the other ranks wait for its answer
        machine = None
    first: dict[object, tuple[int, int]] = {}
    for rank, (where, node) in enumerate(reports.allgather_object((machine, reports.node_rank))):
        other, its_node = first.setdefault(where or rank, (rank, node))
        if node != its_node:
            text = (
                f"ranks {other} and {rank} run on one machine, but on different nodes of MPI: the "
                "list of hosts names it twice, so they send messages instead of sharing memory"
            )
            return CheckLine("nodes", "note", text)
    return CheckLine("nodes", "ok", counted(reports.num_nodes, "node"))


def node_engine(comm: Communicator, reports: Communicator, shared_memory: str | None) -> CheckLine:
    """Report whether the ranks use shared memory, in the first call on `comm`."""
    warned = _Keep()
    # The engine logs why it has no shared memory.
    logger = logging.getLogger("collectives")
    logger.addHandler(warned)
    refusal = None
    try:
        # Only "node" raises an error without an engine.
        comm.barrier(algorithm="node")
    except (ValueError, CollectiveError) as error:
        refusal = str(error)
    finally:
        logger.removeHandler(warned)
    refusal = reports.broadcast_object(refusal)
    warnings = [text for text in reports.allgather_object(warned.text) if text]
    warning = warnings[0] if warnings else ""
    if refusal is None:
        return CheckLine("node engine", "ok", "in use: ranks meet in shared memory")
    if comm.size == 1:
        return CheckLine("node engine", "ok", "not in use: there is one rank")
    if comm.num_nodes == comm.size:
        return CheckLine("node engine", "ok", "not in use: there is one rank on each node")
    if shared_memory is None:
        return CheckLine("node engine", "note", "not in use: UNISONO_SHARED_MEMORY=off")
    if comm.num_nodes > 1 and not warnings:
        text = f"in use inside each of {comm.num_nodes} nodes, with messages between them"
        return CheckLine("node engine", "ok", text)
    if comm.num_nodes > 1:
        text = f"not in use on {len(warnings)} of {comm.num_nodes} nodes: {warning}"
        return CheckLine("node engine", "note", text)
    return CheckLine("node engine", "note", f"not in use: {warning or refusal}")


def stores(comm: Communicator, reports: Communicator) -> CheckLine | None:
    """Report the store modes of the ranks, after `bandwidth`; None without node engines."""
    engine = group_of(comm).node_engine
    told = reports.allgather_object(engine.stores if engine else None)
    text = info.stores(told)
    return CheckLine("stores", "ok", text) if text else None


def bandwidth(comm: Communicator, reports: Communicator) -> CheckLine:
    """Compare a large all-reduce with all ranks copying the same number of bytes at once."""
    error, rounds = None, []
    try:
        source = np.ones(BANDWIDTH_BYTES // 4, np.float32)
        target = np.zeros_like(source)
        for _ in range(4):
            comm.barrier()
            began = time.perf_counter()
            comm.allreduce(source, op=SUM, out=target)
            middle = time.perf_counter()
            # All ranks copy at once, because they share the bandwidth of the memory.
            comm.barrier()
            again = time.perf_counter()
            np.copyto(target, source)
            rounds.append((middle - began, time.perf_counter() - again))
    except (CollectiveError, MemoryError) as exception:
        error = f"{type(exception).__name__}: {exception}"
    found = reports.allgather_object((rounds[1:], error))
    problems = [f"rank {r}: {e}" for r, (_, e) in enumerate(found) if e]
    if problems:
        return CheckLine("bandwidth", "FAILED", problems[0])
    # The slowest rank's time in each round; the first round touches the memory.
    each = [max(rank[i][0] for rank, _ in found) for i in range(3)]
    copies = [max(rank[i][1] for rank, _ in found) for i in range(3)]
    reduced, copied = statistics.median(each), statistics.median(copies)
    rate = 2 * (comm.size - 1) / comm.size * BANDWIDTH_BYTES / reduced / 1e9
    # Between nodes the network is the limit, not the memory.
    slow = comm.num_nodes == 1 and reduced > MOST_COPIES * copied
    text = (
        f"all-reduce of 64 MiB in {1e3 * reduced:.1f} ms, {rate:.2f} GB/s per rank; "
        f"{reduced / copied:.1f} x a plain copy of all ranks at once"
    )
    return CheckLine("bandwidth", "note" if slow else "ok", text)
