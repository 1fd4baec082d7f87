"""Many gradients at once on one node, against MPI's calls at their default and best settings.

    python benchmarks/gradients.py [--ranks 2] [--model resnet50] [--json file]

Each setting of Open MPI is a run of its own, in which ours and MPI's take turns; all figures are
medians of the slowest rank, in milliseconds. `each` is one MPI call for each array; `packed` copies
all arrays into a buffer, makes one call, and copies the results out; both into arrays that are made
once. Of ours, `grouped` returns new arrays, `buckets` copies into the places that it returns;
`views` finds the gradients in their places; `ready` hands them over one by one, last layer first;
`copy` is the time in which all ranks at once copy as many bytes from private to private memory.

With `--work 1000`, a step first computes: its matrix products alone, then `views`; and the same
with each gradient handed over as soon as its share of the products is done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import shapes

MODELS = {"resnet50": shapes.resnet50, "small": shapes.small}

# Open MPI 5's knobs that win somewhere on one node, each with and without support for threads.
KNOBS = {
    "default": {},
    "sm": {"OMPI_MCA_coll_sm_priority": "100"},
    "no cma": {"OMPI_MCA_smsc": "^cma"},
    "yield": {"OMPI_MCA_mpi_yield_when_idle": "1"},
}
SETTINGS = KNOBS | {
    f"{name}, one thread": {**knobs, "MPI4PY_RC_THREAD_LEVEL": "single"}
    for name, knobs in KNOBS.items()
}
PEERS = ("each", "packed")


def main() -> None:
    """Run every setting in an mpirun of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--bucket-bytes", type=int, nargs=2, help="of the first one and the others")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--work", type=int, default=0, help="products of matrices in a step")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    runs = {name: launch(options, SETTINGS[name]) for name in options.settings}
    cases = list(next(iter(runs.values())))
    print(f"{options.model}, float32 SUM, {options.ranks} ranks, milliseconds")
    print(f"{'':22}" + "".join(f"{case:>10}" for case in cases))
    for name, times in runs.items():
        print(f"{name:22}" + "".join(f"{times[case]:10.3f}" for case in cases))
    for peer in PEERS if not options.work else ():
        best = min(times[peer] for times in runs.values())
        for what, figures in (("default", next(iter(runs.values()))), ("best", {peer: best})):
            ratios = [
                f"{figures[peer] / statistics.median(t[case] for t in runs.values()):10.2f}"
                for case in cases
            ]
            print(f"{peer + ' ' + what + ' / ours':22}" + "".join(ratios))
    if options.json:
        facts = {"ranks": options.ranks, "model": options.model, "milliseconds": runs}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def launch(options: argparse.Namespace, extra: dict[str, str]) -> dict[str, float]:
    """Run the worker under mpirun; returns what rank 0 measured."""
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(options.ranks), sys.executable, __file__, "--worker"]
    command += ["--model", options.model, "--turns", str(options.turns)]
    command += ["--work", str(options.work)]
    if options.bucket_bytes:
        command += ["--bucket-bytes", *map(str, options.bucket_bytes)]
    done = subprocess.run(
        command, env={**os.environ, **extra}, text=True, check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout.splitlines()[-1])


def worker(options: argparse.Namespace) -> None:
    """Measure every case on this rank; rank 0 prints."""
    import numpy as np
    from mpi4py import MPI

    import collectives as cc

    comm = cc.init()
    world = MPI.COMM_WORLD
    kinds = MODELS[options.model]()
    gradients = [np.full(shape, 1.0, np.float32) for shape in kinds]
    results = [np.empty_like(gradient) for gradient in gradients]
    sizes = [math.prod(shape) for shape in kinds]
    packed, reduced = np.empty((2, sum(sizes)), np.float32)
    cuts = [0, *itertools.accumulate(sizes)]
    places = [
        reduced[start:stop].reshape(shape)
        for (start, stop), shape in zip(itertools.pairwise(cuts), kinds, strict=True)
    ]
    first, later = options.bucket_bytes or (None, None)
    buckets = comm.plan_buckets(gradients, op=cc.SUM, first_bucket_bytes=first, bucket_bytes=later)
    last_first = list(reversed(range(len(kinds))))

    def each() -> None:
        for gradient, result in zip(gradients, results, strict=True):
            world.Allreduce(gradient, result)

    def all_packed() -> None:
        np.concatenate(gradients, axis=None, out=packed)
        world.Allreduce(packed, reduced)
        for result, place in zip(results, places, strict=True):
            result[...] = place

    def ready() -> None:
        for i in last_first:
            buckets.ready(i, gradients[i])
        buckets.wait()

    def ready_views() -> None:
        for i in last_first:
            buckets.ready(i)
        buckets.wait()

    work = np.full((256, 256), 1e-3, np.float32)
    rounds = [round(options.work * size / sum(sizes)) for size in sizes]

    def compute(then: Callable[[int], None]) -> None:
        for i in last_first:
            for _ in range(rounds[i]):
                np.matmul(work, work)
            then(i)

    def one_after_the_other() -> None:
        compute(lambda i: None)
        buckets.allreduce()

    def overlapped() -> None:
        compute(buckets.ready)
        buckets.wait()

    cases = {
        "each": each,
        "packed": all_packed,
        "grouped": lambda: comm.grouped_allreduce(gradients, op=cc.SUM),
        "buckets": lambda: buckets.allreduce(gradients),
        "views": buckets.allreduce,
        "ready": ready,
        "ready views": ready_views,
        "copy": lambda: np.copyto(packed, reduced),
    }
    if options.work:
        cases = {
            "compute": lambda: compute(lambda i: None),
            "in turns": one_after_the_other,
            "overlapped": overlapped,
            "views": buckets.allreduce,
        }
    repeat = max(1, int(4e6 / sum(sizes)))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(options.turns):
        for name, run in cases.items():
            world.Barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                run()
            seconds = np.array([(time.perf_counter() - began) / repeat])
            world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
            times[name].append(1e3 * float(seconds[0]))
            for view in buckets.views:  # sums would grow without end
                view[...] = 1.0
    if comm.rank == 0:
        print(json.dumps({name: statistics.median(t) for name, t in times.items()}))
    buckets.close()


if __name__ == "__main__":
    main()
