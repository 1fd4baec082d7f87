"""What a checkpoint of running ps tasks costs the workers' steps.

    mpirun -np 4 python benchmarks/served_checkpoints.py [--megabytes 1000] [--turns 5]

Two ps tasks have the variables, and two workers train without waiting for each other. The chief
saves by `Saver` with a sharded manager in the background: each ps writes its parts.

    rows       one table: a step looks up some rows, multiplies matrices, and pushes their gradients
    arrays     ten arrays: a step multiplies matrices, and pushes gradients of all elements

A step during a save has begun or ended between the call of `save` and the complete checkpoint.
Steps just before each save are the reference. Then the chief restores the last checkpoint, without
training: each ps reads its parts, or the chief reads all arrays. Its memory is the growth of its
peak. Rank 2, the chief, prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import collectives as cc
import strategies
from strategies.checkpoint import Saver
from strategies.variables import initializers, partition

WIDTH = 256  # float32 numbers of a row
ROWS = 512  # that a step looks up
SIDE = 384  # of the matrices of a step
ARRAYS = 10


def main() -> None:
    """Measure, and print on the chief."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="bytes of all variables")
    parser.add_argument("--turns", type=int, default=5, help="saves of each kind")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps before each save")
    parser.add_argument("--kinds", nargs="+", default=["rows", "arrays"])
    parser.add_argument("--folder", help="where to write; a temporary directory if not given")
    options = parser.parse_args()
    comm = cc.init()
    place = tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else None
    folder = Path(comm.broadcast_object(place))
    try:
        report = {kind: measured(comm, folder / kind, kind, options) for kind in options.kinds}
    finally:
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)
    if all(report.values()):
        about = {
            "megabytes": options.megabytes,
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.platform(),
        }
        print(json.dumps({**about, **report}, indent=1))


def measured(comm: cc.Communicator, folder: Path, kind: str, options) -> dict[str, float]:
    """Train and save; return the figures on the chief, nothing on other tasks."""
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=2)
    with strategies.Cluster(spec, comm) as cluster, strategies.Server(cluster) as server:
        strategy = strategies.ParameterServerStrategy(
            server, strategies.SGD(0.01), partitioner=partition.fixed_shards(2)
        )
        count = 1 if kind == "rows" else ARRAYS
        rows = options.megabytes * 10**6 // (4 * WIDTH * count)
        for number in range(count):
            strategy.variable(
                initializers.normal(0.1, seed=number),
                shape=(rows, WIDTH),
                name=f"w{number}",
                resident=kind == "arrays",
            )
        if cluster.job == "ps":
            server.join()
            return {}
        steps: list[tuple[float, float]] = []
        step = step_of(strategy, kind, cluster.task_index)

        def train() -> None:
            began = time.perf_counter()
            step()
            steps.append((began, time.perf_counter()))

        over = folder.with_suffix(".over")
        saves = []
        if strategy.is_chief:
            saves = save(strategy, folder, train, options)
            over.touch()
        else:
            while not over.exists():
                train()
        # The clock is the same for all processes of a machine.
        found = cluster.workers.gather_object(steps)
        return {**figures(found, saves), **restores(strategy, folder)} if found else {}


def step_of(strategy, kind: str, worker: int):
    """Return the function of one step."""
    rng = np.random.default_rng(worker)
    x = rng.normal(size=(SIDE, SIDE)).astype(np.float32)
    variables = list(strategy.variables.values())
    gradient = np.full(variables[0].shape, 1e-6, np.float32) if kind == "arrays" else None

    def step() -> None:
        (x @ x) @ x
        if gradient is not None:
            pairs = [(gradient, variable) for variable in variables]
        else:
            ids = rng.integers(0, variables[0].shape[0], ROWS)
            rows = strategy.look_up(variables[0], ids)
            pairs = [(strategies.Rows(ids, rows * np.float32(1e-6)), variables[0])]
        strategy.apply_gradients(strategy.optimizer, pairs)

    return step


def save(strategy, folder: Path, train, options) -> list[tuple[float, float, float, float]]:
    """Save some times while training; return when each began, was called, and was complete."""
    found = []
    with strategies.CheckpointManager(folder, sharded=True, background=True, keep=1) as manager:
        saver = Saver(manager, model=strategy)
        for turn in range(options.turns + 1):
            settled = time.perf_counter()
            while time.perf_counter() < settled + options.seconds:
                train()
            began = time.perf_counter()
            saver.save(turn)
            called = time.perf_counter()
            while any(t.name.startswith("unisono-checkpoint") for t in threading.enumerate()):
                train()
            found.append((settled, began, called, time.perf_counter()))
    return found[1:]  # the first one finds its memory and files


def restores(strategy, folder: Path) -> dict[str, float]:
    """Return seconds and memory of the chief for restoring by parts and by whole arrays."""
    found = {}
    for by, sharded in (("parts", True), ("whole arrays", False)):
        with strategies.CheckpointManager(folder, sharded=sharded) as manager:
            saver = Saver(manager, model=strategy)
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the current memory
            before, began = peak(), time.perf_counter()
            saver.restore()
            found[f"seconds to restore {by}"] = time.perf_counter() - began
            found[f"chief's MB to restore {by}"] = peak() - before
    return found


def peak() -> float:
    """Return the peak resident memory of this process, in MB."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024 / 1e6


def figures(steps, saves) -> dict[str, float]:
    """Return the mean steps of both workers during the saves and before them."""
    found = []
    for settled, began, called, ended in saves:
        during = [b - a for own in steps for a, b in own if b > began and a < ended]
        alone = [b - a for own in steps for a, b in own if settled <= a and b <= began]
        if during and alone:
            found.append((statistics.mean(during), statistics.mean(alone), max(during),
                          called - began, ended - began))  # fmt: skip
    during, alone, longest, called, lasted = zip(*found, strict=True)
    return {
        "milliseconds during a save": 1000 * statistics.median(during),
        "alone": 1000 * statistics.median(alone),
        "ratio": statistics.median(a / b for a, b in zip(during, alone, strict=True)),
        "longest, milliseconds": 1000 * statistics.median(longest),
        "seconds that save takes": statistics.median(called),
        "seconds until it is complete": statistics.median(lasted),
    }


if __name__ == "__main__":
    main()
