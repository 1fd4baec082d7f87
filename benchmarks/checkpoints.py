"""How fast checkpoints are written and read, and what a save in the background costs a step.

    mpirun -np 2 python benchmarks/checkpoints.py [--megabytes 1000] [--turns 5] [--folder PATH]

    save       each rank has its slices of ten arrays, all ranks save together; against each rank
               writing the same bytes to a file, and fsyncing it
    replicated the same where all ranks have all arrays, and each writes its share
    restore    the slices back, checksums verified; against reading the same bytes into new arrays;
               from the page cache
    disk       the same from the disk, as in a job that starts again: nothing in the page cache
    step       a step (two products of matrices, one all-reduce) while a save is on its way in the
               background; against a step without; and how long `save` itself keeps the program

Ours and the reference take turns; a figure is the median of the turns, and its ratio that of the
ratios of each turn. Rank 0 prints JSON. Times are those of the slowest rank.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np

import collectives as cc
import strategies
from strategies.checkpoint import Slice

ARRAYS = 10
SIDE = 384  # of the matrices of a step, which takes some milliseconds
SETTLED = 60  # steps without a save that are measured


def main() -> None:
    """Measure all, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="bytes of all ranks together")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", help="where to write; a temporary directory if not given")
    options = parser.parse_args()
    comm = cc.init()
    folder = comm.broadcast_object(tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else None)
    rows = options.megabytes * 10**6 // (ARRAYS * 4096 * comm.size)
    try:
        report = {
            "ranks": comm.size,
            "megabytes": options.megabytes,
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.platform(),
            **files(comm, Path(folder), rows, options.turns),
            "step": step(comm, Path(folder), rows, options.turns),
        }
    finally:
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)
    if comm.rank == 0:
        print(json.dumps(report, indent=1))


def timed(comm: cc.Communicator, function: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes for something that all begin together."""
    comm.barrier()
    began = time.perf_counter()
    function()
    return float(comm.allreduce(time.perf_counter() - began, op=cc.MAX))


def turns(
    comm: cc.Communicator,
    ours: Callable[[], object],
    reference: Callable[[], object],
    count: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Seconds of ours and of the reference, and how fast ours is beside it.

    Args:
        comm: all ranks.
        ours: what is measured.
        reference: beside what.
        count: turns.
        before: is called before each of them, outside of the clock.
    """
    ours(), reference()  # both find their memory and files as later ones do

    def one(function: Callable[[], object]) -> float:
        before()
        return timed(comm, function)

    pairs = [(one(ours), one(reference)) for _ in range(count)]
    return {
        "seconds": statistics.median(a for a, _ in pairs),
        "reference": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def files(comm: cc.Communicator, folder: Path, rows: int, count: int) -> dict[str, object]:
    """Measure saving and restoring."""
    own = parts(comm, rows)
    boxes = {name: one.box for name, one in own.items()}
    written = [one.array for one in own.values()]
    plain = folder / f"plain-{comm.rank}"

    def write() -> None:
        with plain.open("wb", buffering=0) as file:
            for array in written:
                file.write(array.data)
            os.fsync(file.fileno())

    def read() -> None:
        new = [np.empty_like(array) for array in written]
        with plain.open("rb", buffering=0) as file:
            for array in new:
                file.readinto(array.data)

    with strategies.CheckpointManager(folder / "sharded", comm, sharded=True, keep=1) as manager:
        save = turns(comm, lambda: manager.save(own, step=1), write, count)

        def restored() -> object:
            return manager.restore_or_none(slices=boxes)

        restore = turns(comm, restored, read, count)
        disk = turns(comm, restored, read, count, lambda: drop(folder))
    own.clear(), written.clear()
    rng = np.random.default_rng(0)  # the same on all ranks
    same = {name: rng.integers(0, 255, (rows * comm.size, 4096), np.uint8) for name in boxes}
    written += [array[rows * comm.rank :][:rows] for array in same.values()]
    with strategies.CheckpointManager(folder / "same", comm, sharded=True, keep=1) as manager:
        replicated = turns(comm, lambda: manager.save(same, step=1), write, count)
    return {"save": save, "replicated": replicated, "restore": restore, "disk": disk}


def drop(folder: Path) -> None:
    """Take files out of the page cache; they have been fsynced."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def parts(comm: cc.Communicator, rows: int) -> dict[str, Slice]:
    """Make this rank's rows of all arrays."""
    rng = np.random.default_rng(comm.rank)
    shape = (rows * comm.size, 4096)
    return {
        f"w{i}": Slice(rng.integers(0, 255, (rows, 4096), np.uint8), (rows * comm.rank, 0), shape)
        for i in range(ARRAYS)
    }


def step(comm: cc.Communicator, folder: Path, rows: int, count: int) -> dict[str, float]:
    """Measure steps with and without a save in the background."""
    arrays = parts(comm, rows)
    x = np.random.default_rng(comm.rank).normal(size=(SIDE, SIDE)).astype(np.float32)
    gradient = comm.shared_empty((SIDE, SIDE), "float32")

    def one() -> float:
        began = time.perf_counter()
        gradient[...] = (x @ x) @ x
        comm.allreduce(gradient, out=gradient)
        return time.perf_counter() - began

    found = []
    with strategies.CheckpointManager(
        folder / "behind", comm, sharded=True, keep=1, background=True
    ) as manager:
        manager.save(arrays, step=0)
        manager.wait()
        for turn in range(count):
            alone = [one() for _ in range(SETTLED)]
            called = timed(comm, lambda turn=turn: manager.save(arrays, step=turn + 1))
            began = time.perf_counter()
            during = []
            while comm.allreduce(writing(), op=cc.MAX):
                during += [one() for _ in range(5)]
            lasted = time.perf_counter() - began
            manager.wait()
            if during:
                mean = statistics.mean(during), statistics.mean(alone)
                found.append((*mean, called, lasted, statistics.median(during)))
    columns = list(zip(*found, strict=True))
    ratios = [a / b for a, b in zip(*columns[:2], strict=True)]
    return {
        "milliseconds during a save": 1000 * statistics.median(columns[0]),
        "alone": 1000 * statistics.median(columns[1]),
        "ratio": statistics.median(ratios),
        "seconds that save takes": statistics.median(columns[2]),
        "seconds in the background": statistics.median(columns[3]),
    }


def writing() -> bool:
    """Whether this rank's thread is writing."""
    return any(t.name.startswith("unisono-checkpoint") for t in threading.enumerate())


if __name__ == "__main__":
    main()
