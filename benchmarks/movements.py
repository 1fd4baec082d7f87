"""Broadcast, all-gather, reduce-scatter and gather on one node against three MPI libraries.

    python benchmarks/movements.py [--ranks 2] [--rounds 2] [--json file]

Sizes are of the whole array: what is broadcast, what all-gather and gather join, what
reduce-scatter takes. Results go to memory that is there (`out=`), as MPI's do. Jobs, turns, near
and far, and what is written before each call: `turns.py`. "default" is Open MPI as it comes, "best"
the smallest ratio over all jobs; both are a peer's time over ours in the same turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from turns import TURNS, Case, Handover, Turn, arguments, bound, known_jobs, measure

from collectives.tools import plot

OPERATIONS = ["broadcast", "allgather", "reduce_scatter", "gather"]
SIZES = [256 << 10, 1 << 20, 4 << 20, 16 << 20]

# What is promised: ratios against Open MPI as it comes, and against the best of all.
GOALS = {"default": 1.3, "best": 1.0}


def main() -> None:
    """Run every job and print the tables."""
    options = arguments(__doc__, rounds=2).parse_args()
    if options.worker:
        worker(options)
        return
    measured = measure(options, known_jobs(), __file__)
    tables = measured.tables(combine, f"{options.ranks} ranks")
    for state, table in tables.items():
        print(f"{state}, microseconds")
        print(*map(line, table["rows"]), sep="\n")
    goals = held(tables)
    for goal in goals:
        said = "reached" if goal["measured"] >= goal["reach"] else "MISSED"
        print(f"{goal['name']:<50} {goal['measured']:5.2f}, goal {goal['reach']:g}: {said}")
    measured.write(options.json, ranks=options.ranks, states=tables, goals=goals)


def held(tables: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Hold what was measured against the goals: the worst size of each operation."""
    goals = []
    for state, table in tables.items():
        for operation in OPERATIONS:
            for against, reach in GOALS.items():
                rows = [row for row in table["rows"] if row["operation"] == operation]
                ratios = [row["ratios"][against] for row in rows]
                worst = min((r for r in ratios if not math.isnan(r)), default=math.nan)
                name = f"{operation}, {state}: {against} MPI"
                goals.append({"name": name, "measured": worst, "reach": reach})
    return goals


def combine(turns: list[Turn]) -> dict[str, Any]:
    """Join what the turns of one operation and size have measured."""
    jobs: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        jobs[turn.job].append(turn)
    peers = {
        name: statistics.median(turn.times["mpi"] for turn in own) for name, own in jobs.items()
    }
    ratios = {
        name: statistics.median(turn.times["mpi"] / turn.times["ours"] for turn in own)
        for name, own in jobs.items()
    }
    operation, nbytes = turns[0].what
    ours = statistics.median(turn.times["ours"] for turn in turns)
    ratios["best"] = min(ratios.values())
    ratios.setdefault("default", math.nan)  # its turns may all have been in the other state
    return {"operation": operation, "bytes": nbytes, "ours": ours, "mpi": peers, "ratios": ratios}


def line(row: dict[str, Any]) -> str:
    """Lay out one row, microseconds."""
    peers = "  ".join(f"{name} {took:.0f}" for name, took in row["mpi"].items())
    ratios = row["ratios"]
    return (
        f"{row['operation']:<15}{row['bytes']:>9}  ours {row['ours']:8.1f}  default "
        f"{ratios['default']:5.2f} x  best {ratios['best']:5.2f} x  ({peers})"
    )


def draw(tables: dict[str, dict[str, Any]], picture: Path) -> None:
    """Draw how many times as long MPI takes, as it comes and at its best, near and far."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 4 * len(tables), 4), layout="constrained")
    all_axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (state, table) in zip(all_axes, tables.items(), strict=True):
        for colour, operation in enumerate(OPERATIONS):
            rows = [row for row in table["rows"] if row["operation"] == operation]
            for against, style in (("best", "o-"), ("default", ":")):
                ratios = [row["ratios"][against] for row in rows]
                label = f"{operation}: {against} MPI"
                sizes = [row["bytes"] for row in rows]
                axes.semilogx(sizes, ratios, style, color=f"C{colour}", label=label, base=2)
        axes.axhline(1, color="gray", linestyle="--")
        axes.set(xlabel="bytes", title=f"{state}: {table['handover']:.0f} GB/s from core to core")
        axes.grid(alpha=0.3)
    all_axes[0].set(ylabel="MPI's time over ours", ylim=0)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8)
    plot.save(figure, picture)


def worker(options: argparse.Namespace) -> None:
    """Measure every operation and size on this rank; rank 0 prints."""
    import numpy as np
    from mpi4py import MPI

    import collectives as cc
    from collectives.core import topology
    from collectives.tools import baselines

    comm = cc.init()
    world = MPI.COMM_WORLD
    bound(world, options.cores)
    handover = Handover(world)
    found = []
    for operation in OPERATIONS:
        for nbytes in SIZES:
            whole = np.zeros(nbytes // 4, np.float32)
            result = np.zeros_like(whole)
            bounds = topology.chunk_bounds(whole.size, comm.size)
            share = np.zeros(bounds[comm.rank + 1] - bounds[comm.rank], np.float32)
            calls = {
                "broadcast": (lambda x=whole: comm.broadcast(x, out=x), whole),
                "allgather": (lambda x=share, y=result: comm.allgather(x, out=y), share),
                "reduce_scatter": (
                    lambda x=whole, y=share: comm.reduce_scatter(x, op=cc.SUM, out=y), whole,
                ),
                "gather": (
                    lambda x=share, y=result: comm.gather(x, out=y if comm.rank == 0 else None),
                    share,
                ),
            }  # fmt: skip
            ours, brought = calls[operation]
            mpi = baselines.native(operation, brought, bounds, 0)
            if operation == "broadcast":  # of what is written, too
                mpi = lambda x=whole: world.Bcast(x, 0)  # noqa: E731
            cases = {"ours": Case(world, ours, brought), "mpi": Case(world, mpi, brought)}
            for _ in range(TURNS):
                before = handover.rate()
                times = {name: 1e6 * case.seconds() for name, case in cases.items()}
                found.append(((operation, nbytes), (before, handover.rate()), times))
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
