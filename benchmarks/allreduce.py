"""All-reduce on one node against three MPI libraries, each at its best, and Gloo; near and far.

    python benchmarks/allreduce.py [--ranks 2] [--dtype float32] [--json file] [--plot file.png]

Each setting of Open MPI, and each other MPI library that stands in `mpich/` or `impi/` of this
environment (CONTRIBUTING says how), is a job of its own, in which ours and the peers take turns at
every size; all jobs run `--rounds` times in turns. Figures are medians of the slowest rank.
Ratios are a peer's time over ours in the same turns. "best" is the smallest ratio over the jobs.

**Near and far.** A virtual machine's cores move, and what passes between two of them is slower by
half or more where they share less. So before and after each turn rank 0 hands 512 KiB over to rank
1 (`Handover`), and turns are told apart by its rate, if there are two kinds of it; a turn with one
of either kind is dropped.

**Fresh arrays.** Before each call a rank writes its array anew, as a training step does: what
nobody writes stays in other cores' caches, and the next call is faster than it will ever be. The
clock stands still meanwhile; for arrays up to 16 KiB the time of writing alone is subtracted. What
writing takes, to private and to shared memory, is a column.

`copy` is the time in which all ranks at once copy as many bytes from private to private memory, a
floor for anything that moves the data. MPI knows no bfloat16: float16 takes its place there. Gloo
runs as under `torchrun` (`LOCAL_WORLD_SIZE`), which lets it use shared memory.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

SIZES = [8, 64, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]

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

OURS = ("plan", "call", "shared")

Row = dict[str, Any]


class Job(NamedTuple):
    """One mpirun: its launcher, and what its environment says."""

    launcher: Path
    environment: dict[str, str]


class Turn(NamedTuple):
    """What one turn measured, in us, and the handover's rates before and after it, in GB/s."""

    job: str
    nbytes: int
    rates: tuple[float, float]
    times: dict[str, float]


class Goal(NamedTuple):
    """Something promised: a case's ratio against a peer, for some sizes."""

    name: str
    state: str
    case: str
    against: str  # a column of ratios, or "copies"
    sizes: tuple[int, int]  # from, to
    reach: float


KIB, MIB = 1 << 10, 1 << 20
GOALS = [
    Goal("private, far, 64 KiB: best MPI", "far", "plan", "best", (64 * KIB, 64 * KIB), 1.3),
    Goal("private, far, 256 KiB to 1 MiB: best MPI", "far", "plan", "best", (256 * KIB, MIB), 1.2),
    Goal("private, far, 4 to 64 MiB: best MPI", "far", "plan", "best", (4 * MIB, 64 * MIB), 2.0),
    Goal("private, near, 64 KiB: best MPI", "near", "plan", "best", (64 * KIB, 64 * KIB), 1.1),
    Goal(
        "private, near, 256 KiB to 1 MiB: best MPI", "near", "plan", "best", (256 * KIB, MIB), 1.5
    ),
    Goal("private, near, 4 to 64 MiB: best MPI", "near", "plan", "best", (4 * MIB, 64 * MIB), 1.8),
    Goal("private, near, 1 to 4 MiB: copies", "near", "plan", "copies", (MIB, 4 * MIB), 2.0),
    Goal("shared, 64 to 256 MiB: best MPI", "", "shared", "best", (64 * MIB, 256 * MIB), 3.0),
    Goal("plain call, 8 B: Open MPI", "", "call", "default", (8, 8), 0.5),
    Goal("plain call, 4 KiB: Open MPI", "", "call", "default", (4 * KIB, 4 * KIB), 1 / 1.2),
]


def main() -> None:
    """Run every job and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the arrays")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    jobs = known_jobs()
    turns = [
        turn
        for _ in range(options.rounds)
        for name, job in jobs.items()
        for turn in launch(options, name, job)
    ]
    limit, states = told_apart(turns)
    tables = {}
    for state, own in states.items():
        rates = [rate for turn in own for rate in turn.rates]
        tables[state] = {
            "handover": statistics.median(rates),
            "rows": [combine(list(of_size)) for of_size in by_size(own)],
        }
        print(
            f"{options.dtype} SUM, {options.ranks} ranks, {state}: 512 KiB go from core to core at "
            f"{tables[state]['handover']:.1f} GB/s; {len(own)} turns; microseconds"
        )
        print_table(tables[state]["rows"])
    dropped = len(turns) - sum(map(len, states.values()))
    print(f"dropped: {dropped} of {len(turns)} turns, in which the cores have moved")
    goals = held(tables) if (options.ranks, options.dtype) == (2, "float32") else []
    for goal in goals:
        said = "reached" if goal["measured"] >= goal["reach"] else "MISSED"
        print(f"{goal['name']:<44} {goal['measured']:6.2f}, goal {goal['reach']:.2f}: {said}")
    if options.json:
        facts = {"ranks": options.ranks, "dtype": options.dtype, "machine": machine()}
        facts |= {"jobs": list(jobs), "limit": limit, "dropped": dropped, "states": tables}
        options.json.write_text(json.dumps(facts | {"goals": goals}, indent=1) + "\n")
    if options.plot:
        draw(options, tables)


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


def launch(options: argparse.Namespace, name: str, job: Job) -> list[Turn]:
    """Run the worker under mpirun; returns what rank 0 measured."""
    command = [str(job.launcher), "-np", str(options.ranks), sys.executable, __file__, "--worker"]
    command += ["--dtype", options.dtype, "--sizes", *map(str, options.sizes)]
    environment = {**os.environ, **job.environment}
    if name == "default" and importlib.util.find_spec("torch"):
        command.append("--gloo")
        environment["LOCAL_WORLD_SIZE"] = str(options.ranks)
    done = subprocess.run(command, env=environment, text=True, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout.splitlines()[-1])
    return [Turn(name, nbytes, tuple(rates), times) for nbytes, rates, times in found]


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


def by_size(turns: list[Turn]) -> Iterable[list[Turn]]:
    """Group turns by the bytes of their arrays, the smallest first."""
    groups: dict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        groups[turn.nbytes].append(turn)
    return [groups[nbytes] for nbytes in sorted(groups)]


def combine(turns: list[Turn]) -> Row:
    """Join what the turns of one size have measured."""
    jobs: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        jobs[turn.job].append(turn)

    def median(of: list[Turn], case: str, under: str = "") -> float:
        return statistics.median(t.times[case] / (t.times[under] if under else 1.0) for t in of)

    with_gloo = [turn for turn in turns if "gloo" in turn.times]

    def ratios(case: str) -> Row:
        found = {name: median(of, "mpi", case) for name, of in jobs.items()}
        gloo = {"Gloo": median(with_gloo, "gloo", case)} if with_gloo else {}
        return {"best": min(found.values()), **found, **gloo}

    row: Row = {"bytes": turns[0].nbytes}
    row |= {case: median(turns, case) for case in (*OURS, "copy", "write private", "write shared")}
    row["mpi"] = {name: median(of, "mpi") for name, of in jobs.items()}
    if with_gloo:
        row["gloo"] = median(with_gloo, "gloo")
    row["ratios"] = {case: ratios(case) for case in OURS}
    row["copies"] = {case: median(turns, case, "copy") for case in OURS}
    return row


def print_table(rows: list[Row]) -> None:
    """Print one line for each size."""
    jobs = [name for name in [*OPEN_MPI, *OTHERS] if any(name in row["mpi"] for row in rows)]
    heads = ["bytes", *OURS, "copy", "write", "shared", *jobs, "Gloo"]
    heads += [f"{case}: best" for case in OURS] + ["plan/copy"]
    print("  ".join(f"{head:>12}" for head in heads))
    for row in rows:
        times = [row[case] for case in (*OURS, "copy", "write private", "write shared")]
        times += [row["mpi"].get(name, math.nan) for name in jobs] + [row.get("gloo", math.nan)]
        times += [row["ratios"][case]["best"] for case in OURS] + [row["copies"]["plan"]]
        print("  ".join([f"{row['bytes']:12}", *(f"{value:12.2f}" for value in times)]))


def held(tables: dict[str, Row]) -> list[Row]:
    """Hold what was measured against the goals: the worst size of each."""
    goals = []
    for goal in GOALS:
        for state in [goal.state] if goal.state else tables:
            rows = tables.get(state, {"rows": []})["rows"]
            low, high = goal.sizes
            rows = [row for row in rows if low <= row["bytes"] <= high]
            if not rows:
                continue
            if goal.against == "copies":
                worst = max(row["copies"][goal.case] for row in rows)
                entry = {"measured": 1 / worst, "reach": 1 / goal.reach}
            else:
                found = [row["ratios"][goal.case].get(goal.against) for row in rows]
                if None in found:
                    continue
                entry = {"measured": min(found), "reach": goal.reach}
            name = goal.name if goal.state else f"{goal.name} ({state})"
            goals.append({"name": name, **entry})
    return goals


def draw(options: argparse.Namespace, tables: dict[str, Row]) -> None:
    """Draw the times over the size, near and far side by side, into the file of `--plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(tables), 5), layout="constrained")
    all_axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (state, table) in zip(all_axes, tables.items(), strict=True):
        rows = table["rows"]
        lines: dict[str, list[float]] = {
            "Unisono, private arrays": [row["plan"] for row in rows],
            "Unisono, shared_empty": [row["shared"] for row in rows],
            "Open MPI, default": [row["mpi"].get("default", math.nan) for row in rows],
            "MPI, best of each size": [min(row["mpi"].values()) for row in rows],
            "Gloo": [row.get("gloo", math.nan) for row in rows],
            "all ranks copy as much": [row["copy"] for row in rows],
        }
        for label, times in lines.items():
            style = "--" if label.startswith("all") else "o-"
            axes.loglog([row["bytes"] for row in rows], times, style, label=label)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="bytes", title=f"{state}: {table['handover']:.1f} GB/s from core to core")
        axes.grid(alpha=0.3)
    all_axes[0].set(ylabel="median time of the slowest rank, us")
    all_axes[0].legend()
    figure.suptitle(f"All-reduce of {options.dtype}, {options.ranks} ranks on one node")
    figure.savefig(options.plot)


def worker(options: argparse.Namespace) -> None:
    """Measure every size on this rank; rank 0 prints."""
    import ml_dtypes  # noqa: F401
    import numpy as np
    from mpi4py import MPI

    import collectives as cc
    from collectives import topology
    from collectives.tools import peers

    comm = cc.init()
    world = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0) if world.rank == 0 else [])
    cores = world.bcast(cores)
    if world.size <= len(cores):  # by the system in turns, each on its own core
        os.sched_setaffinity(0, {cores[world.rank]})
    handover = Handover(world)
    dtype = np.dtype(options.dtype)
    found: list[tuple[int, tuple[float, float], dict[str, float]]] = []
    for nbytes in options.sizes:
        private = np.zeros(nbytes // dtype.itemsize, dtype)
        result = np.zeros_like(private)
        bounds = topology.chunk_bounds(private.size, comm.size)
        shared = comm.shared_empty(private.size, dtype)
        calls: dict[str, tuple[Callable[[], object], Any]] = {
            "plan": (comm.plan_allreduce(private, op=cc.SUM), private),
            "call": (lambda x=private, y=result: comm.allreduce(x, op=cc.SUM, out=y), private),
            "shared": (comm.plan_allreduce(shared, op=cc.SUM), shared),
            "mpi": (peers.native("allreduce", private, bounds, 0), private),
            "copy": (lambda x=private, y=result: np.copyto(y, x), private),
        }
        if options.gloo:
            calls["gloo"] = peers.gloo("allreduce", private, bounds, 0), private
        cases = {name: Case(world, *call) for name, call in calls.items()}
        writes = {
            "write private": Case(world, lambda: None, private),
            "write shared": Case(world, lambda: None, shared),
        }
        for _ in range(TURNS):
            before = handover.rate()
            times = {name: case.seconds() for name, case in cases.items()}
            times |= {name: case.write_seconds() for name, case in writes.items()}
            rates = before, handover.rate()
            found.append((nbytes, rates, {name: 1e6 * s for name, s in times.items()}))
    peers.close()
    if comm.rank == 0:
        print(json.dumps(found))


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
    """One call, before which its array is written anew."""

    def __init__(self, world: Any, call: Callable[[], object], array: Any) -> None:
        self.world = world
        self.call = call
        self.array = array
        self.together = array.nbytes <= TOGETHER_BYTES
        self.once()
        first = min(world.allgather(min(self.once() for _ in range(3))))
        self.count = max(3, min(1000, int(TURN_SECONDS / first)))

    def once(self) -> float:
        """Write the array, call, and return the seconds of the call."""
        self.array[...] = 1
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
        """Return the slowest rank's seconds to write the array."""
        return self._loop(lambda: None, max(3, self.count // 10))

    def _loop(self, call: Callable[[], object], count: int = 0) -> float:
        array, count = self.array, count or self.count
        self.world.Barrier()
        began = time.perf_counter()
        for _ in range(count):
            array[...] = 1
            call()
        return max(self.world.allgather((time.perf_counter() - began) / count))


if __name__ == "__main__":
    main()
