"""All-reduce on one node against MPI's own, at its default and at its best settings.

    python benchmarks/allreduce.py [--ranks 2] [--json file]

Each setting of Open MPI is a run of its own, in which ours and MPI's take turns at every size; all
figures are medians of the slowest rank. `ratio` is MPI's time over ours: the default's, and the
smallest of all settings' (its best for that size). `copy` is the time in which all ranks at once
copy as many bytes from private to private memory, a floor for anything that moves the data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIZES = [8, 64, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]

# Open MPI 5's knobs that win somewhere on one node.
SETTINGS = {
    "default": {},
    "sm": {"OMPI_MCA_coll_sm_priority": "100"},
    "no cma": {"OMPI_MCA_smsc": "^cma"},
}


def main() -> None:
    """Run every setting in an mpirun of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="bytes of the largest array")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.most)
        return
    runs = {name: launch(options, env) for name, env in SETTINGS.items()}
    rows = [combine(index, runs) for index in range(len(next(iter(runs.values()))))]
    print(f"float32 SUM, {options.ranks} ranks, microseconds")
    columns = ["bytes", "plan", "shared", "mpi", "mpi_best", "copy",
               "plan/default", "plan/best", "shared/best", "plan:copy", "shared:copy"]  # fmt: skip
    print("  ".join(f"{c:>12}" for c in columns))
    for row in rows:
        print("  ".join(f"{row[c]:12.2f}" if c != "bytes" else f"{row[c]:12}" for c in columns))
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=1))


def launch(options: argparse.Namespace, extra: dict[str, str]) -> list[dict[str, float]]:
    """Run the worker under mpirun; returns what rank 0 measured."""
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(options.ranks), sys.executable, __file__, "--worker"]
    done = subprocess.run(
        [*command, "--most", str(options.most)], env={**os.environ, **extra}, text=True,
        check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def combine(index: int, runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Join the runs' figures for one size."""
    rows = [run[index] for run in runs.values()]
    row = {"bytes": rows[0]["bytes"]}
    for name in ("plan", "shared", "copy"):
        row[name] = statistics.median(r[name] for r in rows)
    row["mpi"] = runs["default"][index]["mpi"]
    row["mpi_best"] = min(r["mpi"] for r in rows)
    row["plan/default"] = row["mpi"] / row["plan"]
    row["plan/best"] = row["mpi_best"] / row["plan"]
    row["shared/best"] = row["mpi_best"] / row["shared"]
    row["plan:copy"] = row["plan"] / row["copy"]
    row["shared:copy"] = row["shared"] / row["copy"]
    return row


def worker(most: int) -> None:
    """Measure every size on this rank; rank 0 prints."""
    import numpy as np
    from mpi4py import MPI

    import collectives as cc

    comm = cc.init()
    world = MPI.COMM_WORLD
    rows = []
    for nbytes in [size for size in SIZES if size <= most]:
        count = nbytes // 4
        private = np.zeros(count, np.float32)
        result = np.zeros(count, np.float32)
        shared = comm.shared_empty(count, np.float32)
        cases = {
            "plan": comm.plan_allreduce(private, op=cc.SUM),
            "shared": comm.plan_allreduce(shared, op=cc.SUM),
            "mpi": lambda a=private, b=result: world.Allreduce([a, MPI.FLOAT], [b, MPI.FLOAT]),
            "copy": lambda a=private, b=result: np.copyto(b, a),
        }
        repeat = max(3, min(1000, int(4e6 / max(nbytes, 4000))))
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(9):
            for name, run in cases.items():
                run()
                world.Barrier()
                began = time.perf_counter()
                for _ in range(repeat):
                    run()
                seconds = np.array([(time.perf_counter() - began) / repeat])
                world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
                times[name].append(1e6 * float(seconds[0]))
        rows.append({"bytes": nbytes} | {n: statistics.median(t) for n, t in times.items()})
    if comm.rank == 0:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
