"""Commits in memory beside a memcpy; jobs whose ranks are killed; both as tables for the docs.

    mpirun -np 2 python benchmarks/recovery.py commit
    python benchmarks/recovery.py kills --jobs 50 --ranks 4

`kills` starts `examples/elastic_digits.py` again and again under `mpirun --with-ft ulfm`. In each
job one or two ranks are killed, each at a step of its own; which ones is drawn from a seed. It ends
with status 1 if a job has not trained to an accuracy of 0.96, or has lost or repeated a row.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
COMMIT_STEPS = 5  # of the example
EPOCHS = 12
LAST_STEP = 290  # of some 310


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commit = commands.add_parser("commit")
    commit.add_argument("--megabytes", type=float, default=100)
    kills = commands.add_parser("kills")
    kills.add_argument("--jobs", type=int, default=50)
    kills.add_argument("--ranks", type=int, default=4)
    kills.add_argument("--first", type=int, default=0, help="seed of the first job")
    options = parser.parse_args()
    if options.command == "commit":
        measure_commits(int(options.megabytes * 1e6))
    else:
        sys.exit(kill_ranks(options.jobs, options.ranks, options.first))


def measure_commits(nbytes: int) -> None:
    """Commit so many bytes, and copy as many on all ranks, in turns; rank 0 prints the medians."""
    import collectives as cc
    from strategies import training

    comm = cc.init()
    arrays = [np.random.default_rng(i).random(nbytes // 80) for i in range(10)]
    copies = [np.empty_like(array) for array in arrays]
    state = training.State(comm, arrays=arrays, step=0)
    for _ in range(3):  # both copies have memory
        state.commit()
    seconds: dict[str, list[float]] = {"memcpy": [], "commit": []}
    for step in range(15):
        for name, times in seconds.items():
            comm.barrier()
            began = time.perf_counter()
            if name == "commit":
                state.commit(step=step)
            else:
                for array, copy in zip(arrays, copies, strict=True):
                    np.copyto(copy, array)
                comm.barrier()
            times.append(time.perf_counter() - began)
    if comm.rank == 0:
        medians = {name: float(np.median(times)) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"{name}: {median * 1000:.1f} ms for {nbytes / 1e6:g} MB on {comm.size} ranks")
        print(f"ratio: {medians['commit'] / medians['memcpy']:.2f}")


class Kill(NamedTuple):
    """Who dies when."""

    step: int
    rank: int


class Outcome(NamedTuple):
    """What became of a job."""

    accuracy: float
    rows: tuple[int, int]  # how often the rarest row was used, and the most frequent one
    lost: list[int]  # steps made again, for each recovery
    seconds: list[float]  # from the death to the first step after it
    text: str


def schedule(seed: int, ranks: int) -> list[Kill]:
    """Draw one or two different ranks, and a step for each."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 3))
    victims = random.choice(ranks, count, replace=False).tolist()
    return sorted(Kill(int(random.integers(0, LAST_STEP)), victim) for victim in victims)


def run_job(kills: list[Kill], ranks: int) -> Outcome:
    """Train on the digits while ranks are killed."""
    from strategies.training import events

    mpirun = Path(sys.executable).parent / "mpirun"
    launcher = str(mpirun) if mpirun.exists() else shutil.which("mpirun") or "mpirun"
    with tempfile.TemporaryDirectory() as folder:
        wanted = ";".join(f"step={kill.step},rank={kill.rank},kind=kill" for kill in kills)
        places = {"UNISONO_EVENTS": folder, "UNISONO_RECORDER_DIR": folder}
        command = [launcher, "--with-ft", "ulfm", "-np", str(ranks), sys.executable]
        done = subprocess.run(
            [*command, "examples/elastic_digits.py", "--epochs", str(EPOCHS)],
            cwd=ROOT, env={**os.environ, **places, "UNISONO_FAULT": wanted},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        told = events.read(folder)
    said = re.search(r"used (\d+) to (\d+) times; accuracy .*: (\S+)", done.stdout)
    if done.returncode or said is None:
        return Outcome(0.0, (0, 0), [], [], done.stdout + done.stderr)
    lost, seconds = [], []
    recovered = {event["commit"]: event for event in told if event["event"] == "recovered"}
    deaths = [event for event in told if event["event"] == "fault"]
    for event in recovered.values():  # two ranks may have died before one recovery
        before = [death for death in deaths if death["time"] < event["time"]]
        deaths = [death for death in deaths if death not in before]
        lost.append(max([d["step"] for d in before], default=0) - event["commit"] * COMMIT_STEPS)
        seconds.append(event["time"] - min(d["time"] for d in before or [event]))
    rows = int(said[1]), int(said[2])
    return Outcome(float(said[3]), rows, lost, seconds, done.stdout)


def kill_ranks(jobs: int, ranks: int, first: int) -> int:
    """Run jobs, print a row for each, and what is worst of all; returns the exit status."""
    print("| job | rank killed at step | accuracy | steps made again | s from death to going on |")
    print("| --- | --- | --- | --- | --- |")
    outcomes, failed = [], 0
    for seed in range(first, first + jobs):
        kills = schedule(seed, ranks)
        outcome = run_job(kills, ranks)
        outcomes.append(outcome)
        right = outcome.accuracy >= 0.96 and outcome.rows == (EPOCHS, EPOCHS)
        failed += not right
        when = ", ".join(f"{kill.rank} at {kill.step}" for kill in kills)
        lost = " ".join(map(str, outcome.lost))
        seconds = " ".join(f"{s:.2f}" for s in outcome.seconds)
        print(f"| {seed} | {when} | {outcome.accuracy:.4f} | {lost} | {seconds} |", flush=True)
        if not right:
            print(outcome.text, file=sys.stderr)
    lost = [steps for outcome in outcomes for steps in outcome.lost]
    seconds = [s for outcome in outcomes for s in outcome.seconds]
    worst = min(outcome.accuracy for outcome in outcomes)
    print(f"\n{jobs - failed} of {jobs} jobs of {ranks} ranks trained; worst accuracy {worst:.4f}")
    if seconds:
        print(f"steps made again: median {np.median(lost):g}, at most {max(lost)}")
        print(f"seconds from death to going on: median {np.median(seconds):.2f}", end=", ")
        print(f"at most {max(seconds):.2f}")
    return min(failed, 1)


if __name__ == "__main__":
    main()
