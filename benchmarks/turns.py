"""Turns: how benchmarks on one node measure Unisono and three MPI libraries, near and far.

Each setting of Open MPI, and each other MPI library in `mpich/` or `impi/` of this environment, is
one job, in which Unisono and the library take turns.

**Near and far.** The host moves the cores of a virtual machine. Cores that share less pass data at
half the rate or less. Before and after each turn, rank 0 passes 512 KiB to rank 1 (`Handover`). If
there are two kinds of rates, they divide the turns in two groups; a turn with one rate of each kind
is dropped.

**Fresh arrays.** Before each call a rank rewrites its array, as a training step does. An array that
is not rewritten stays in the caches of other cores, and the next call would be too fast. The clock
stops meanwhile; for arrays up to 16 KiB the separately measured time to write is subtracted.

**Known cores.** Ranks are bound to the first cores that they may use, or to those of `--cores`: on
a machine whose topology is known (`lscpu --extended`), `--cores 0,1` and `--cores 0,64` measure two
cores that share a cache and two of different packages, each in a separate run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Of each size in a job.
TURNS = 7

TURN_SECONDS = 0.02  # of one case, in calls of which there are 3 to 1000

# Bytes up to which calls are timed together with the writing of the array.
TOGETHER_BYTES = 16 << 10

HANDED_BYTES = 1 << 19

# How much faster handovers are near than far, at least: means of both kinds.
SPREAD = 1.6

# Open MPI 5's knobs that win somewhere on one node; the last where ranks outnumber the cores.
OPEN_MPI = {
    "default": {},
    "sm": {"OMPI_MCA_coll_sm_priority": "100"},
    "no cma": {"OMPI_MCA_smsc": "^cma"},
    "yield": {"OMPI_MCA_mpi_yield_when_idle": "1"},
}
OTHERS = {"MPICH": "mpich", "Intel MPI": "impi"}
FABRIC = {"I_MPI_FABRICS": "shm"}


class Job(NamedTuple):
    """One mpirun: its launcher, and what its environment says."""

    launcher: Path
    environment: dict[str, str]


class Turn(NamedTuple):
    """What one turn measured, in us, and the handover's rates before and after it, in GB/s."""

    job: str
    what: Any  # a case: bytes, or an operation and bytes
    rates: tuple[float, float]
    times: dict[str, float]


def known_jobs() -> dict[str, Job]:
    """Return what can be run here."""
    home = Path(sys.prefix)
    jobs = {name: Job(home / "bin" / "mpirun", found) for name, found in OPEN_MPI.items()}
    for name, folder in OTHERS.items():
        launcher = home / folder / "bin" / "mpiexec"
        if launcher.exists():
            library = str(home / folder / "lib" / "libmpi.so.12")
            jobs[name] = Job(launcher, {"MPI4PY_LIBMPI": library, **FABRIC})
    return jobs


def machine() -> str:
    """Name the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


class Measured(NamedTuple):
    """What all jobs have measured, near and far apart."""

    jobs: list[str]
    cores: list[int] | None  # of the ranks, where they were named
    limit: float | None  # between the rates of near and far
    dropped: int  # turns in which the cores have moved
    states: dict[str, list[Turn]]

    def tables(
        self, combine: Callable[[list[Turn]], dict[str, Any]], title: str
    ) -> dict[str, dict[str, Any]]:
        """Join the turns of each case, near and far; prints how many there were."""
        tables = {}
        for state, own in self.states.items():
            rate = statistics.median(rate for turn in own for rate in turn.rates)
            tables[state] = {"handover": rate, "rows": [combine(case) for case in by_case(own)]}
            print(f"{title}, {state}: 512 KiB go at {rate:.1f} GB/s; {len(own)} turns")
        print(f"dropped: {self.dropped} turns, in which the cores have moved")
        return tables

    def write(self, path: Path | None, **facts: object) -> None:
        """Write a file of figures, if there shall be one."""
        if path:
            known = {"machine": machine(), "jobs": self.jobs, "limit": self.limit}
            known |= {"cores": self.cores} if self.cores else {}
            every = known | {"dropped": self.dropped} | facts
            path.write_text(json.dumps(every, indent=1) + "\n")


def arguments(doc: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with what all these programs take; see `measure`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds, help="runs of each job, in turns")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--cores", type=_cores, metavar="0,8", help="one for each rank to be bound to"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    return parser


def measure(options: argparse.Namespace, jobs: dict[str, Job], *program: object) -> Measured:
    """Run all jobs in turns, each with `--worker`; a program is a file and its arguments."""
    if options.cores and len(options.cores) != options.ranks:
        raise SystemExit(f"--cores: expected one for each of {options.ranks} ranks")
    bound_to = ["--cores", ",".join(map(str, options.cores))] if options.cores else []
    turns = [
        turn
        for _ in range(options.rounds)
        for name, job in jobs.items()
        for turn in launch(name, job, options.ranks, *program, "--worker", *bound_to)
    ]
    limit, states = told_apart(turns)
    dropped = len(turns) - sum(map(len, states.values()))
    return Measured(list(jobs), options.cores, limit, dropped, states)


def _cores(text: str) -> list[int]:
    return [int(core) for core in text.split(",")]


def launch(name: str, job: Job, ranks: int, *program: object) -> list[Turn]:
    """Run a program under mpirun; returns what rank 0 printed of its turns in its last line.

    Where PyTorch is there, the first job has Gloo beside it: `--gloo`.
    """
    command = [str(job.launcher), "-np", str(ranks), sys.executable, *map(str, program)]
    environment = {**os.environ, **job.environment}
    if name == "default" and importlib.util.find_spec("torch"):
        command.append("--gloo")
        environment["LOCAL_WORLD_SIZE"] = str(ranks)
    done = subprocess.run(command, env=environment, text=True, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        Turn(name, tuple(what) if isinstance(what, list) else what, tuple(rates), times)
        for what, rates, times in found
    ]


def told_apart(turns: list[Turn]) -> tuple[float | None, dict[str, list[Turn]]]:
    """Return the rate that parts near from far, if there are both, and the turns of each."""
    logs = sorted(math.log(rate) for turn in turns for rate in turn.rates)
    cuts = range(len(logs) // 20, len(logs) - len(logs) // 20)  # one in twenty on either side
    # Where the two sides are as far apart as can be (Otsu's threshold).
    cut = max(
        (cut for cut in cuts if cut), key=lambda i: i * (len(logs) - i) * _apart(logs, i) ** 2
    )
    if math.exp(_apart(logs, cut)) < SPREAD:
        return None, {"near": turns}
    limit = math.exp((logs[cut - 1] + logs[cut]) / 2)
    sides = {
        "near": [turn for turn in turns if min(turn.rates) >= limit],
        "far": [turn for turn in turns if max(turn.rates) < limit],
    }
    return limit, {state: own for state, own in sides.items() if own}


def _apart(logs: list[float], cut: int) -> float:
    return statistics.fmean(logs[cut:]) - statistics.fmean(logs[:cut])


def by_case(turns: list[Turn]) -> Iterable[list[Turn]]:
    """Group turns by what they have measured, the smallest first."""
    groups: dict[Any, list[Turn]] = defaultdict(list)
    for turn in turns:
        groups[turn.what].append(turn)
    return [groups[what] for what in sorted(groups)]


def bound(world: Any, cores: list[int] | None) -> None:
    """Bind this rank to its core of some, or of all that there are, where these are enough."""
    cores = cores or world.bcast(sorted(os.sched_getaffinity(0)) if world.rank == 0 else None)
    if world.size <= len(cores):
        os.sched_setaffinity(0, {cores[world.rank]})


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Let threads that are made meanwhile run on any core, though their rank is bound to one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Handover:
    """Hands bytes from rank 0 to rank 1."""

    def __init__(self, world: Any) -> None:
        import numpy as np

        self.world = world
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            path = world.bcast(file.name)
            if world.rank == 0:
                file.truncate(HANDED_BYTES)
            world.Barrier()
            self.shared = np.memmap(path, np.uint8, shape=(HANDED_BYTES,))
            world.Barrier()
        self.own = np.ones(HANDED_BYTES, np.uint8)

    def rate(self) -> float:
        """Return GB/s, a median; the same on all ranks."""
        import numpy as np

        seconds = []
        for _ in range(9):
            took = 0.0
            for rank in (0, 1):
                self.world.Barrier()
                began = time.perf_counter()
                if self.world.rank == rank == 0:
                    np.copyto(self.shared, self.own)
                elif self.world.rank == rank == 1:
                    np.copyto(self.own, self.shared)
                took += time.perf_counter() - began if self.world.rank == rank else 0.0
            seconds.append(self.world.allreduce(took))
        return HANDED_BYTES / statistics.median(seconds) / 1e9


class Case:
    """One call, before which its arrays are written anew."""

    def __init__(self, world: Any, call: Callable[[], object], *arrays: Any) -> None:
        self.world = world
        self.call = call
        self.arrays = arrays
        self.together = sum(array.nbytes for array in arrays) <= TOGETHER_BYTES
        self.once()
        first = min(world.allgather(min(self.once() for _ in range(3))))
        self.count = max(3, min(1000, int(TURN_SECONDS / first)))

    def once(self) -> float:
        """Write the arrays, call, and return the seconds of the call."""
        for array in self.arrays:
            array[...] = 1
        self.world.Barrier()
        began = time.perf_counter()
        self.call()
        return time.perf_counter() - began

    def seconds(self) -> float:
        """Return the slowest rank's seconds per call, a median where calls are timed alone."""
        if not self.together:
            own = [self.once() for _ in range(self.count)]
            return statistics.median(map(max, zip(*self.world.allgather(own), strict=True)))
        alone = self._loop(lambda: None)
        return max(1e-9, self._loop(self.call) - alone)

    def write_seconds(self) -> float:
        """Return the slowest rank's seconds to write the arrays."""
        return self._loop(lambda: None, max(3, self.count // 10))

    def _loop(self, call: Callable[[], object], count: int = 0) -> float:
        arrays, count = self.arrays, count or self.count
        self.world.Barrier()
        began = time.perf_counter()
        for _ in range(count):
            for array in arrays:
                array[...] = 1
            call()
        return max(self.world.allgather((time.perf_counter() - began) / count))
