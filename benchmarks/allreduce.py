"""All-reduce on one node against MPI's own, at its default and at its best settings, and Gloo.

    python benchmarks/allreduce.py [--ranks 2] [--dtype float32] [--json file] [--plot file.png]

Each setting of Open MPI is a run of its own, in which ours and the peers' take turns at every size;
all settings are run `--rounds` times in turns. Figures are medians of the slowest rank. Ratios are
a peer's time over ours in the same run, medians over the rounds: between runs a virtual machine may
move to other cores, which are nearer to each other or further apart. "best" is the setting with the
smallest ratio at that size. `copy` is the time in which all ranks at once copy as many bytes from
private to private memory, a floor for anything that moves the data. MPI knows no bfloat16: float16
takes its place there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = [8, 64, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]

TURNS = 9
TURN_SECONDS = 0.02  # of one case, in calls of which there are 3 to 1000

Row = dict[str, float]  # name of a column -> figure

# Open MPI 5's knobs that win somewhere on one node; the last where ranks outnumber the cores.
SETTINGS = {
    "default": {},
    "sm": {"OMPI_MCA_coll_sm_priority": "100"},
    "no cma": {"OMPI_MCA_smsc": "^cma"},
    "yield": {"OMPI_MCA_mpi_yield_when_idle": "1"},
}


def main() -> None:
    """Run every setting in an mpirun of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the arrays")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    runs: dict[str, list[list[Row]]] = {name: [] for name in SETTINGS}
    for _ in range(options.rounds):
        for name in SETTINGS:
            runs[name].append(launch(options, name))
    rows = [
        combine({name: [run[index] for run in found] for name, found in runs.items()})
        for index in range(len(options.sizes))
    ]
    print(f"{options.dtype} SUM, {options.ranks} ranks, microseconds")
    columns = list(rows[0])
    print("  ".join(f"{c:>12}" for c in columns))
    for row in rows:
        print("  ".join(f"{row[c]:12.2f}" if c != "bytes" else f"{row[c]:12}" for c in columns))
    if options.json:
        facts = {"ranks": options.ranks, "dtype": options.dtype, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    if options.plot:
        draw(options, rows)


def launch(options: argparse.Namespace, setting: str) -> list[Row]:
    """Run the worker under mpirun; returns what rank 0 measured."""
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(options.ranks), sys.executable, __file__, "--worker"]
    command += ["--dtype", options.dtype, "--sizes", *map(str, options.sizes)]
    if setting == "default" and importlib.util.find_spec("torch"):
        command.append("--gloo")
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS[setting]}, text=True, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def combine(runs: dict[str, list[Row]]) -> Row:
    """Join the figures for one size: setting -> what its runs have measured."""

    def median(rows: list[Row], name: str, under: str = "") -> float:
        return statistics.median(row[name] / (row[under] if under else 1.0) for row in rows)

    def best(under: str = "") -> float:
        return min(median(rows, "mpi", under) for rows in runs.values())

    everything = [row for rows in runs.values() for row in rows]
    row = {"bytes": everything[0]["bytes"]}
    row |= {name: median(everything, name) for name in ("plan", "shared", "copy")}
    row |= {"mpi": median(runs["default"], "mpi"), "mpi_yield": median(runs["yield"], "mpi")}
    row["mpi_best"] = best()
    row["plan/default"] = median(runs["default"], "mpi", "plan")
    row["plan/yield"] = median(runs["yield"], "mpi", "plan")
    row["plan/best"] = best("plan")
    row["shared/best"] = best("shared")
    if "gloo" in runs["default"][0]:
        row["gloo"] = median(runs["default"], "gloo")
        row["plan/gloo"] = median(runs["default"], "gloo", "plan")
    row["plan:copy"] = median(everything, "plan", "copy")
    row["shared:copy"] = median(everything, "shared", "copy")
    return row


def draw(options: argparse.Namespace, rows: list[Row]) -> None:
    """Draw the times over the size into the file of `--plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    nbytes = [row["bytes"] for row in rows]
    names = {"plan": "Unisono, private arrays", "shared": "Unisono, shared_empty",
             "mpi": "MPI, default", "mpi_best": "MPI, best setting of each size",
             "gloo": "Gloo", "copy": "all ranks copy as much"}  # fmt: skip
    for name, label in names.items():
        if name in rows[0]:
            axes.loglog(nbytes, [row[name] for row in rows], "--" if name == "copy" else "o-",
                        label=label)  # fmt: skip
    axes.set(xlabel="bytes", ylabel="median time of the slowest rank, us")
    axes.set_title(f"All-reduce of {options.dtype}, {options.ranks} ranks on one node")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.plot)


def worker(options: argparse.Namespace) -> None:
    """Measure every size on this rank; rank 0 prints."""
    import ml_dtypes  # noqa: F401
    import numpy as np
    from mpi4py import MPI

    import collectives as cc
    from collectives.tools import peers

    comm = cc.init()
    world = MPI.COMM_WORLD
    dtype = np.dtype(options.dtype)
    rows = []
    for nbytes in options.sizes:
        private = np.zeros(nbytes // dtype.itemsize, dtype)
        result = np.zeros_like(private)
        shared = comm.shared_empty(private.size, dtype)
        cases = {
            "plan": comm.plan_allreduce(private, op=cc.SUM),
            "shared": comm.plan_allreduce(shared, op=cc.SUM),
            "mpi": peers.native("allreduce", private, (), 0),
            "copy": lambda a=private, b=result: np.copyto(b, a),
        }
        if options.gloo:
            cases["gloo"] = peers.gloo("allreduce", private, (0, private.size), 0)
        repeats = {name: repeat(world, call) for name, call in cases.items()}
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(TURNS):
            for name, call in cases.items():
                call()
                times[name].append(1e6 * timed(world, call, repeats[name]))
        rows.append({"bytes": nbytes} | {n: statistics.median(t) for n, t in times.items()})
    peers.close()
    if comm.rank == 0:
        print(json.dumps(rows))


def repeat(world: Any, call: Callable[[], object]) -> int:
    """Return how often to make a call in a turn, the same on all ranks."""
    call()
    return max(3, min(1000, int(TURN_SECONDS / min(timed(world, call, 1) for _ in range(3)))))


def timed(world: Any, call: Callable[[], object], count: int) -> float:
    """Return the slowest rank's seconds per call."""
    world.Barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return max(world.allgather((time.perf_counter() - began) / count))


if __name__ == "__main__":
    main()
