"""What control costs at scale: messages, peers and bytes of each rank, for groups of up to 1,024.

    python benchmarks/control.py [--json FILE] [--ranks 16,128,1024] [--real 8,16]

Every rank is simulated (`collectives.simulation`): a group as a job has it, a rank on each machine,
over a transport that counts. Messages are those that a rank sends, peers the ranks that it sends to
or receives from, since MPI connects two ranks at their first message; both of the rank with most.
Bytes on the line are those of a rank. The memory of a group is what Python allocates for it, the
mean over the ranks, without the shared memory of a node, whose file is the only one that is open
for it. `init` begins here where MPI has started and every rank knows where the others are (one
`MPI_Allgather` of 8 bytes). A group by `split` is an all-gather of a number each, and MPI's own
agreement about a number for it. Rows with 8 ranks on a node count what goes between nodes; inside
of one there is shared memory. A rank that never calls is waited for until nothing is under way;
over MPI the others then ask who is missing (`transport.failure_detector`).

An all-to-all of more than 256 ranks is not simulated, which would take many minutes: its row says
what its schedule says (`topology.ring_neighbours` at every distance), beside the comparison.

`--real` starts real ranks by Open MPI, a machine for each (network namespaces of this one: root and
iproute2). For the rank with most, how many TCP connections to others and files it has open, and
its memory, after `init`, and after each of some operations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import collectives as cc
from collectives.calls import shared_settings, signature_check
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.core import settings, topology
from collectives.operations import broadcast, gather_scatter, persistent, reduce
from collectives.operations import split as groups
from collectives.simulation import ranks
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.transport import SimulatedTransport
from collectives.tools import plot
from collectives.transport.transport import Deadline

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

LIMIT = 60.0

ESTABLISHED = "01"  # in /proc/net/tcp

# Calls that fill the recorder, and the most ranks that make so many; more ranks record them only.
CALLS, MOST_OF_CALLS = 300, 128

# Acts whose messages are drawn.
DRAWN = [
    "compare a call", "allreduce, 128 KiB", "broadcast, 128 KiB", "allgather, a number each",
    "a mismatch is named", "split, without MPI's part", "plan_allreduce, 128 KiB, two runs",
]  # fmt: skip


class Counts:
    """What one rank has sent, and to and from whom."""

    def __init__(self) -> None:
        self.messages = self.nbytes = 0
        self.peers: set[int] = set()


def counted(transport: SimulatedTransport, counts: Counts, away: list[bool]) -> None:
    """Let a transport count what is started to and from ranks that are away."""
    send, receive = transport.start_send, transport.start_receive

    def start_send(data: Any, dest: int) -> Any:
        if away[dest]:
            counts.messages += 1
            counts.nbytes += data.nbytes
            counts.peers.add(dest)
        return send(data, dest)

    def start_receive(into: Any, source: int) -> Any:
        if away[source]:
            counts.peers.add(source)
        return receive(into, source)

    transport.start_send, transport.start_receive = start_send, start_receive


def mismatch(group: Group) -> None:
    op = cc.MAX if group.rank == group.size // 2 else cc.SUM
    try:
        reduce.allreduce(group, np.zeros(4, np.float32), op=op)
    except cc.MismatchError as error:
        assert f"rank {group.size // 2}" in str(error)  # noqa: PT017  (not a test)
    else:
        raise AssertionError("no mismatch was found")


def silent(group: Group) -> None:
    """Wait for a rank that never calls."""
    if group.rank == group.size // 2:
        return
    with contextlib.suppress(cc.CollectiveTimeout):  # as soon as nothing is under way any more
        reduce.allreduce(group, np.zeros(4, np.float32))


def split(group: Group) -> None:
    """Make a group of all; MPI's own part of it is not counted, and here is nothing."""
    group.transport.split = lambda color, key: group.transport  # type: ignore[method-assign]
    groups.split(group, 0)


def run_twice(plan: Callable[[], object]) -> None:
    plan()
    plan()


ACTS: dict[str, Callable[[Group], object]] = {
    "init: settings are settled": lambda g: shared_settings.negotiate(g.settings, g.transport),
    "compare a call": lambda g: signature_check.verify(
        g, 1, {"operation": "x"}, Deadline("x", LIMIT)
    ),
    "allreduce, 8 B": lambda g: reduce.allreduce(g, np.zeros(1)),
    "allreduce, 128 KiB": lambda g: reduce.allreduce(g, np.zeros(1 << 15, np.float32)),
    "broadcast, 128 KiB": lambda g: broadcast.broadcast(g, np.zeros(1 << 15, np.float32)),
    "barrier": lambda g: broadcast.barrier(g),
    "allgather, a number each": lambda g: gather_scatter.allgather(g, np.zeros(1)),
    "a mismatch is named": mismatch,
    "a silent rank is waited for": silent,
    "split, without MPI's part": split,
    "plan_allreduce, 128 KiB, two runs": lambda g: run_twice(
        persistent.plan_allreduce(g, np.zeros(1 << 15, np.float32))
    ),
    "plan_broadcast, 128 KiB, two runs": lambda g: run_twice(
        persistent.plan_broadcast(g, np.zeros(1 << 15, np.float32))
    ),
    "plan_allgather, a number each, two runs": lambda g: run_twice(
        persistent.plan_allgather(g, np.zeros(1))
    ),
    "plan_reduce_scatter, 128 KiB, two runs": lambda g: run_twice(
        persistent.plan_reduce_scatter(g, np.zeros((1 << 15, 1), np.float32))
    ),
    "alltoall, a number each": lambda g: gather_scatter.alltoall(g, np.zeros(g.size)),
}


# Acts that are counted with several ranks on a node, too, by messages inside of it.
SEVERAL = ("compare a call", "allreduce, 8 B", "allreduce, 128 KiB", "broadcast, 128 KiB")
PER_NODE = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--ranks", default="16,128,1024")
    parser.add_argument("--real", default="", help="numbers of machines, as 8,16")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main()
    figures: dict[str, Any] = {}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text())
    if options.real:
        figures["real"] = {number: real(int(number)) for number in options.real.split(",")}
        print(json.dumps(figures["real"], indent=1))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
        return 0
    figures = {"real": figures.get("real", {})}
    for size in map(int, options.ranks.split(",")):
        figures[str(size)] = measured(size)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sizes = options.ranks.split(",")
    print("most messages / peers / KiB sent of a rank, with", ", ".join(sizes), "ranks")
    for name in dict.fromkeys(name for size in sizes for name in figures[size]):
        cells = [" / ".join(str(n) for n in figures[size].get(name, ["-"])) for size in sizes]
        print(f"{name:<28}", *(f"{cell:>20}" for cell in cells))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measured(size: int) -> dict[str, list[float]]:
    """Return for each act the most messages, peers and KiB of a rank; and what a group holds."""
    own = replace(settings.from_environment(), shared_memory=None)
    found: dict[str, list[float]] = {}
    for name, act in ACTS.items():
        if name.startswith("alltoall") and size > 256:
            found["alltoall, a number each, by its schedule"] = scheduled(size)
            continue
        found[name] = most_of(act, SimulatedCluster(size, size), own)
        if name in SEVERAL:
            found[f"{name}, {PER_NODE} ranks on a node"] = most_of(
                act, SimulatedCluster(size, size // PER_NODE), own
            )
    return found | memory(size, own)


def most_of(
    act: Callable[[Group], object], cluster: SimulatedCluster, own: settings.Settings
) -> list[float]:
    """Return the most messages, peers and KiB of a rank in an act, to and from other nodes."""
    leaders = cluster.leaders()
    counts = [Counts() for _ in leaders]

    def program(access: ranks.RankContext) -> None:
        rank = access.transport.rank
        away = [leader != leaders[rank] for leader in leaders]
        counted(access.transport, counts[rank], away)
        act(Group(access.transport, leaders, own))

    ended = ranks.run(cluster, program, payload=True)
    if (error := ranks.first_error(ended)) is not None:
        raise error
    return [
        max(count.messages for count in counts),
        max(len(count.peers) for count in counts),
        round(max(count.nbytes for count in counts) / 1024, 1),
    ]


def scheduled(size: int) -> list[float]:
    """Return the messages and peers of an all-to-all, from the functions that return the schedule.

    Its comparison has the peers of `topology.doubling`, among the others.
    """
    peers = {peer for step in range(1, size) for peer in topology.ring_neighbours(0, size, step)}
    compared = len(topology.doubling(0, size).partners)
    return [size - 1 + compared, len(peers)]


def memory(size: int, own: settings.Settings) -> dict[str, list[float]]:
    """Return what a group holds, mean over the ranks, without what its transport holds.

    Its bytes when it is made; those that further calls of one kind add, with which the recorder is
    full and the call has its plan; and how many files are open for it.
    """
    made, groups = [], []
    marks: list[int] = []

    def repeat(group: Group, x: Any) -> None:
        if size <= MOST_OF_CALLS:
            reduce.allreduce(group, x, out=x)
            return
        with begin_call(group, "allreduce") as call:
            call.describe(op="mean", dtype=x.dtype, shape=x.shape, algorithm="auto")

    def program(access: ranks.RankContext) -> None:
        before = tracemalloc.get_traced_memory()[0]
        group = Group(access.transport, range(size), own)
        made.append(tracemalloc.get_traced_memory()[0] - before)
        groups.append(group)  # kept until all is counted
        x = np.zeros(2)
        reduce.allreduce(group, x, out=x)
        for several in (0, CALLS):
            for _ in range(several):
                repeat(group, x)
            broadcast.barrier(group)
            if group.rank == 0:
                marks.append(tracemalloc.get_traced_memory()[0])

    files = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    ranks.run(SimulatedCluster(size, size), program, payload=True)
    tracemalloc.stop()
    more = (marks[1] - marks[0]) / size / 1024
    return {
        "files that a group opens": [(len(os.listdir("/proc/self/fd")) - files) / size],
        "memory of a group, KiB": [round(sum(made) / size / 1024, 1)],
        f"{CALLS} calls more, KiB": [round(more, 1)],
    }


def real(machines: int) -> list[dict[str, Any]]:
    """Return what the rank with most has open, after one operation and another."""
    from namespaces import NamespaceCluster

    with NamespaceCluster(machines) as cluster:
        job = cluster.run(1, __file__, "--rank", timeout=120)
    if job.status != 0:
        raise RuntimeError(job.stdout + job.stderr)
    found: list[dict[str, Any]] = json.loads(job.stdout.splitlines()[-1])
    return found


REAL = {
    "init": lambda comm: None,
    "allreduce, 8 B": lambda comm: comm.allreduce(np.zeros(1)),
    "allreduce, 128 KiB": lambda comm: comm.allreduce(np.zeros(1 << 15, np.float32)),
    "alltoall, a number each": lambda comm: comm.alltoall(np.zeros(comm.size)),
}


def draw(figures: dict[str, Any], picture: Path) -> None:
    """Draw the messages of the rank with most over the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [name for name in figures if name != "real"]
    ranks = [int(name) for name in sizes]
    for act in DRAWN:
        axes.loglog(ranks, [figures[name][act][0] for name in sizes], "o-", label=act, base=2)
    axes.plot(ranks, np.log2(ranks), ":", color="gray", label="log2 P")
    axes.plot(ranks, ranks, "--", color="gray", label="P")
    axes.set(xlabel="ranks, one on each machine", ylabel="messages of the rank with most")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    plot.save(figure, picture)


def rank_main() -> int:
    """Do what `REAL` says as a rank; rank 0 prints what was open after each of it."""
    comm = cc.init()
    rows = []
    for act in REAL.values():
        act(comm)
        rows.append([*opened(), resident()])
    most = np.array(comm.allgather_object(rows)).max(axis=0).tolist()
    if comm.rank == 0:
        names = ("connections", "other files", "MiB")
        found = [
            {"after": act, **dict(zip(names, map(round, row), strict=True))}
            for act, row in zip(REAL, most, strict=True)
        ]
        print(json.dumps(found))
    return 0


def opened() -> tuple[int, int]:
    """Return the numbers of open TCP connections and of other open files of this process."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    standing = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == ESTABLISHED:
            standing.add(f"socket:[{words[9]}]")
    connections = sum(link in standing for link in links)
    return connections, len(links) - connections


def resident() -> float:
    """Return the MiB of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
