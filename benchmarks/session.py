"""What a session costs a step, with the hooks that a training has, and what each part of it costs.

    mpirun -np 2 python benchmarks/session.py --json session.json

Steps do nothing, so that all of the time is that of the session. Ways take turns in each round, and
the median of the rounds counts; a step of several ranks waits for the slowest of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import collectives as cc
from strategies.session import Summaries, TrainingSession, hooks

STEPS, ROUNDS = 2000, 7


def microseconds(comm: cc.Communicator, around: list[hooks.Hook]) -> float:
    """Return what a step takes on this rank."""
    values = {"loss": 0.5}
    with TrainingSession(comm=comm, hooks=around) as session:
        comm.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            session.run(lambda: values)
        return (time.perf_counter() - began) / STEPS * 1e6


def usual() -> list[hooks.Hook]:
    """Return the hooks that look at every step but write now and then."""
    return [
        hooks.StopAtStep(10**9),
        hooks.StepCounter(),
        hooks.LogValues(every_steps=100),
        hooks.NanGuard(),
        hooks.SaveCheckpoints(every_steps=10**6),
    ]


def main() -> None:
    """Measure all ways, and print a row for each on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the medians to this file, in us")
    file = parser.parse_args().json
    comm = cc.init()
    folder = Path(tempfile.mkdtemp())
    ways: dict[str, Callable[[], list[hooks.Hook]]] = {
        "no hooks": list,
        "the usual hooks": usual,
        "and metrics every 100 steps": lambda: [
            *usual(), Summaries(metrics=folder / "some.jsonl", every_steps=100)
        ],
        "and metrics at every step": lambda: [*usual(), Summaries(metrics=folder / "all.jsonl")],
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, make in ways.items():
            found[name].append(microseconds(comm, make()))
    if comm.rank == 0:
        print(f"us per step, {comm.size} ranks on {comm.num_nodes} node(s)")
        for name, times in found.items():
            print(f"{name:30} {statistics.median(times):6.2f}  (least {min(times):.2f})")
        if file is not None:
            medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
            facts = {"ranks": comm.size, "nodes": comm.num_nodes, "microseconds": medians}
            file.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
