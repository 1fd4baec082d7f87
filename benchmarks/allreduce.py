"""All-reduce on one node against three MPI libraries, each at its best, and Gloo; near and far.

    python benchmarks/allreduce.py [--ranks 2] [--dtype float32] [--json file]
        [--plot file.svg]

Each setting of Open MPI and each other library is one job, in which Unisono and the peers take
turns at every size, near and far apart. Ranks rewrite their arrays before each call (`turns.py`).
All jobs run `--rounds` times in turns. Figures are medians of the slowest rank. A ratio is a peer's
time over Unisono's in the same turns. `call` writes another array and `new` returns a new one; both
are compared with MPI on two arrays. `plan` and `shared` are in place and compared with
`MPI.IN_PLACE`. "best" is the smallest ratio over the jobs. A column has the time to write an array,
in private and in shared memory.

`copy` is the time in which all ranks at once copy as many bytes from private to private memory, for
comparison with any program that moves the data. MPI has no bfloat16, so its rows use float16. Gloo
runs as under `torchrun` (`LOCAL_WORLD_SIZE`), which lets it use shared memory.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from turns import (
    OPEN_MPI,
    OTHERS,
    TURNS,
    Case,
    Handover,
    Turn,
    arguments,
    bound,
    known_jobs,
    measure,
    unbound,
)

from collectives.tools import plot

SIZES = [8, 64, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]

OURS = ("plan", "call", "new", "shared")

Row = dict[str, Any]


class Goal(NamedTuple):
    """Something promised: a case's ratio against a peer, for some sizes."""

    name: str
    state: str
    case: str
    against: str  # a column of ratios, or "copies"
    sizes: tuple[int, int]  # from, to
    reach: float
    dtypes: tuple[str, ...] = ("float32",)


KIB, MIB = 1 << 10, 1 << 20
HALF = ("float16", "bfloat16")
GOALS = [
    Goal("private, far, 64 KiB: best MPI", "far", "plan", "best", (64 * KIB, 64 * KIB), 1.3),
    Goal("private, far, 256 KiB to 1 MiB: best MPI", "far", "plan", "best", (256 * KIB, MIB), 1.2),
    Goal("private, far, 4 to 64 MiB: best MPI", "far", "plan", "best", (4 * MIB, 64 * MIB), 2.0),
    Goal("private, near, 64 KiB: best MPI", "near", "plan", "best", (64 * KIB, 64 * KIB), 1.1),
    Goal(
        "private, near, 256 KiB to 1 MiB: best MPI", "near", "plan", "best", (256 * KIB, MIB), 1.5
    ),
    Goal("private, near, 4 to 64 MiB: best MPI", "near", "plan", "best", (4 * MIB, 64 * MIB), 1.8),
    Goal("private, near, 1 to 4 MiB: copies", "near", "plan", "copies", (MIB, 4 * MIB), 2.0),
    Goal("shared, 64 to 256 MiB: best MPI", "", "shared", "best", (64 * MIB, 256 * MIB), 3.0),
    Goal("plain call, 8 B: Open MPI", "", "call", "default", (8, 8), 0.5),
    Goal("plain call, 4 KiB: Open MPI", "", "call", "default", (4 * KIB, 4 * KIB), 1 / 1.2),
    Goal("16 bits: Open MPI's float16", "", "plan", "default", (64 * KIB, 64 * MIB), 10.0, HALF),
]


def main() -> None:
    """Run every job and print the tables."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the arrays")
    parser.add_argument("--plot", type=Path, help="draw them here")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    how = ("--dtype", options.dtype, "--sizes", *options.sizes)
    measured = measure(options, known_jobs(), __file__, *how)
    tables = measured.tables(combine, f"{options.dtype} SUM, {options.ranks} ranks")
    for state, table in tables.items():
        print(f"{state}, microseconds")
        print_table(table["rows"])
    goals = held(tables, options.dtype) if options.ranks == 2 else []
    for goal in goals:
        said = "reached" if goal["measured"] >= goal["reach"] else "MISSED"
        print(f"{goal['name']:<44} {goal['measured']:6.2f}, goal {goal['reach']:.2f}: {said}")
    measured.write(
        options.json, ranks=options.ranks, dtype=options.dtype, states=tables, goals=goals
    )
    if options.plot:
        draw(options, tables)


def combine(turns: list[Turn]) -> Row:
    """Join what the turns of one size have measured."""
    jobs: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        jobs[turn.job].append(turn)

    def median(of: list[Turn], case: str, under: str = "") -> float:
        return statistics.median(t.times[case] / (t.times[under] if under else 1.0) for t in of)

    with_gloo = [turn for turn in turns if "gloo" in turn.times]

    def ratios(case: str) -> Row:
        mpi = "mpi" if case in ("call", "new") else "mpi in place"  # as ours leaves its result
        found = {name: median(of, mpi, case) for name, of in jobs.items()}
        gloo = {"Gloo": median(with_gloo, "gloo", case)} if with_gloo else {}
        return {"best": min(found.values()), **found, **gloo}

    row: Row = {"bytes": turns[0].what}
    row |= {case: median(turns, case) for case in (*OURS, "copy", "write private", "write shared")}
    for mpi in ("mpi", "mpi in place"):
        row[mpi] = {name: median(of, mpi) for name, of in jobs.items()}
    if with_gloo:
        row["gloo"] = median(with_gloo, "gloo")
    row["ratios"] = {case: ratios(case) for case in OURS}
    row["copies"] = {case: median(turns, case, "copy") for case in OURS}
    return row


def print_table(rows: list[Row]) -> None:
    """Print one line for each size."""
    jobs = [name for name in [*OPEN_MPI, *OTHERS] if any(name in row["mpi"] for row in rows)]
    heads = ["bytes", *OURS, "copy", "write", "shared", *jobs, "Gloo"]
    heads += [f"{case}: best" for case in OURS] + ["plan/copy"]
    print("  ".join(f"{head:>12}" for head in heads))
    for row in rows:
        times = [row[case] for case in (*OURS, "copy", "write private", "write shared")]
        times += [row["mpi in place"].get(name, math.nan) for name in jobs]
        times += [row.get("gloo", math.nan)]
        times += [row["ratios"][case]["best"] for case in OURS] + [row["copies"]["plan"]]
        print("  ".join([f"{row['bytes']:12}", *(f"{value:12.2f}" for value in times)]))


def held(tables: dict[str, Row], dtype: str) -> list[Row]:
    """Hold what was measured against the goals: the worst size of each."""
    goals = []
    for goal in (goal for goal in GOALS if dtype in goal.dtypes):
        for state in [goal.state] if goal.state else tables:
            rows = tables.get(state, {"rows": []})["rows"]
            low, high = goal.sizes
            rows = [row for row in rows if low <= row["bytes"] <= high]
            if not rows:
                continue
            if goal.against == "copies":
                worst = max(row["copies"][goal.case] for row in rows)
                entry = {"measured": 1 / worst, "reach": 1 / goal.reach}
            else:
                found = [row["ratios"][goal.case].get(goal.against) for row in rows]
                if None in found:
                    continue
                entry = {"measured": min(found), "reach": goal.reach}
            name = goal.name if goal.state else f"{goal.name} ({state})"
            goals.append({"name": name, **entry})
    return goals


def peers(row: dict[str, Any]) -> dict[str, float]:
    """Return MPI's times of a kept row; earlier files have none in place."""
    found: dict[str, float] = row.get("mpi in place", row["mpi"])
    return found


def draw(options: argparse.Namespace, tables: dict[str, Row]) -> None:
    """Draw the times over the size, near and far side by side, into the file of `--plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(tables), 5), layout="constrained")
    all_axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (state, table) in zip(all_axes, tables.items(), strict=True):
        rows = table["rows"]
        lines: dict[str, list[float]] = {
            "Unisono, private arrays": [row["plan"] for row in rows],
            "Unisono, shared_empty": [row["shared"] for row in rows],
            "Open MPI, default": [peers(row).get("default", math.nan) for row in rows],
            "MPI, best of each size": [min(peers(row).values()) for row in rows],
            "Gloo": [row.get("gloo", math.nan) for row in rows],
            "all ranks copy as much": [row["copy"] for row in rows],
        }
        for label, times in lines.items():
            style = "--" if label.startswith("all") else "o-"
            axes.loglog([row["bytes"] for row in rows], times, style, label=label)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="bytes", title=f"{state}: {table['handover']:.1f} GB/s from core to core")
        axes.grid(alpha=0.3)
    all_axes[0].set(ylabel="median time of the slowest rank, us")
    all_axes[0].legend()
    figure.suptitle(f"All-reduce of {options.dtype}, {options.ranks} ranks on one node")
    plot.save(figure, options.plot)


def worker(options: argparse.Namespace) -> None:
    """Measure every size on this rank; rank 0 prints."""
    import ml_dtypes  # noqa: F401
    import numpy as np
    from mpi4py import MPI

    import collectives as cc
    from collectives.core import topology
    from collectives.tools import baselines

    comm = cc.init()
    world = MPI.COMM_WORLD
    bound(world, options.cores)
    handover = Handover(world)
    dtype = np.dtype(options.dtype)
    found: list[tuple[int, tuple[float, float], dict[str, float]]] = []
    for nbytes in options.sizes:
        private = np.zeros(nbytes // dtype.itemsize, dtype)
        result = np.zeros_like(private)
        bounds = topology.chunk_bounds(private.size, comm.size)
        shared = comm.shared_empty(private.size, dtype)
        wire = private.view(np.float16) if options.dtype == "bfloat16" else private
        calls: dict[str, tuple[Callable[[], object], Any]] = {
            "plan": (comm.plan_allreduce(private, op=cc.SUM), private),
            "call": (lambda x=private, y=result: comm.allreduce(x, op=cc.SUM, out=y), private),
            "new": (lambda x=private: comm.allreduce(x, op=cc.SUM), private),
            "shared": (comm.plan_allreduce(shared, op=cc.SUM), shared),
            "mpi": (baselines.native("allreduce", private, bounds, 0), private),
            "mpi in place": (lambda x=wire: world.Allreduce(MPI.IN_PLACE, x, MPI.SUM), wire),
            "copy": (lambda x=private, y=result: np.copyto(y, x), private),
        }
        if options.gloo:
            with unbound():
                calls["gloo"] = baselines.gloo("allreduce", private, bounds, 0), private
        cases = {name: Case(world, *call) for name, call in calls.items()}
        writes = {
            "write private": Case(world, lambda: None, private),
            "write shared": Case(world, lambda: None, shared),
        }
        for _ in range(TURNS):
            before = handover.rate()
            times = {name: case.seconds() for name, case in cases.items()}
            times |= {name: case.write_seconds() for name, case in writes.items()}
            rates = before, handover.rate()
            found.append((nbytes, rates, {name: 1e6 * s for name, s in times.items()}))
    baselines.close()
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
