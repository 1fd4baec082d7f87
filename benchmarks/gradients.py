"""Many gradients at once on one node, against three MPI libraries, each at its best.

    python benchmarks/gradients.py [--ranks 2] [--model resnet50] [--json file]

Jobs, turns, near and far, and gradients that are written anew before each call: `turns.py`; each
setting of Open MPI has a job without support for threads beside. Figures are medians of the slowest
rank, in milliseconds. `each` is one MPI call for each array; `packed` copies all arrays into a
buffer, makes one call, and copies the results out; both into arrays that are made once, `each in
place` into the gradients. Of ours, `grouped` returns new arrays, `grouped into` and `grouped in
place` have those of MPI and the gradients as `out`, `buckets` copies into the places that it
returns; `views` finds the gradients in their places; `ready` hands them over one by one, last layer
first; `copy` is the time in which all ranks at once copy as many bytes from private to private
memory.

With `--work 1000`, a step first computes: its matrix products alone, then `views`; and the same
with each gradient handed over as soon as its share of the products is done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import shapes
from turns import OPEN_MPI, TURNS, Case, Handover, Job, Turn, arguments, bound, known_jobs, measure

MODELS = {"resnet50": shapes.resnet50, "small": shapes.small}
PEERS = ("each", "each in place", "packed")
OURS = ("grouped", "grouped into", "grouped in place", "buckets", "views", "ready", "ready views")

# By the names of cases: a call, and the arrays that are written anew before it.
Calls = dict[str, tuple[Callable[[], object], Any]]

# What is promised of grouped calls: how many times as long one MPI call for each array takes, by
# Open MPI as it comes, where its results go to the same places.
GOALS = {"near": 2.0, "far": 1.5}
ALIKE = {"grouped": "each", "grouped into": "each", "grouped in place": "each in place"}


def main() -> None:
    """Run every job and print the table."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--bucket-bytes", type=int, nargs=2, help="of the first one and the others")
    parser.add_argument("--work", type=int, default=0, help="products of matrices in a step")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    how = ["--model", options.model, "--work", options.work]
    if options.bucket_bytes:
        how += ["--bucket-bytes", *options.bucket_bytes]
    measured = measure(options, jobs(), __file__, *how)
    tables = measured.tables(combine, f"{options.model}, float32 SUM, {options.ranks} ranks")
    goals = []
    for state, table in tables.items():
        (row,) = table["rows"]
        print(f"{state}, milliseconds")
        print_table(row)
        if not options.work and "default" in row["ratios"]:  # its turns may all be near, or far
            for case, peer in ALIKE.items():
                ratio = row["ratios"]["default"][peer][case]
                goals.append({"name": f"{case}, {state}: {peer}, Open MPI's default"})
                goals[-1] |= {"measured": ratio, "reach": GOALS[state]}
                said = "reached" if ratio >= GOALS[state] else "MISSED"
                print(f"{goals[-1]['name']} {ratio:.2f}, goal {GOALS[state]:g}: {said}")
    facts = {"ranks": options.ranks, "model": options.model, "states": tables, "goals": goals}
    measured.write(options.json, **facts)


def jobs() -> dict[str, Job]:
    """Return the jobs of `turns`, and those of Open MPI without support for threads."""
    found = known_jobs()
    alone = {"MPI4PY_RC_THREAD_LEVEL": "single"}
    for name in OPEN_MPI:
        job = found[name]
        found[f"{name}, one thread"] = Job(job.launcher, job.environment | alone)
    return found


def combine(turns: list[Turn]) -> dict[str, Any]:
    """Join what all turns have measured."""
    of_job: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        of_job[turn.job].append(turn)
    cases = list(turns[0].times)
    row: dict[str, Any] = {
        name: {case: statistics.median(turn.times[case] for turn in own) for case in cases}
        for name, own in of_job.items()
    }
    ratios = {
        name: {
            peer: {
                case: statistics.median(turn.times[peer] / turn.times[case] for turn in own)
                for case in OURS
            }
            for peer in PEERS
        }
        for name, own in of_job.items()
        if "each" in cases
    }
    return {"milliseconds": row, "ratios": ratios}


def print_table(row: dict[str, Any]) -> None:
    """Print a line for each job, then how many times as long its calls take as ours."""
    times = row["milliseconds"]
    cases = list(next(iter(times.values())))
    print(f"{'':24}" + "".join(f"{case:>18}" for case in cases))
    for name, own in times.items():
        print(f"{name:24}" + "".join(f"{own[case]:18.3f}" for case in cases))
    for name, own in row["ratios"].items():
        for peer in PEERS:
            ratios = "".join(f"{case} {own[peer][case]:5.2f}  " for case in OURS)
            print(f"{name + ', ' + peer + ' / ours':48}{ratios}")


def worker(options: argparse.Namespace) -> None:
    """Measure every case on this rank; rank 0 prints."""
    import numpy as np
    from mpi4py import MPI

    import collectives as cc

    comm = cc.init()
    world = MPI.COMM_WORLD
    bound(world, options.cores)
    handover = Handover(world)
    gradients = [np.full(shape, 1.0, np.float32) for shape in MODELS[options.model]()]
    first, later = options.bucket_bytes or (None, None)
    buckets = comm.plan_buckets(gradients, op=cc.SUM, first_bucket_bytes=first, bucket_bytes=later)
    if options.work:
        calls = beside_work(buckets, [gradient.size for gradient in gradients], options.work)
    else:
        results = [np.empty_like(gradient) for gradient in gradients]
        calls = of_mpi(world, gradients, results) | ours(comm, buckets, gradients, results)
    cases = {name: Case(world, call, *arrays) for name, (call, arrays) in calls.items()}
    found = []
    for _ in range(TURNS):
        before = handover.rate()
        times = {name: 1e3 * case.seconds() for name, case in cases.items()}
        found.append((options.model, (before, handover.rate()), times))
    if comm.rank == 0:
        print(json.dumps(found))
    buckets.close()


def of_mpi(world: Any, gradients: list[Any], results: list[Any]) -> Calls:
    """Return calls of MPI, and the copy that all ranks make at once."""
    import numpy as np
    from mpi4py import MPI

    cuts = [0, *itertools.accumulate(gradient.size for gradient in gradients)]
    packed, reduced = np.empty((2, cuts[-1]), np.float32)
    places = [
        reduced[start:stop].reshape(gradient.shape)
        for (start, stop), gradient in zip(itertools.pairwise(cuts), gradients, strict=True)
    ]

    def each() -> None:
        for gradient, result in zip(gradients, results, strict=True):
            world.Allreduce(gradient, result)

    def each_in_place() -> None:
        for gradient in gradients:
            world.Allreduce(MPI.IN_PLACE, gradient)

    def all_packed() -> None:
        np.concatenate(gradients, axis=None, out=packed)
        world.Allreduce(packed, reduced)
        for result, place in zip(results, places, strict=True):
            result[...] = place

    return {
        "each": (each, gradients),
        "each in place": (each_in_place, gradients),
        "packed": (all_packed, gradients),
        "copy": (lambda: np.copyto(packed, reduced), gradients),
    }


def ours(comm: Any, buckets: Any, gradients: list[Any], results: list[Any]) -> Calls:
    """Return ours, of arrays and of views of their places."""
    import collectives as cc

    last_first = list(reversed(range(len(gradients))))

    def ready() -> None:
        for i in last_first:
            buckets.ready(i, gradients[i])
        buckets.wait()

    def ready_views() -> None:
        for i in last_first:
            buckets.ready(i)
        buckets.wait()

    def grouped(**out: Any) -> Callable[[], object]:
        return lambda: comm.grouped_allreduce(gradients, op=cc.SUM, **out)

    return {
        "grouped": (grouped(), gradients),
        "grouped into": (grouped(out=results), gradients),
        "grouped in place": (grouped(out=gradients), gradients),
        "buckets": (lambda: buckets.allreduce(gradients), gradients),
        "views": (buckets.allreduce, buckets.views),
        "ready": (ready, gradients),
        "ready views": (ready_views, buckets.views),
    }


def beside_work(buckets: Any, sizes: list[int], products: int) -> Calls:
    """Return steps that compute products of matrices, a gradient's share for its size."""
    import numpy as np

    matrix = np.full((256, 256), 1e-3, np.float32)
    rounds = [round(products * size / sum(sizes)) for size in sizes]

    def compute(then: Callable[[int], None]) -> None:
        for i in reversed(range(len(sizes))):
            for _ in range(rounds[i]):
                np.matmul(matrix, matrix)
            then(i)

    def one_after_the_other() -> None:
        compute(lambda i: None)
        buckets.allreduce()

    def overlapped() -> None:
        compute(buckets.ready)
        buckets.wait()

    calls = {
        "compute": lambda: compute(lambda i: None),
        "in turns": one_after_the_other,
        "overlapped": overlapped,
        "views": buckets.allreduce,
    }
    return {name: (call, buckets.views) for name, call in calls.items()}


if __name__ == "__main__":
    main()
