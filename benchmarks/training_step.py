"""What a strategy adds to the exchange of gradients, on one node.

    python benchmarks/training_step.py [--ranks 2] [--rounds 11] [--json file]

The 161 gradients of ResNet-50, 25.6 million float32 in all, in milliseconds per step; all take
turns, medians of the slowest rank. The optimizer does nothing, so that a step is the exchange:

- `strategy`: `strategy.run` of a step that calls `strategy.apply_gradients`;
- `optimizer`: `DistributedOptimizer.apply_gradients`;
- `grouped`: `comm.grouped_allreduce`, the bare exchange;
- `packed`: all gradients copied into a buffer, MPI_Allreduce at its default settings, and out.

`overhead` is what a step of one variable with one element takes beyond the two exchanges that it
makes (of the state of the ranks, and of the gradient), in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from shapes import resnet50

SMALL_CALLS = 300


def main() -> None:
    """Run the worker under mpirun and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.rounds)
        return
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(options.ranks), sys.executable, __file__, "--worker"]
    done = subprocess.run(
        [*command, "--rounds", str(options.rounds)], text=True, check=True, stdout=subprocess.PIPE
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    print(f"ResNet-50's gradients, float32, {options.ranks} ranks, milliseconds per step")
    for name, value in figures["milliseconds"].items():
        print(f"{name:>12}{value:10.2f}{value / figures['milliseconds']['grouped']:8.2f} x grouped")
    print(f"overhead per step: {figures['overhead_us']:.0f} us")
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, **figures}, indent=1) + "\n")


class Nothing:
    """An optimizer that leaves everything as it is."""

    step = 0

    def apply_gradients(self, grads_and_vars: Iterable[Any]) -> None:
        """Go through the pairs."""
        for _ in grads_and_vars:
            pass

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


def worker(rounds: int) -> None:
    """Measure on this rank; rank 0 prints."""
    import collectives as cc
    import strategies

    comm = cc.init()
    strategy = strategies.MirroredStrategy(comm=comm)
    gradients = [np.ones(shape, np.float32) for shape in resnet50()]
    with strategy.scope():
        variables = [
            strategy.variable(np.zeros(g.shape, np.float32), name=f"v{i}")
            for i, g in enumerate(gradients)
        ]
        scalar = strategy.variable(np.zeros(1, np.float32), name="scalar")
    pairs = list(zip(gradients, variables, strict=True))
    optimizers = [strategies.DistributedOptimizer(Nothing(), comm=comm) for _ in range(3)]

    def step() -> None:
        strategy.apply_gradients(optimizers[0], pairs)

    big: dict[str, Callable[[], object]] = {
        "strategy": lambda: strategy.run(step),
        "optimizer": lambda: optimizers[1].apply_gradients(pairs),
        "grouped": lambda: comm.grouped_allreduce(gradients, op=cc.MEAN),
        "packed": packed(gradients),
    }
    one = np.ones(1, np.float32)

    def small_step() -> None:
        strategy.apply_gradients(optimizers[2], [(one, scalar)])

    status = comm.plan_allreduce(np.zeros(5, np.float64), op=cc.SUM)
    gradient = comm.plan_allreduce(np.zeros(1, np.float32), op=cc.SUM)
    small: dict[str, Callable[[], object]] = {
        "step": lambda: strategy.run(small_step),
        "exchanges": lambda: (status(), gradient()),
    }
    times = {name: [] for name in (*big, *small)}
    for _ in range(rounds):
        for name, call in big.items():
            times[name].append(timed(comm, call, 1))
        for name, call in small.items():
            times[name].append(timed(comm, call, SMALL_CALLS))
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    if comm.rank == 0:
        milliseconds = {name: 1e3 * median[name] for name in big}
        overhead = 1e6 * (median["step"] - median["exchanges"])
        print(json.dumps({"milliseconds": milliseconds, "overhead_us": overhead}))
    comm.barrier()


def packed(gradients: list[np.ndarray]) -> Callable[[], object]:
    """Return the exchange that people write by hand."""
    from mpi4py import MPI

    buffer = np.empty(sum(g.size for g in gradients), np.float32)
    results = [np.empty_like(g) for g in gradients]

    def call() -> None:
        np.concatenate(gradients, axis=None, out=buffer)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
        np.divide(buffer, MPI.COMM_WORLD.size, out=buffer)
        start = 0
        for result in results:
            result[...] = buffer[start : start + result.size].reshape(result.shape)
            start += result.size

    return call


def timed(comm: Any, call: Callable[[], object], repeat: int) -> float:
    """Return the slowest rank's seconds per call."""
    import collectives as cc

    call()
    comm.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    return float(comm.allreduce((time.perf_counter() - began) / repeat, op=cc.MAX))


if __name__ == "__main__":
    main()
