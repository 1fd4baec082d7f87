"""What a timeline costs: steps of 1 ms of computing and one call, with and without, in turns.

    python benchmarks/timeline.py [--ranks 2] [--turns 15] [--json file]

`call` is `allreduce(x, out=y)` of 4 KiB, `plan` a planned one, `span` the same in a
`timeline_span`, `1 MiB` a call of that; `small` and `ring` are calls by messages of 8 bytes and of
64 KiB, in a job of its own without shared memory. The time of a turn is that of its slowest rank.
Figures are medians of turns, in microseconds of a step, and quartiles of what `with` adds to the
turn `without` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STEPS = 200  # of a turn
COMPUTING_SECONDS = 1e-3


def main() -> None:
    """Run a job in shared memory and one by messages, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    times = {**launch(options, "/dev/shm"), **launch(options, "off")}
    print(f"{options.ranks} ranks, a step in microseconds")
    print(f"{'':8}{'without':>12}{'with':>12}{'more, in %: quartiles':>30}{'bytes of a step':>18}")
    for name, (without, with_one, *quartiles, nbytes) in times.items():
        more = "".join(f"{100 * quartile:10.2f}" for quartile in quartiles)
        print(f"{name:8}{without:12.1f}{with_one:12.1f}{more}{nbytes:18.0f}")
    if options.json:
        facts = {"ranks": options.ranks, "microseconds and bytes": times}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def launch(options: argparse.Namespace, shared_memory: str) -> dict[str, list[float]]:
    """Run the worker under mpirun; returns what rank 0 measured."""
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(options.ranks), sys.executable, __file__, "--worker"]
    extra = {"UNISONO_SHARED_MEMORY": shared_memory}
    done = subprocess.run(
        [*command, "--turns", str(options.turns)],
        env={**os.environ, **extra}, text=True, check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def worker(options: argparse.Namespace) -> None:
    """Measure every case on this rank; rank 0 prints."""
    import numpy as np

    import collectives as cc

    comm = cc.init()
    rounds = calibrate()

    def computed(call: Callable[[], object]) -> Callable[[], object]:
        def step() -> None:
            compute(rounds)
            call()

        return step

    arrays = {n: (np.ones(n // 4, np.float32), np.ones(n // 4, np.float32)) for n in SIZES}

    def allreduce(nbytes: int, algorithm: str = "auto") -> Callable[[], object]:
        x, out = arrays[nbytes]
        return computed(lambda: comm.allreduce(x, op=cc.SUM, out=out, algorithm=algorithm))

    plan = comm.plan_allreduce(arrays[4096][0], op=cc.SUM)

    def spanned() -> None:
        with cc.timeline_span("step"):
            compute(rounds)
            plan()

    cases: dict[str, Callable[[], object]] = {
        "small": allreduce(8),
        "ring": allreduce(65536, "ring"),
    }
    if comm.num_nodes == 1 and comm.settings.shared_memory is not None:
        cases = {
            "call": allreduce(4096), "plan": computed(plan), "span": spanned,
            "1 MiB": allreduce(1 << 20),
        }  # fmt: skip
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    nbytes = {}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(options.turns + 1):  # the first is not counted
            for name, step in cases.items():
                for with_one in (False, True) if turn % 2 else (True, False):
                    if with_one:
                        cc.start_timeline(place)
                    took = timed(comm, step)
                    if with_one:
                        cc.stop_timeline()
                        own = Path(place, f"rank-{comm.rank}.json").stat().st_size
                        nbytes[name] = own / STEPS
                    if turn:
                        times[name][with_one].append(took)
    if comm.rank == 0:
        print(json.dumps({name: figures(*pair, nbytes[name]) for name, pair in times.items()}))


def figures(without: list[float], with_one: list[float], nbytes: float) -> list[float]:
    """Return a row of the table."""
    more = [other / one - 1 for one, other in zip(without, with_one, strict=True)]
    medians = [1e6 * statistics.median(times) for times in (without, with_one)]
    return [*medians, *statistics.quantiles(more), nbytes]


SIZES = (8, 4096, 65536, 1 << 20)


def compute(rounds: int) -> int:
    """Compute for about a millisecond."""
    total = 0
    for number in range(rounds):
        total += number
    return total


def calibrate() -> int:
    """Return how much to compute."""
    rounds, seconds = 1000, []
    for _ in range(200):
        began = time.perf_counter()
        compute(rounds)
        seconds.append(time.perf_counter() - began)
    return round(rounds * COMPUTING_SECONDS / min(seconds))


def timed(comm: object, step: Callable[[], object]) -> float:
    """Return the seconds of a step, of the slowest rank."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return max(comm.allgather_object((time.perf_counter() - began) / STEPS))


if __name__ == "__main__":
    main()
