"""Runs jobs whose ranks are killed and paused at random moments, and checks how they end.

    python tests/failures/kill_schedules.py --first 0 --count 100 --jobs 2 --json schedules.json

A schedule is drawn from a seed: 2 to 5 ranks, some of them spare, with or without a
`TrainingSession`. One to three ranks are killed, by themselves before a call or from outside some
milliseconds later, and others are stopped for a moment. One training rank always survives.

    seed -> Schedule -> mpirun --with-ft ulfm schedule_job.py -> Outcome

A job is *lost* if its exit status is wrong, or if a surviving rank ends without the right state:
each row used once and, with enough spare ranks, the sums of an undisturbed job. It is *hung* if it
has not ended in time. The directory of a failed job is kept, with its output and the stacks of its
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher import ROOT, environment, mpirun_path

PROGRAM = Path(__file__).with_name("schedule_job.py")

# Seconds; a job takes 2 to 5 on an idle machine.
LIMIT = 150.0

# Seconds for which a rank is stopped: far less than a call waits.
PAUSE = 0.4

# Where ranks are killed, and before which call at the latest: (phase, point) -> calls. Phases and
# points are those of the program.
MOMENTS = {
    "before training": {("start", "start"): 1, ("start", "begin"): 1, ("start", "barrier"): 1},
    "steps": {("start", "step"): 12, ("start", "allreduce"): 30},
    "commits": {("start", "commit"): 5, ("start", "turn"): 5, ("start", "barrier"): 6},
    "saves": {("start", "write"): 4, ("start", "allgather"): 8},
    "recovery": {
        ("failure", "after"): 2, ("failure", "place"): 2, ("failure", "go_on"): 1,
        ("failure", "allreduce"): 4, ("failure", "allgather"): 3, ("failure", "hand_on"): 1,
        ("failure", "broadcast"): 2, ("failure", "group"): 1, ("failure", "commit"): 2,
        ("failure", "step"): 2,
    },
    "shrinking": {
        ("failure", "shrunk"): 2, ("failure", "meeting"): 2, ("failure", "form"): 2,
        ("failure", "agree"): 3, ("failure", "revoke"): 2, ("failure", "made"): 3,
    },
    "end": {
        ("start", "meet"): 2, ("start", "leave"): 1, ("last", "stay"): 1, ("last", "end"): 1,
        ("start", "agree"): 2,
    },
    "MPI_Finalize": {("start", "finalize"): 1},
}  # fmt: skip


class Event(NamedTuple):
    """A signal to a rank.

    Attributes:
        kind: "kill" or "stop".
        rank: number of the rank in the world.
        phase: in which calls are counted.
        point: the function before whose call the signal is sent.
        call: number of the call, from 1.
        delay: seconds until the runner sends the signal; 0 for a rank that kills itself.
    """

    kind: str
    rank: int
    phase: str
    point: str
    call: int = 1
    delay: float = 0.0


class Schedule(NamedTuple):
    """A job and the signals to its ranks.

    Attributes:
        trained: number of ranks that train.
        spares: number of spare ranks.
        session: whether they train in a `TrainingSession`.
        memory: value of UNISONO_SHARED_MEMORY.
        events: in any order.
    """

    trained: int
    spares: int
    session: bool
    memory: str
    events: Sequence[Event]


class Outcome(NamedTuple):
    """How a job has ended.

    Attributes:
        happened: indices of the events that were reached.
        fault: description of the fault; empty without one.
        hung: whether the runner had to end it.
        seconds: duration.
    """

    happened: set[int]
    fault: str
    hung: bool
    seconds: float


def drawn(seed: int) -> Schedule:
    """Draw a schedule."""
    rng = np.random.default_rng(seed)

    def one_of(values):
        return values[rng.integers(len(values))]

    trained = int(rng.integers(2, 5))
    spares = int(rng.integers(0, min(2, 5 - trained) + 1))
    session = bool(rng.random() < 0.4)
    ranks = [int(rank) for rank in rng.permutation(trained + spares)]
    ranks.remove(next(rank for rank in ranks if rank < trained))  # it always survives
    kills = min(int(rng.integers(1, 4)), len(ranks))
    kinds = ["kill"] * kills + ["stop"] * int(rng.random() < 0.25)
    events = []
    for number, kind in enumerate(kinds):
        # A recovery needs an earlier death.
        later = ["recovery", "shrinking"] if number else []
        moment = one_of([*[name for name in MOMENTS if name not in ("recovery", "shrinking")
                           and (session or name != "saves")], *later * 3])  # fmt: skip
        places = MOMENTS[moment]
        phase, point = one_of(list(places))
        call = int(rng.integers(1, places[phase, point] + 1))
        outside = kind == "stop" or rng.random() < 0.4
        delay = float(np.round(rng.exponential(0.03) + 1e-4, 4)) if outside else 0.0
        rank = ranks[number] if kind == "kill" else int(rng.integers(trained + spares))
        events.append(Event(kind, rank, phase, point, call, delay))
    return Schedule(trained, spares, session, one_of(["/dev/shm", "/dev/shm", "off"]), events)


def moment_of(event: Event) -> str:
    """Return the row of the table of an event."""
    return next(name for name, places in MOMENTS.items() if (event.phase, event.point) in places)


class Runner:
    """A job under way: receives the reports of its ranks, and sends signals when they are due.

    Args:
        schedule: what to run.
        directory: empty; for the job's files.
    """

    def __init__(self, schedule: Schedule, directory: Path) -> None:
        self._schedule, self._directory = schedule, directory
        self._pids: dict[int, int] = {}
        self.happened: set[int] = set()
        self._due: list[tuple[float, int, int]] = []  # (when, signal, process)
        facts = {**schedule._asdict(), "events": [event._asdict() for event in schedule.events]}
        (directory / "schedule.json").write_text(json.dumps(facts, indent=1))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "runner"))

    def run(self) -> Outcome:
        """Run it to its end."""
        size = self._schedule.trained + self._schedule.spares
        command = [mpirun_path(), "--with-ft", "ulfm", "-np", str(size), sys.executable,
                   str(PROGRAM), str(self._directory)]  # fmt: skip
        own = {
            "UNISONO_RECORDER_DIR": str(self._directory),
            "UNISONO_EVENTS": str(self._directory / "events"),
            "UNISONO_TIMEOUT": "60",
            "UNISONO_SHARED_MEMORY": self._schedule.memory,
        }
        began, hung = time.monotonic(), False
        with (self._directory / "output").open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(**own), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None:
                    self._look()
                    if time.monotonic() > began + LIMIT:
                        hung = True
                        self._note_stacks()
                        break
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    for pid in self._pids.values():
                        _signal(pid, signal.SIGKILL)
                process.wait()
                self._socket.setblocking(False)
                while self._take_report():  # the last ones, since this process may have been late
                    pass
                self._socket.close()
        seconds = time.monotonic() - began
        fault = "hung" if hung else self._fault(process.returncode)
        return Outcome(self.happened, fault, hung, seconds)

    def _look(self) -> None:
        """Wait for a report, or until a signal is due, or for a moment."""
        wait = self._due[0][0] - time.monotonic() if self._due else 0.05
        self._socket.settimeout(min(0.05, max(1e-4, wait)))
        self._take_report()
        while self._due and self._due[0][0] <= time.monotonic():
            _, number, pid = heapq.heappop(self._due)
            _signal(pid, number)

    def _take_report(self) -> bool:
        """Handle a report; return whether one came within the socket's timeout."""
        try:
            what, number, pid = self._socket.recv(64).decode().split()
        except (TimeoutError, BlockingIOError):
            return False
        if what == "here":
            self._pids[int(number)] = int(pid)
        if what == "event":
            self._happen(int(number), int(pid))
        return True

    def _happen(self, number: int, pid: int) -> None:
        self.happened.add(number)
        event, now = self._schedule.events[number], time.monotonic()
        if event.delay:
            first = signal.SIGKILL if event.kind == "kill" else signal.SIGSTOP
            heapq.heappush(self._due, (now + event.delay, first, pid))
        if event.kind == "stop":
            heapq.heappush(self._due, (now + event.delay + PAUSE, signal.SIGCONT, pid))

    def _note_stacks(self) -> None:
        """Let the remaining ranks write their stacks."""
        with (self._directory / "where").open("w") as file:
            for rank, pid in self._pids.items():
                _signal(pid, signal.SIGXCPU)
                for name in ("status", "wchan", "stack"):
                    try:
                        text = Path(f"/proc/{pid}/{name}").read_text()
                    except OSError as error:
                        text = str(error)
                    file.write(f"rank {rank} (process {pid}) {name}: {text}\n")
        time.sleep(1)

    def _fault(self, status: int) -> str:
        """Return the differences between the job's output and status, and the expected ones."""
        schedule = self._schedule
        text = (self._directory / "output").read_text()
        happened = [schedule.events[number] for number in self.happened]
        size = schedule.trained + schedule.spares
        killed = {event.rank for event in happened if event.kind == "kill"}
        found = {
            int(rank): (int(least), int(most), int(fewest), json.loads(sums))
            for rank, least, most, fewest, sums in re.findall(
                r"rank (\d+): rows (\d+) to (\d+), fewest (\d+), sums (\[.*?\])", text
            )
        }
        faults = [] if status == 0 else [f"status {status}, expected 0"]
        if missing := set(range(size)) - killed - found.keys():
            faults.append(f"no end of ranks {sorted(missing)}")
        for rank, (least, most, fewest, sums) in found.items():
            if (least, most) != (1, 1):
                faults.append(f"rank {rank}: rows were used {least} to {most} times")
            if fewest == schedule.trained and sums != expected_sums(schedule.trained):
                faults.append(f"rank {rank}: other sums than those of an undisturbed job")
        return "; ".join(faults)


def expected_sums(trained: int) -> list[int]:
    """Return the sums of a job in which no place is lost."""
    from schedule_job import ROWS

    steps = -(-ROWS // trained)
    total = np.zeros(8, int)
    for place in range(trained):
        rng = np.random.Generator(np.random.PCG64(place))
        for _ in range(steps):
            total += rng.integers(1 << 30, size=8)
    return total.tolist()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run(schedule: Schedule, directory: Path) -> Outcome:
    """Run a job in an empty directory."""
    return Runner(schedule, directory).run()


def run_seed(seed: int, logs: Path) -> dict[str, object]:
    """Run the job of a seed, keep its files if it fails, and return its row."""
    schedule = drawn(seed)
    directory = Path(tempfile.mkdtemp(prefix="kills-"))
    outcome = run(schedule, directory)
    if outcome.fault:
        kept = logs / f"seed-{seed}"
        shutil.rmtree(kept, ignore_errors=True)
        logs.mkdir(parents=True, exist_ok=True)
        (directory / "runner").unlink()
        shutil.move(directory, kept)
        print(f"seed {seed}: {outcome.fault} ({outcome.seconds:.0f} s, {kept})", flush=True)
    else:
        shutil.rmtree(directory)
    return {
        "seed": seed, **schedule._asdict(),
        "events": [event._asdict() for event in schedule.events],
        "happened": sorted(outcome.happened), "fault": outcome.fault, "hung": outcome.hung,
        "seconds": round(outcome.seconds, 2),
    }  # fmt: skip


def table(rows: Sequence[dict[str, object]]) -> str:
    """Return the outcomes as a Markdown table."""
    kinds: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        events = [Event(**row["events"][number]) for number in row["happened"]]
        names = {f"a kill: {moment_of(event)}" for event in events if event.kind == "kill"}
        names |= {"a kill from outside" for e in events if e.kind == "kill" and e.delay}
        names |= {"a stop of a moment" for event in events if event.kind == "stop"}
        kills = sum(event.kind == "kill" for event in events)
        names |= {"two kills or more"} if kills > 1 else set()
        names |= {"spare ranks"} if row["spares"] else set()
        names |= {"a session"} if row["session"] else set()
        for name in names:
            kinds.setdefault(name, []).append(row)
    order = [f"a kill: {name}" for name in MOMENTS]
    order += ["a kill from outside", "two kills or more", "a stop of a moment", "spare ranks"]
    lines = ["| jobs with | jobs | lost | hung |", "| --- | --- | --- | --- |"]
    for name in [*order, "a session", "all"]:
        found = rows if name == "all" else kinds.get(name, [])
        lost = sum(bool(row["fault"]) and not row["hung"] for row in found)
        lines.append(f"| {name} | {len(found)} | {lost} | {sum(map(_hung, found))} |")
    return "\n".join(lines)


def _hung(row: dict[str, object]) -> bool:
    return bool(row["hung"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="seed of the first job")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "kills")
    options = parser.parse_args()
    rows: dict[int, dict[str, object]] = {}
    if options.json and options.json.exists():
        rows = {row["seed"]: row for row in json.loads(options.json.read_text())}
    seeds = range(options.first, options.first + options.count)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda seed: run_seed(seed, options.logs), seeds):
            rows[row["seed"]] = row
            if options.json:
                options.json.write_text(json.dumps([rows[seed] for seed in sorted(rows)]) + "\n")
    print(table(list(rows.values())))
    sys.exit(any(row["fault"] for row in rows.values()))


if __name__ == "__main__":
    main()
