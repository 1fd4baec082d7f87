"""All-reduce between machines, against MPI's own and against the rate of the link.

    python benchmarks/network.py [--json FILE] [--rounds 3] [--mbit 1000] [--cases 0,1]

Needs root, iproute2 and Open MPI. The machines are network namespaces on this one
(`tests/netns/namespaces.py`), their links shaped to the same rate in either direction; with a lower
rate the cores that all of them share matter less. MPI's settings are fixed when a process starts,
so every round starts a job with MPI's defaults, one in which it yields the core when idle (its
default is to spin), one with our settings, and one of our own rows, which take turns. MPI's rows
are not among these: packets that its bursts have lost make what follows on the same connections ten
times as slow. A time is the slowest rank's, a figure the median over all repetitions. The
targets (`GOALS`) are printed at the end beside the measurements, and written to the file under
`goals`.

The line time counts the bytes of the arrays alone. Headers take 4.4 % of a line with packets of
1,500 bytes, so no program exceeds 96 % of its rate; and where ranks are placed by slot, a flat ring
sends 7/6 of what a hierarchical all-reduce sends, so that no more than this can be won there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.communicator import group_of
from collectives.tools import byte_sizes, plot

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

MIB = 1 << 20

# machines, ranks per machine, how ranks are dealt out, bytes, repetitions per round
CASES = [
    (2, 1, "slot", 16 * MIB, 5),
    (4, 2, "slot", 16 * MIB, 3),
    (4, 2, "node", 16 * MIB, 3),
    (4, 2, "slot", MIB, 9),
    (4, 2, "slot", MIB // 16, 15),
    (4, 2, "slot", MIB // 256, 15),
    (4, 2, "slot", MIB // 2048, 15),
    (2, 1, "slot", MIB // 2048, 15),
    (2, 1, "slot", 8, 15),
    (2, 1, "slot", 3000, 15),
]

MPI = "MPI, our settings"
ALL_MACHINES = "4 machines x 2 ranks, 16 MiB, placed by "


class Goal(NamedTuple):
    """Something promised: how much faster one row is than another, or than the line allows."""

    name: str
    case: int  # in `CASES`
    row: str
    against: str  # another row, or "line": the share of its rate
    reach: float


GOALS = [
    Goal("2 machines, 16 MiB: ring, of the line rate", 0, "ring", "line", 0.9),
    Goal("2 machines, 16 MiB: float16 on the line", 0, "ring, float16", "ring", 1.8),
    Goal("2 machines, 16 MiB: int8 with feedback on the line", 0, "ring, int8", "ring", 3.4),
    Goal("2 machines, 16 MiB: top-k 1 % with feedback", 0, "ring, top-k", "ring", 10),
    # Of the ring's 7/6 of the bytes; see above.
    Goal(f"{ALL_MACHINES}slot: against a flat ring", 1, "hierarchical, shared", "ring", 1.0),
    Goal(f"{ALL_MACHINES}slot: against MPI", 1, "hierarchical", "MPI, default", 1.5),
    Goal(f"{ALL_MACHINES}node: against a flat ring", 2, "hierarchical", "ring", 1.5),
    Goal(f"{ALL_MACHINES}node: against MPI", 2, "hierarchical", "MPI, default", 1.5),
    Goal(
        f"{ALL_MACHINES}slot: float16 on the line", 1, "hierarchical, float16", "hierarchical", 1.8
    ),
    Goal(f"{ALL_MACHINES}slot: of the line rate", 1, "auto", "line", 0.9),
    Goal(f"{ALL_MACHINES}node: of the line rate", 2, "auto", "line", 0.9),
    Goal("4 machines x 2 ranks, 64 KiB: against MPI, our settings", 4, "auto", MPI, 1.0),
    Goal("4 machines x 2 ranks, 4 KiB: against MPI, our settings", 5, "auto", MPI, 1.0),
    Goal("4 machines x 2 ranks, 512 B: against MPI, our settings", 6, "auto", MPI, 1.0),
    Goal("2 machines, 512 B: against MPI, our settings", 7, "auto", MPI, 1 / 1.5),
    Goal("2 machines, 8 B: against MPI, our settings", 8, "auto", MPI, 1 / 1.5),
    Goal("2 machines, 3,000 B: against MPI, our settings", 9, "auto", MPI, 1 / 1.5),
]

# The jobs of a round: name of MPI's own operation in it, or "ours" -> environment.
JOBS = {
    "MPI, default": {"UNISONO_MPI_SETTINGS": "0"},
    "MPI, yielding": {"UNISONO_MPI_SETTINGS": "0", "OMPI_MCA_mpi_yield_when_idle": "1"},
    "MPI, our settings": {},
    "ours": {},
}

# Seconds of measuring after which a job makes no further repetition, and after which it is killed.
ENOUGH_SECONDS = 15.0
JOB_SECONDS = 120.0

# The least messages of an all-reduce, and nothing else: what MPI makes of the line.
FLOOR = "messages alone"

# Rows that are drawn.
DRAWN = ["MPI, default", "MPI, our settings", "auto", "hierarchical, float16", "hierarchical, int8"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the links, Mbit/s")
    parser.add_argument(
        "--cases", type=lambda text: [int(number) for number in text.split(",")],
        default=range(len(CASES)), help="numbers of some, from 0; all if left away",
    )  # fmt: skip
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)  # what jobs are called with
    options = parser.parse_args()
    if options.rank:
        name, nbytes, repetitions = options.rank
        return rank_main(name, int(nbytes), int(repetitions))

    from namespaces import NamespaceCluster, why_not

    reason = why_not()
    if reason is not None:
        print(f"benchmarks/network.py: {reason}", file=sys.stderr)
        return 1
    results = {}
    for number in options.cases:
        machines, per_machine, by, nbytes, repetitions = CASES[number]
        times: dict[str, list[float]] = defaultdict(list)
        with NamespaceCluster(machines) as cluster:
            for _ in range(options.rounds):
                for name, environment in JOBS.items():
                    job = cluster.run(
                        per_machine, __file__, "--rank", name, str(nbytes), str(repetitions),
                        timeout=JOB_SECONDS, shape=f"{options.mbit}mbit", by=by, **environment,
                    )  # fmt: skip
                    if job.status != 0:
                        print(job.stdout + job.stderr, file=sys.stderr)
                        return 1
                    for row, seconds in json.loads(job.stdout).items():
                        times[row] += seconds
        result = {
            "machines": machines, "ranks_per_machine": per_machine, "placed_by": by,
            "bytes": nbytes, "mbit": options.mbit,
            "line_seconds": line_seconds(machines, nbytes, options.mbit),
            "seconds": {name: statistics.median(values) for name, values in times.items()},
            "all_seconds": dict(times),
        }  # fmt: skip
        results[number] = result
        print(table(result), flush=True)
    goals = [held(goal, results[goal.case]) for goal in GOALS if goal.case in results]
    for goal in goals:
        said = "reached" if goal["measured"] >= goal["reach"] else "MISSED"
        print(f"{goal['name']:<62} {goal['measured']:5.2f}, goal {goal['reach']:g}: {said}")
    if options.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count()}
        facts |= {"cases": list(results.values()), "goals": goals}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def held(goal: Goal, result: dict[str, Any]) -> dict[str, object]:
    """Hold what was measured against a goal, for the file."""
    seconds = result["seconds"]
    other = result["line_seconds"] if goal.against == "line" else seconds[goal.against]
    return {**goal._asdict(), "measured": other / seconds[goal.row]}


def line_seconds(machines: int, nbytes: int, mbit: int) -> float:
    """The time in which the link carries what an all-reduce must at least send; no headers."""
    return 2 * (machines - 1) / machines * nbytes / (mbit * 1e6 / 8)


def table(result: dict[str, Any]) -> str:
    line = result["line_seconds"]
    seconds = result["seconds"]
    reference = "hierarchical" if result["ranks_per_machine"] > 1 else "ring"
    rows = [
        f"{result['machines']} machines x {result['ranks_per_machine']} ranks, placed by "
        f"{result['placed_by']}, {result['bytes'] / 1024:g} KiB, {result['mbit']} Mbit/s; "
        f"line time {1e3 * line:.2f} ms"
    ]
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        rows.append(
            f"    {name:<22} {1e3 * value:9.2f} ms  {100 * line / value:5.1f} % of the line rate"
            f"  {value / seconds[reference]:5.2f} x {reference}"
        )
    return "\n".join(rows)


def draw(cases: list[dict[str, Any]], picture: Path) -> None:
    """Draw the times of every case, ours, MPI's and the least one of the line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(DRAWN):
        found = {i: case["seconds"].get(name) for i, case in enumerate(cases)}
        places = [i + 0.15 * (number - 2) for i, seconds in found.items() if seconds]
        axes.bar(places, [1e3 * seconds for seconds in found.values() if seconds], 0.15, label=name)
    lines = [1e3 * case["line_seconds"] for case in cases]
    axes.plot(range(len(cases)), lines, "k_", ms=30, label="least time of the line")
    names = [
        f"{case['machines']} x {case['ranks_per_machine']}, {case['placed_by']}\n"
        f"{byte_sizes.size_text(case['bytes'])}B"
        for case in cases
    ]
    axes.set_xticks(range(len(cases)), names, fontsize=8)
    axes.set(yscale="log", ylabel="ms")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title("all-reduce of float32 between machines, 1 Gbit/s")
    plot.save(figure, picture)


def rank_main(job: str, nbytes: int, repetitions: int) -> int:
    """Time the rows of one job as one of its ranks; rank 0 prints the slowest ranks' times."""
    import collectives as cc

    comm = cc.init()
    rows = rows_of(comm, job)
    private = np.empty(nbytes // 4, np.float32)
    shared = comm.shared_empty(nbytes // 4, np.float32)
    noise = np.random.default_rng(comm.rank).standard_normal(nbytes // 4, np.float32)
    times: dict[str, list[float]] = {name: [] for name in rows}
    spent = 0.0  # as the slowest rank measures, so that all ranks stop together
    for repetition in range(repetitions + 1):  # the first connects the ranks, and is not counted
        if repetition > 1 and spent > ENOUGH_SECONDS:
            break
        for name, run in rows.items():
            buffer = shared if name.endswith("shared") else private
            # Ones would all be candidates of top-k.
            buffer[...] = noise if "top-k" in name else 1
            comm.barrier()
            began = time.perf_counter()
            run(buffer)
            took = time.perf_counter() - began
            if name != FLOOR and "top-k" not in name:  # these do not return the sum
                error = np.abs(buffer / comm.size - 1).max()
                assert error <= (0.02 if "int8" in name else 0), name
            slowest = float(comm.allreduce(took, op=cc.MAX))
            spent += slowest
            if repetition:
                times[name].append(slowest)
    if comm.rank == 0:
        print(json.dumps(times))
    return 0


def rows_of(comm, job: str):
    """What is measured: name -> function that sums a buffer over all ranks, in place.

    The buffers of rows whose names end with "shared" lie in memory that the node shares.
    """
    from mpi4py import MPI

    import collectives as cc
    from collectives.algorithms import hierarchical
    from collectives.transport.transport import Deadline

    def of_mpi(buffer):
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)

    if job != "ours":
        return {job: of_mpi}

    def call(**how):
        return lambda buffer: comm.allreduce(buffer, op=cc.SUM, out=buffer, **how)

    rows = {
        "auto": call(),
        "ring": call(algorithm="ring"),
        "ring, float16": call(algorithm="ring", compression=cc.FP16),
        "ring, int8": call(algorithm="ring", compression=cc.INT8.with_feedback(), name="x"),
        "ring, top-k": call(algorithm="ring", compression=cc.TOPK(0.01).with_feedback(), name="z"),
        "halving": call(algorithm="halving"),
    }
    rows[FLOOR] = messages_alone(comm)
    if comm.local_size > 1:
        # As it is where ranks of a node do not share memory.
        by_messages = group_of(comm).levels_by_messages
        rows |= {
            "hierarchical": call(algorithm="hierarchical"),
            "hierarchical, shared": call(algorithm="hierarchical"),
            "hierarchical, float16": call(compression=cc.FP16.on("network")),
            "hierarchical, int8": call(compression=cc.INT8.with_feedback(), name="y"),
            "hierarchical, messages": lambda buffer: hierarchical.allreduce(
                by_messages, buffer, cc.SUM, Deadline("", 60.0)
            ),
        }
    return rows


def messages_alone(comm):
    """Return a function that sends what an all-reduce must at least send, and adds nothing.

    Each rank sends its part of the array around the machines by plain MPI messages, to the rank of
    the same place on the next one, as many chunks as a reduce-scatter and an all-gather take.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    nodes, place = comm.num_nodes, comm.local_rank
    ranks = {where: rank for rank, where in enumerate(world.allgather((comm.node_rank, place)))}
    right = ranks[(comm.node_rank + 1) % nodes, place]
    left = ranks[(comm.node_rank - 1) % nodes, place]

    def run(buffer):
        chunk = buffer.size // comm.size
        coming = np.empty(chunk, buffer.dtype)
        for _ in range(2 * (nodes - 1)):
            world.Sendrecv(buffer[:chunk], right, recvbuf=coming, source=left)

    return run


if __name__ == "__main__":
    sys.exit(main())
