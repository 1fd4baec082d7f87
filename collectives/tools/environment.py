"""Environment checks: versions, threads, clocks, shared memory, bandwidth.

Every function is *collective* and returns the same lines on all ranks. `reports` is a communicator
on which the ranks tell each other what they found, apart from the one that is tested.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from collectives.arrays.reduction import SUM
from collectives.communicator import Communicator, group_of
from collectives.core.errors import CollectiveError, some
from collectives.tools import info
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Deadline

__all__ = [
    "CheckLine", "Verdict", "bandwidth", "clocks", "node_engine", "stores", "threads", "versions",
]  # fmt: skip

Verdict = Literal["ok", "note", "FAILED"]

# Seconds by which clocks may differ without a note; times in logs of several machines are compared
# by people, and job schedulers and file systems compare them by the second.
SKEW_SECONDS = 0.5

BANDWIDTH_BYTES = 64 << 20
# How many plain copies an all-reduce of 64 MiB on one node may take without a note. The engine
# needs 0.8 where every rank has a core (`docs/benchmarks`).
MOST_COPIES = 20.0


class CheckLine(NamedTuple):
    """One line of the report; a note changes nothing about the exit status."""

    name: str
    verdict: Verdict
    text: str


class _Keep(logging.Handler):
    """Keeps the last warning of a logger."""

    text: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def versions(reports: Communicator) -> Iterator[CheckLine]:
    """Compare what is installed on all ranks, and name those that differ."""
    everywhere = reports.allgather_object(info.versions())
    for name in everywhere[0]:
        found = [versions[name] for versions in everywhere]
        usual, number = Counter(found).most_common(1)[0]
        others = [f"rank {r} has {v}" for r, v in enumerate(found) if v != usual]
        if not others:
            yield CheckLine(name, "ok", usual)
        else:
            text = f"{number} of {len(found)} ranks have {usual}, but {some(others)}"
            yield CheckLine(name, "FAILED", text)


def threads(reports: Communicator) -> CheckLine:
    """Say what the MPI library lets threads do; requests need "multiple"."""
    levels = Counter(reports.allgather_object(info.thread_level()))
    text = ", ".join(f"{level} on {n} ranks" for level, n in levels.items())
    return CheckLine("MPI threads", "ok" if list(levels) == ["multiple"] else "note", text)


def clocks(transport: MpiTransport, reports: Communicator, limit: float) -> CheckLine:
    """Compare the ranks' clocks with that of rank 0, each by its fastest of 16 round trips."""
    problem, worst = None, (0.0, 0.0, 0)
    deadline = Deadline("clock", limit)
    clock = np.zeros(1)
    try:
        for rank in range(1, transport.size) if transport.rank == 0 else [0]:
            trips = []
            for _ in range(16 if transport.size > 1 else 0):
                if transport.rank == 0:
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
        text += f" (rank {rank}, known to {5e2 * trip:.3f} ms)"
    return CheckLine("clocks", "note" if skew > SKEW_SECONDS else "ok", text)


def node_engine(comm: Communicator, reports: Communicator, shared_memory: str | None) -> CheckLine:
    """Say whether the ranks meet in shared memory, in the first call on `comm`."""
    warned = _Keep()
    logger = logging.getLogger("collectives")
    logger.addHandler(warned)
    refusal = None
    try:
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
    """Say how ranks hand bytes over in shared memory, after `bandwidth`; None if none does."""
    engine = group_of(comm).node_engine
    told = reports.allgather_object(engine.stores if engine else None)
    text = info.stores(told)
    return CheckLine("stores", "ok", text) if text else None


def bandwidth(comm: Communicator, reports: Communicator) -> CheckLine:
    """Compare a large all-reduce with all ranks copying as many bytes at once."""
    error, rounds = None, []
    try:
        source = np.ones(BANDWIDTH_BYTES // 4, np.float32)
        target = np.zeros_like(source)
        for _ in range(4):
            comm.barrier()
            began = time.perf_counter()
            comm.allreduce(source, op=SUM, out=target)
            middle = time.perf_counter()
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
    # The slowest rank's time of each round; the first round touches the memory.
    each = [max(rank[i][0] for rank, _ in found) for i in range(3)]
    copies = [max(rank[i][1] for rank, _ in found) for i in range(3)]
    reduced, copied = statistics.median(each), statistics.median(copies)
    rate = 2 * (comm.size - 1) / comm.size * BANDWIDTH_BYTES / reduced / 1e9
    slow = comm.num_nodes == 1 and reduced > MOST_COPIES * copied
    text = (
        f"all-reduce of 64 MiB in {1e3 * reduced:.1f} ms, {rate:.2f} GB/s per rank; "
        f"{reduced / copied:.1f} x a plain copy of all ranks at once"
    )
    return CheckLine("bandwidth", "note" if slow else "ok", text)
