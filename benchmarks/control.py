"""What control costs at scale: messages, peers and bytes of each rank, for groups of up to 1,024.

    python benchmarks/control.py [--json FILE] [--ranks 16,128,1024]

Every rank is simulated (`collectives.simulation`): a group as a job has it, a rank on each machine,
over a transport that counts. Messages are those that a rank sends, peers the ranks that it sends to
or receives from, since MPI connects two ranks when they first meet; both of the rank with most.
Bytes on the line are those of a rank. The memory of a group is what Python allocates for it, the
mean over the ranks, without the shared memory of a node, whose file is the only one that is open
for it. `init` begins here where MPI has started and every rank knows where the others are (one
`MPI_Allgather` of 8 bytes). A group by `split` is an all-gather of a number each, and MPI's own
agreement about a number for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import collectives as cc
from collectives import settings
from collectives.operations import broadcast, compare, reduce, rows, settle
from collectives.operations.group import Group
from collectives.simulation import ranks
from collectives.simulation.cluster import Cluster
from collectives.simulation.transport import SimulatedTransport
from collectives.transport.transport import Deadline

LIMIT = 60.0

# Calls that fill the recorder, and the most ranks that make so many.
CALLS, MOST_OF_CALLS = 300, 128


class Counts:
    """What one rank has sent, and to and from whom."""

    def __init__(self) -> None:
        self.messages = self.nbytes = 0
        self.peers: set[int] = set()


def counted(transport: SimulatedTransport, counts: Counts) -> None:
    """Let a transport count what is started."""
    send, receive = transport.start_send, transport.start_receive

    def start_send(data: Any, dest: int) -> Any:
        counts.messages += 1
        counts.nbytes += data.nbytes
        counts.peers.add(dest)
        return send(data, dest)

    def start_receive(into: Any, source: int) -> Any:
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


ACTS: dict[str, Callable[[Group], object]] = {
    "init: settings are settled": lambda g: settle.settle(g.settings, g.transport),
    "compare a call": lambda g: compare.agree(g, 1, {"operation": "x"}, Deadline("x", LIMIT)),
    "allreduce, 8 B": lambda g: reduce.allreduce(g, np.zeros(1)),
    "allreduce, 128 KiB": lambda g: reduce.allreduce(g, np.zeros(1 << 15, np.float32)),
    "broadcast, 128 KiB": lambda g: broadcast.broadcast(g, np.zeros(1 << 15, np.float32)),
    "barrier": lambda g: broadcast.barrier(g),
    "allgather, a number each": lambda g: rows.allgather(g, np.zeros(1)),
    "a mismatch is named": mismatch,
    "alltoall, a number each": lambda g: rows.alltoall(g, np.zeros(g.size)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--ranks", default="16,128,1024")
    options = parser.parse_args()
    figures = {}
    for size in map(int, options.ranks.split(",")):
        figures[size] = measured(size)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    names = list(next(iter(figures.values())))
    print("most messages / peers / KiB sent of a rank, with", ", ".join(map(str, figures)), "ranks")
    for name in names:
        cells = [" / ".join(str(n) for n in figures[size].get(name, ["-"])) for size in figures]
        print(f"{name:<28}", *(f"{cell:>20}" for cell in cells))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measured(size: int) -> dict[str, list[float]]:
    """Return for each act the most messages, peers and KiB of a rank; and what a group holds."""
    own = settings.from_environment()
    found = {}
    for name, act in ACTS.items():
        if name.startswith("alltoall") and size > 256:  # P - 1 of each, and many minutes
            continue
        counts = [Counts() for _ in range(size)]

        def program(access: ranks.Access, act=act, counts=counts) -> None:
            counted(access.transport, counts[access.transport.rank])
            act(Group(access.transport, range(size), own))

        ended = ranks.run(Cluster(size, size), program, payload=True)
        if (error := ranks.first_error(ended)) is not None:
            raise RuntimeError(f"{name}, {size} ranks") from error
        found[name] = [
            max(count.messages for count in counts),
            max(len(count.peers) for count in counts),
            round(max(count.nbytes for count in counts) / 1024, 1),
        ]
    return found | memory(size, own)


def memory(size: int, own: settings.Settings) -> dict[str, list[float]]:
    """Return what a group holds, mean over the ranks, without what its transport holds.

    Its bytes when it is made; those that further calls of one kind add, with which the recorder is
    full and the call has its plan; and how many files are open for it.
    """
    made, groups = [], []
    marks: list[int] = []
    calls = CALLS if size <= MOST_OF_CALLS else 0

    def program(access: ranks.Access) -> None:
        before = tracemalloc.get_traced_memory()[0]
        group = Group(access.transport, range(size), own)
        made.append(tracemalloc.get_traced_memory()[0] - before)
        groups.append(group)  # kept until all is counted
        x = np.zeros(2)
        for several in (1, calls):
            for _ in range(several):
                reduce.allreduce(group, x, out=x)
            broadcast.barrier(group)
            if group.rank == 0:
                marks.append(tracemalloc.get_traced_memory()[0])

    files = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    ranks.run(Cluster(size, size), program, payload=True)
    tracemalloc.stop()
    found: dict[str, list[float]] = {
        "files that a group opens": [(len(os.listdir("/proc/self/fd")) - files) / size],
        "memory of a group, KiB": [round(sum(made) / size / 1024, 1)],
    }
    if calls:
        more = (marks[1] - marks[0]) / size / 1024
        found[f"{CALLS} calls more, KiB"] = [round(more, 1)]
    return found


if __name__ == "__main__":
    sys.exit(main())
