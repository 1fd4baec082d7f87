"""Gradients submitted by name, in another order on every rank, against `grouped_allreduce`.

    python benchmarks/named.py [--ranks 2] [--model resnet50] [--turns 15] [--json file]

Medians of the slowest rank, in milliseconds, taken in turns: `grouped` is one call for all arrays
in one order; `named` is `hvd.allreduce_async` for each and then `synchronize`, in another order on
every rank and in every turn; `in place` the same with `allreduce_async_`. `small` is one array of
16 bytes by `hvd.allreduce`, in microseconds.
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

import numpy as np
import shapes
from turns import machine

MODELS = {"resnet50": shapes.resnet50, "small": shapes.small}


def main() -> None:
    """Start the ranks, which print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
    else:
        words = ["mpirun", "-np", str(options.ranks), sys.executable, __file__, "--worker"]
        words += ["--model", options.model, "--turns", str(options.turns)]
        words += ["--json", str(options.json)] if options.json else []
        sys.exit(subprocess.run(words, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode)


def measure(options: argparse.Namespace) -> None:
    """Time all ways in turns; rank 0 prints them."""
    import collectives as cc
    import strategies.horovod.numpy as hvd

    hvd.init()
    comm = cc.init()
    xs = [np.ones(shape, np.float32) for shape in MODELS[options.model]()]
    small = np.ones(4, np.float32)

    def named(start, turn: int) -> None:
        order = np.random.default_rng([turn, comm.rank]).permutation(len(xs)).tolist()
        handles = [start(xs[i], name=f"gradient {i}") for i in order]
        for handle in handles:
            hvd.synchronize(handle)

    ways = {
        "grouped": lambda turn: comm.grouped_allreduce(xs),
        "named": lambda turn: named(hvd.allreduce_async, turn),
        "in place": lambda turn: named(hvd.allreduce_async_, turn),
        "small": lambda turn: [hvd.allreduce(small, name="small") for _ in range(100)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.turns + 2):
        for name, way in ways.items():
            comm.barrier()
            begin = time.perf_counter()
            way(turn)
            slowest = comm.allreduce(time.perf_counter() - begin, op=cc.MAX).item()
            seconds[name] += [slowest] if turn >= 2 else []
    if comm.rank == 0:
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        print(f"{len(xs)} arrays, {sum(x.nbytes for x in xs) / 1e6:.0f} MB, {comm.size} ranks")
        for name in ("grouped", "named", "in place"):
            ratio = medians[name] / medians["grouped"]
            print(f"{name:10} {1e3 * medians[name]:8.2f} ms  {ratio:.2f}")
        print(f"small      {1e4 * medians['small']:8.1f} us")
        if options.json:
            medians["small"] /= 100
            facts = {"machine": machine(), "ranks": comm.size, "arrays": len(xs)}
            facts |= {"bytes": sum(x.nbytes for x in xs), "seconds": medians}
            options.json.write_text(json.dumps(facts, indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
