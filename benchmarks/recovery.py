"""Commits in memory beside a memcpy; jobs whose ranks are killed; both as tables for the docs.

    mpirun -np 2 python benchmarks/recovery.py commit --json commit.json
    python benchmarks/recovery.py kills --jobs 50 --ranks 4 --json docs/benchmarks/recovery.json
    python benchmarks/recovery.py kills --jobs 20 --spares 2 --json docs/benchmarks/spare_ranks.json
    python benchmarks/recovery.py table docs/benchmarks/recovery.json
    python benchmarks/recovery.py waiting

`kills` starts `examples/elastic_digits.py` again and again under `mpirun --with-ft ulfm`. In each
job one or two ranks are killed, two at one step or each at its own; which ones is drawn from a
seed. It ends with status 1 if a job has not trained to an accuracy of 0.96, or has lost or repeated
a row; or where spare ranks were enough, if its last checkpoint has other bits than that of a job
without a death. Rows are added to the rows of other jobs in the file. `waiting` measures the cost
of a spare rank for two training ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    commit.add_argument("--json", type=Path, help="also write the medians to this file")
    kills = commands.add_parser("kills")
    kills.add_argument("--jobs", type=int, default=50)
    kills.add_argument("--ranks", type=int, default=4)
    kills.add_argument("--spares", type=int, default=0, help="ranks that wait besides")
    kills.add_argument("--first", type=int, default=0, help="seed of the first job")
    kills.add_argument("--json", type=Path, help="also write the rows to this file")
    table = commands.add_parser("table")
    table.add_argument("json", type=Path)
    commands.add_parser("waiting")
    commands.add_parser("steps", help="what `waiting` lets mpirun start")
    options = parser.parse_args()
    if options.command == "commit":
        measure_commits(int(options.megabytes * 1e6), options.json)
    elif options.command == "table":
        print(table_of(json.loads(options.json.read_text())))
    elif options.command == "waiting":
        measure_waiting()
    elif options.command == "steps":
        make_steps()
    else:
        seeds = range(options.first, options.first + options.jobs)
        sys.exit(kill_ranks(seeds, options.ranks, options.spares, options.json))


def measure_commits(nbytes: int, file: Path | None) -> None:
    """Commit so many bytes, and copy as many on all ranks, in turns; rank 0 prints the medians."""
    import collectives as cc
    from strategies import elastic

    comm = cc.init()
    arrays = [np.random.default_rng(i).random(nbytes // 80) for i in range(10)]
    copies = [np.empty_like(array) for array in arrays]
    state = elastic.State(comm, arrays=arrays, step=0)
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
        ratio = medians["commit"] / medians["memcpy"]
        print(f"ratio: {ratio:.2f}")
        if file is not None:
            facts = {"ranks": comm.size, "bytes": nbytes, "seconds": medians, "ratio": ratio}
            file.write_text(json.dumps(facts, indent=1) + "\n")


def measure_waiting() -> None:
    """Let two ranks train beside no spare rank and beside one, in turns; prints both."""
    for _ in range(3):
        for spares in (0, 1):
            done = subprocess.run(
                [launcher(), "--with-ft", "ulfm", "-np", str(2 + spares), sys.executable,
                 __file__, "steps"],
                cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
            print(f"{spares} spare: {' '.join(sorted(done.stdout.splitlines()))}", flush=True)


def make_steps() -> None:
    """Make steps on two ranks; they print the time of one, spare ones their share of a core."""
    import collectives as cc
    from strategies import elastic

    comm = cc.init()
    rows, weights = np.random.default_rng(comm.rank).random((200, 500)), np.zeros(100_000)
    state = elastic.State(comm, weights=weights, step=0)

    def train(state: elastic.State) -> float:
        seconds = []
        for step in range(6000):
            began = time.perf_counter()
            _ = rows @ rows.T
            weights[:] = state.comm.allreduce(weights)
            if step % 100 == 99:
                state.commit(step=step)
            seconds.append(time.perf_counter() - began)
        return float(np.median(seconds[1000:]))

    began, used = time.monotonic(), time.process_time()
    median = elastic.run_elastic(train, state, max_ranks=2)
    share = (time.process_time() - used) / (time.monotonic() - began)
    text = f"{median * 1e6:.0f} us" if median is not None else f"{share:.2%} of a core"
    print(f"rank {comm.rank}: {text}", flush=True)


class Kill(NamedTuple):
    """Who dies when."""

    step: int
    rank: int


class Recovery(NamedTuple):
    """How those that live have gone on once.

    Attributes:
        dead: how many had died.
        lost: steps made again.
        seconds: from the first death to the next commit, five steps after the last one.
    """

    dead: int
    lost: int
    seconds: float


class Outcome(NamedTuple):
    """What became of a job."""

    accuracy: float
    rows: tuple[int, int]  # how often the rarest row was used, and the most frequent one
    recoveries: list[Recovery]
    text: str
    bits: str = ""  # a sum of the arrays of the last checkpoint


def schedule(seed: int, ranks: int) -> list[Kill]:
    """Draw one or two different ranks, and for each a step; for most pairs it is the same one."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 3))
    victims = random.choice(ranks, count, replace=False).tolist()
    steps = random.integers(0, LAST_STEP, count).tolist()
    if count == 2 and random.random() < 0.5:
        steps[1] = steps[0]
    return sorted(map(Kill, steps, victims))


def launcher() -> str:
    """Return the path of mpirun."""
    mpirun = Path(sys.executable).parent / "mpirun"
    return str(mpirun) if mpirun.exists() else shutil.which("mpirun") or "mpirun"


def run_job(kills: list[Kill], ranks: int, spares: int = 0) -> Outcome:
    """Train on the digits while ranks are killed."""
    from strategies.elastic import event_log

    with tempfile.TemporaryDirectory() as folder:
        wanted = ";".join(f"step={kill.step},rank={kill.rank},kind=kill" for kill in kills)
        places = {"UNISONO_EVENTS": folder, "UNISONO_RECORDER_DIR": folder}
        command = [launcher(), "--with-ft", "ulfm", "-np", str(ranks + spares), sys.executable]
        done = subprocess.run(
            [*command, "examples/elastic_digits.py", "--epochs", str(EPOCHS),
             "--checkpoints", f"{folder}/checkpoints", "--max-ranks", str(ranks)],
            cwd=ROOT, env={**os.environ, **places, "UNISONO_FAULT": wanted},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        told = event_log.read(folder)
        bits = hashlib.sha256()
        saved = sorted(Path(folder, "checkpoints").glob("step-*"))
        for file in sorted(saved[-1].glob("*.safetensors")) if saved else ():
            bits.update(file.read_bytes())
    said = re.search(r"used (\d+) to (\d+) times; accuracy .*: (\S+)", done.stdout)
    if done.returncode or said is None:
        return Outcome(0.0, (0, 0), [], done.stdout + done.stderr)
    rows = int(said[1]), int(said[2])
    return Outcome(float(said[3]), rows, recoveries_of(told), done.stdout, bits.hexdigest())


def recoveries_of(told: list[dict[str, Any]]) -> list[Recovery]:
    """Say from the events of all ranks how they have gone on."""
    last = {event["commit"]: event for event in told if event["event"] == "recovered"}
    deaths = [event for event in told if event["event"] == "fault"]
    recoveries = []
    for event in last.values():  # two ranks may have died before one recovery
        dead = [death for death in deaths if death["time"] < event["time"]]
        deaths = [death for death in deaths if death not in dead]
        after = [
            e["time"] for e in told if e["event"] in ("commit", "end") and e["time"] > event["time"]
        ]
        if dead and after:
            lost = max(death["step"] for death in dead) - event["commit"] * COMMIT_STEPS
            seconds = min(after) - min(death["time"] for death in dead)
            recoveries.append(Recovery(len(dead), lost, round(seconds, 3)))
    return recoveries


def kill_ranks(seeds: Sequence[int], ranks: int, spares: int, file: Path | None) -> int:
    """Run jobs, print a row for each, and what is worst of all; returns the exit status."""
    print("| job | rank killed at step | accuracy | steps made again | s from death to going on |")
    print("| --- | --- | --- | --- | --- |")
    failed = 0
    rows = {}
    undisturbed = run_job([], ranks) if spares else None
    for seed in seeds:
        kills = schedule(seed, ranks)
        outcome = run_job(kills, ranks, spares)
        right = outcome.accuracy >= 0.96 and outcome.rows == (EPOCHS, EPOCHS)
        if undisturbed is not None and len(kills) <= spares:
            right = right and outcome.bits == undisturbed.bits
        failed += not right
        when = ", ".join(f"{kill.rank} at {kill.step}" for kill in kills)
        lost = " ".join(str(r.lost) for r in outcome.recoveries)
        seconds = " ".join(f"{r.seconds:.2f}" for r in outcome.recoveries)
        print(f"| {seed} | {when} | {outcome.accuracy:.4f} | {lost} | {seconds} |", flush=True)
        if not right:
            print(outcome.text, file=sys.stderr)
        rows[seed] = {
            "job": seed,
            "kills": [kill._asdict() for kill in kills],
            "accuracy": outcome.accuracy if right else 0.0,
            "recoveries": [recovery._asdict() for recovery in outcome.recoveries],
        }
    beside = f" beside {spares} spare" if spares else ""
    print(f"\n{len(seeds) - failed} of {len(seeds)} jobs of {ranks} ranks{beside} trained")
    print(table_of(list(rows.values())))
    if file is not None:
        known = json.loads(file.read_text()) if file.exists() else []
        rows = {row["job"]: row for row in known} | rows
        lines = (json.dumps(rows[job]) for job in sorted(rows))
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return min(failed, 1)


def table_of(rows: list[dict[str, Any]]) -> str:
    """Say how jobs have gone on, by who was killed."""
    kinds: dict[str, list[dict[str, Any]]] = {
        "one rank, not rank 0": [],
        "rank 0": [],
        "two ranks, one after the other": [],
        "two ranks at one step": [],
    }
    one, zero, after, together = kinds.values()
    for row in rows:
        steps = {kill["step"] for kill in row["kills"]}
        if len(row["kills"]) == 1:
            (zero if row["kills"][0]["rank"] == 0 else one).append(row)
        else:
            (together if len(steps) == 1 else after).append(row)
    lines = [
        "| killed | jobs | trained | worst accuracy | steps made again | s until training |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, some in [*kinds.items(), ("all", rows)]:
        again = [recovery for row in some for recovery in row["recoveries"]]
        if not again:
            continue
        lost = [recovery["lost"] for recovery in again]
        seconds = [recovery["seconds"] for recovery in again]
        trained = [row["accuracy"] for row in some if row["accuracy"]]
        lines.append(
            f"| {name} | {len(some)} | {len(trained)} | {min(trained, default=0):.3f} | "
            f"{np.median(lost):g}, at most {max(lost)} | "
            f"{np.median(seconds):.2f}, at most {max(seconds):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
