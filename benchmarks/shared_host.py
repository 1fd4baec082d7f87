"""What ranks that share a core cost each other: the constants of a shared host (`simulation`).

    python benchmarks/shared_host.py [--json FILE]

Needs root, iproute2 and Open MPI. Machines are network namespaces (`tests/netns/namespaces.py`),
and all of their ranks share one core: 2 and 8 machines of one rank, whose MPI polls, and 4 of two,
where `init` has MPI give the core away in each look. In microseconds:

    look us     a rank's part of a round in which all have the core once and find nothing: as a wait
                begins, and later
    polls us    the looks of a rank before it yields its core, which no other rank needs
    trip us     between two ranks on different machines, while all others look: half of a ping-pong
                from Python, an exchange of eager messages, the algorithm of an all-reduce of 8
                bytes, and the whole call, which has the two before

`copying ns` is what a byte costs each program: two ranks exchange 4 MiB over lines that nothing
shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from collectives.communicator import group_of
from collectives.simulation.cluster import POLLING, YIELDING
from collectives.simulation.cpu_scheduler import WaitingRank, WaitKinds

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

JOB_SECONDS = 60.0

# Of a ping-pong within the 200 looks for which the others wait before they sleep; how often.
TRIPS, TIMES = 10, 60
LOOK_SECONDS = 0.3
COPIED_BYTES = 4 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main()

    from namespaces import why_not

    reason = why_not()
    if reason is not None:
        print(f"benchmarks/shared_host.py: {reason}", file=sys.stderr)
        return 1
    figures = measured()
    for each in figures:
        print(json.dumps(each))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measured() -> list[dict[str, Any]]:
    """Return the figures of all jobs."""
    from namespaces import NamespaceCluster

    figures = []
    for machines, ranks in ((2, 1), (8, 1), (4, 2)):
        with NamespaceCluster(machines) as cluster:
            job = cluster.run(ranks, __file__, "--rank", timeout=JOB_SECONDS)
        if job.status != 0:
            raise RuntimeError(job.stdout + job.stderr)
        figures.append({"machines": machines, "ranks": ranks, **json.loads(job.stdout)})
    return figures


def waits(figures: list[dict[str, Any]], *, yields: bool) -> WaitKinds:
    """Return how ranks wait that share the cores of the machine of these figures.

    Looks are as measured: those of a wait that goes on, or where each of them gives the core away.
    All else is that of the machine whose waits `simulation.cluster` has, by how much longer ranks
    poll here.
    """
    look = statistics.mean(
        each["look us"]["first" if each["yields"] else "later"] for each in figures
    )
    polls = statistics.mean(each["polls us"]["python"] for each in figures if not each["yields"])
    slower = 1e-6 * polls / POLLING.python.polls
    return WaitKinds(*(
        WaitingRank(each.polls * slower, 1e-6 * look, each.resume * slower)
        for each in (YIELDING if yields else POLLING)
    ))  # fmt: skip


def rank_main() -> int:
    """Measure as one of the ranks; rank 0 prints what was found."""
    import collectives as cc
    from collectives.algorithms import recursive_doubling, ring
    from collectives.arrays.reduction import MAX

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    world = cc.init()
    other = world.size // 2  # on another machine
    is_one = world.rank in (0, other)
    pair = world.split(0 if is_one else 1)
    assert pair is not None
    transport, data = group_of(pair).transport, np.zeros(1)
    deadline = group_of(world).deadline("shared host")
    eager_pair = _EagerPair(pair)

    def ping_pong() -> None:
        if pair.rank == 0:
            transport.send(data, 1, deadline)
            transport.receive(data, 1, deadline)
        else:
            transport.receive(data, 0, deadline)
            transport.send(data, 0, deadline)

    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "python": (ping_pong, 2),
        "eager": (eager_pair.exchange, 1),
        "algorithm": (lambda: recursive_doubling.allreduce(transport, data, MAX, deadline), 1),
        "whole": (lambda: pair.allreduce(data, op=MAX, out=data, algorithm="doubling"), 1),
    }
    yields = os.environ.get("OMPI_MCA_mpi_yield_when_idle") == "1"  # noqa: SIM112
    found: dict[str, Any] = {"yields": yields}
    found["look us"] = _looks(world)
    found["polls us"] = {"python": _polled(pair), "eager": eager_pair.polled()}
    found["trip us"] = {
        name: 1e6 * _crowded(world, is_one, case) / trips for name, (case, trips) in cases.items()
    }
    buffer = np.zeros(2 * COPIED_BYTES, np.uint8)
    bounds = [0, COPIED_BYTES, 2 * COPIED_BYTES]
    if is_one and world.size == 2:
        copy = lambda: ring.allgather(transport, buffer, bounds, deadline)  # noqa: E731
        found["copying ns"] = 1e9 * _crowded(world, is_one, copy, 5, 2) / (4 * COPIED_BYTES)
    if world.rank == 0:
        print(json.dumps(found))
    return 0


class _EagerPair:
    """An exchange of eager messages between two ranks."""

    def __init__(self, pair: Any) -> None:
        from collectives.algorithms import eager
        from collectives.arrays.host_arrays import address
        from collectives.arrays.reduction import MAX

        self._pair = pair
        self._data = np.zeros(1)
        self._exchange = eager.EagerExchange(group_of(pair).transport, 8)
        self.block = eager.EagerBlock(self._exchange, np.dtype("f8"), 1, MAX, fill=True)
        self.block.fields.send = self.block.fields.out = address(self._data)

    def start(self) -> int:
        self.block.fields.hash, self.block.fields.inverse_hash = 0, ~0
        return self._exchange.kernel(self.block.address)

    def exchange(self) -> None:
        self._exchange.run(self.block, self.start(), self._pair.deadline("shared host"))

    def polled(self) -> float:
        """Return the microseconds of the looks after which the core is given away."""
        if self._pair.size > 2:
            return 0.0
        self.block.fields.yields = 0
        times = []
        for _ in range(TIMES):
            self._pair.barrier()
            if self._pair.rank == 1:
                time.sleep(2e-3)  # so that rank 0 looks in vain
                self.exchange()
                continue
            began = time.perf_counter()
            status = self.start()
            times.append(time.perf_counter() - began)
            self._exchange.run(self.block, status, self._pair.deadline("shared host"))
        self.block.fields.yields = 200
        return 1e6 * _median(times)


def _median(times: list[float]) -> float:
    return statistics.median(times) if times else 0.0


def _polled(pair: Any) -> float:
    """Return the microseconds of a rank's looks for a message before it gives its core away."""
    from collectives.transport.backoff import POLLS

    if pair.size > 2:
        return 0.0
    transport, deadline = group_of(pair).transport, group_of(pair).deadline("shared host")
    data = np.zeros(8, np.uint8)
    times = []
    for _ in range(TIMES):
        pair.barrier()
        if pair.rank == 1:
            time.sleep(2e-3)
            transport.send(data, 0, deadline)
            continue
        message = transport.start_receive(data, 1)
        began = time.perf_counter()
        for _ in range(POLLS):
            message.done()
        times.append(time.perf_counter() - began)
        transport.wait([message], deadline)
    return 1e6 * _median(times)


def _looks(world: Any) -> dict[str, float]:
    """Return the microseconds of a look of each kind, all ranks looking."""
    from collectives.transport.backoff import Backoff

    transport, deadline = group_of(world).transport, group_of(world).deadline("shared host")
    data = np.zeros(8, np.uint8)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    found = {}
    for kind in ("first", "later"):
        world.barrier()
        message = transport.start_receive(data, left)
        looks, began = 0, time.perf_counter()
        while time.perf_counter() - began < LOOK_SECONDS:
            looks += 1
            if kind == "first":
                message.done()
            else:
                pending = [each for each in [message] if not each.done()]
                deadline.check(transport, pending, transport.blocking_rank)
                Backoff().pause()
        spent = time.perf_counter() - began
        transport.send(data, right, deadline)
        transport.wait([message], deadline)
        mean = world.allreduce(spent / looks)
        found[kind] = 1e6 * float(mean) / world.size
    return found


def _crowded(
    world: Any, is_one: bool, case: Callable[[], Any], times: int = TIMES, trips: int = TRIPS
) -> float:
    """Return the seconds of a case between two ranks, while all others look for a message."""
    transport, deadline = group_of(world).transport, group_of(world).deadline("shared host")
    data = np.zeros(8, np.uint8)
    others = [rank for rank in range(world.size) if rank not in (0, world.size // 2)]
    found = []
    for _ in range(times):
        world.barrier()
        if not is_one:
            transport.receive(data, 0, deadline)
            continue
        case()
        began = time.perf_counter()
        for _ in range(trips):
            case()
        found.append((time.perf_counter() - began) / trips)
        if world.rank == 0:
            for rank in others:
                transport.send(data, rank, deadline)
    return _median(found)


if __name__ == "__main__":
    sys.exit(main())
