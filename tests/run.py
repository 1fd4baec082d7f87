"""Run all tests: alone, and beside that the conformance tests as 1, 2, 3 and 4 MPI ranks.

    python tests/run.py [--without FOLDER] [arguments for pytest]

The worlds of MPI ranks follow each other while the other tests run, since both often wait; what is
left when these have ended runs two worlds at a time. Where the environment holds further libraries,
MPICH in `mpich/`, Intel MPI in `impi/` (`make test` puts them there if UNISONO_REQUIRE names them),
2 and 3 ranks meet once more over each, for what depends on the library: `SECOND_FILES`, or all of
it with `--long`. With that, 3 ranks meet twice more over every library, for what ranks of a node
store for each other (`STORING`): into the caches, and past them.

What rank 0 says of a world is shown at its end; the others write to `out/WORLD-rank-R.log`. The
last lines say how many tests passed, and what was not tested because this machine lacks something.
A test that is skipped in every world for another reason is a failure: it would never run.

SIGTERM, SIGINT and SIGHUP end all processes of the run, in whatever session.

With the folder of an earlier run's reports, what passed there is left out, and what was skipped
there must run here.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import reports
from launcher import MPI_ENVIRONMENT, ROOT, STORING, WORLD_SIZES, library_beside, mpirun_path, run
from requirements import required

OUT = ROOT / "out"
CONFORMANCE = "tests/conformance"

# Of further libraries: a power of two and another number, since the rest takes minutes more.
SECOND_SIZES = (2, 3)

# Where another library may do something else: messages of all sizes and their order, the library's
# own collectives, calls from several threads, split communicators, and probes for what comes
# unasked. The rest is built on these, and never calls MPI by itself. `stores` takes a
# few seconds: with either way of storing the same bits.
SECOND_FILES = tuple(
    f"{CONFORMANCE}/test_{name}.py"
    for name in (
        "operations", "point_to_point", "large_counts", "several_nodes", "errors",
        "asynchronous", "channels", "shared_queues", "served_state", "stores",
    )
)  # fmt: skip

STORING_FILES = tuple(f"{CONFORMANCE}/{name}" for name in STORING)

# Ranks of the worlds in which a way of storing is forced.
STORING_SIZE = 3

# Processes that share the tests without a world of their own; many of them start several ranks.
MOST_WORKERS = 4

# Seconds for all tests of one size; a world that hangs beyond pytest's own limit is killed.
LIMIT = 1500

# Seconds between SIGTERM and SIGKILL, because mpirun needs about one to end its ranks; also the
# seconds to wait after SIGKILL.
GRACE = 10

# The exit status of pytest where no test was chosen, as with `-k` in some worlds.
NOTHING_CHOSEN = 5


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--without", type=Path, metavar="FOLDER")
    options, arguments = parser.parse_known_args(arguments)
    earlier = sorted(options.without.glob("*.xml")) if options.without else []
    if options.without and (not earlier or options.without.resolve() == OUT):
        parser.error(f"--without: no reports of another checkout's run in {options.without}")
    end_children_on_signals()
    # Hundreds of processes start: what Python compiles is kept, whatever the shell says.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    OUT.mkdir(exist_ok=True)
    for report in OUT.glob("*.xml"):
        report.unlink()
    leave_out = {report.stem: [f"--without={report.resolve()}"] for report in earlier}
    further_libraries, absent = second_libraries()
    statuses: dict[str, int] = {}
    worlds = deque()
    for library in (FIRST, *further_libraries):
        for size in library.sizes:
            world = f"mpi-{size}{library.label}"
            further = [*leave_out.get(world, []), *arguments]
            if "--long" not in arguments:
                # A rank alone has little to do with a library; 4 have what 2 have, but for the
                # messages themselves.
                further += SECOND_FILES if size in (1, 4) else library.files
            worlds.append((world, partial(_world, library, size, OUT / f"{world}.xml", further)))
        for way in ("plain", "streaming") if "--long" in arguments else ():
            world = f"mpi-{STORING_SIZE}{library.label}-{way}"
            further = [*leave_out.get(world, []), f"--stores={way}", *arguments, *STORING_FILES]
            report = OUT / f"{world}.xml"
            worlds.append((world, partial(_world, library, STORING_SIZE, report, further)))

    def work_off() -> None:
        while not _ending:
            try:
                world, run_world = worlds.popleft()
            except IndexError:
                return
            statuses[world] = run_world()

    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(work_off)
        statuses["alone"] = _alone([*leave_out.get("alone", []), *arguments])
        work_off()  # two at a time, now that nothing else runs
        other.result()
    return _summary(statuses, earlier, absent if _is_open_mpi() else set())


_ending: list[int] = []  # signals that this run has got


def end_children_on_signals() -> None:
    """Let SIGTERM, SIGINT and SIGHUP end all descendants of this process, and then itself."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """End all descendants, then this process by the same signal.

    The programs of tests run in sessions of their own, so a signal to the process group would not
    reach them.
    """
    _ending.append(number)
    if len(_ending) > 1:  # the first signal is being handled
        return
    began = time.monotonic()
    signalled: set[tuple[int, str]] = set()
    while alive := signalled & _processes().keys() | set(descendants(os.getpid())):
        waited = time.monotonic() - began
        if waited > 2 * GRACE:
            break
        for process in alive:
            # A second SIGTERM would make mpirun leave its ranks behind.
            if waited > GRACE or process not in signalled:
                with suppress(ProcessLookupError):
                    os.kill(process[0], signal.SIGKILL if waited > GRACE else signal.SIGTERM)
        signalled |= alive
        time.sleep(0.05)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def descendants(root: int) -> list[tuple[int, str]]:
    """Return the running descendants of a process: process id and start time."""
    found: list[tuple[int, str]] = []
    parents = {root}
    processes = _processes()
    while parents:
        children = [one for one, parent in processes.items() if parent in parents]
        found += children
        parents = {pid for pid, _ in children}
    return found


def _processes() -> dict[tuple[int, str], int]:
    """Map each running process, by process id and start time, to the process id of its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()  # the name may contain ")"
            if fields[0] not in "ZX":
                found[int(path.parent.name), fields[19]] = int(fields[1])
    return found


def _alone(arguments: list[str]) -> int:
    print("== one process, and ranks as threads", flush=True)
    pytest = [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider"]
    # One worker per core; what needs a machine for itself stays together, see `xdist_group`.
    pytest += ["-n", str(min(os.cpu_count() or 1, MOST_WORKERS)), "--dist", "loadgroup"]
    # After the crash of a worker pytest-xdist would wait for its tests for ever.
    pytest += ["--max-worker-restart", "0"]
    pytest += ["-m", "not mpi", f"--junitxml={OUT / 'alone.xml'}", *arguments]
    environment = {**os.environ, **MPI_ENVIRONMENT}
    return subprocess.run(pytest, cwd=ROOT, env=environment, check=False).returncode


class Library(NamedTuple):
    """An MPI library: how its worlds are told apart, started and found by mpi4py."""

    label: str
    mpirun: str
    environment: dict[str, str]
    sizes: tuple[int, ...]
    files: tuple[str, ...] = ()  # of the conformance tests; at first all


FIRST = Library("", "", {}, WORLD_SIZES)


def second_libraries() -> tuple[list[Library], set[str]]:
    """Those that are there beside the first; which are not, none of which may be required."""
    found, absent = [], set()
    for name in ("mpich", "impi"):
        if there := library_beside(name):
            launcher, found_by = there
            found.append(Library(f"-{name}", str(launcher), found_by, SECOND_SIZES, SECOND_FILES))
            continue
        if required(name):
            sys.exit(f"UNISONO_REQUIRE names {name}, but there is none in {sys.prefix}/{name}")
        absent.add(name)
    return found, absent


def _is_open_mpi() -> bool:
    return "Open MPI" in run([mpirun_path(), "--version"], timeout=30).stdout


def _world(library: Library, size: int, report: Path, arguments: list[str]) -> int:
    command = [library.mpirun or mpirun_path(), "-np", str(size)]
    command += [sys.executable, __file__, "--rank", report.stem, f"--junitxml={report}", *arguments]
    environment = {**os.environ, **MPI_ENVIRONMENT, **library.environment}
    environment["UNISONO_TEST_WORLD"] = "mpi"
    with report.with_suffix(".log").open("w+") as log:
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=environment, check=False, timeout=LIMIT,
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            ).returncode  # fmt: skip
            end = ""
        except subprocess.TimeoutExpired:
            status, end = 1, f"the tests did not end within {LIMIT} s\n"
        log.seek(0)
        print(f"\n== {size} MPI ranks{library.label}\n{log.read()}{end}", end="", flush=True)
    return status


def _summary(statuses: dict[str, int], earlier: list[Path], absent: set[str]) -> int:
    """Print one line in total, and what was not tested; the status says whether all is well."""
    written = {world: OUT / f"{world}.xml" for world in statuses}
    cases = [
        case for report in written.values() if report.exists() for case in reports.read(report)
    ]
    before = [case for report in earlier for case in reports.read(report)]
    counts, untested, faults = reports.summary(cases, before)
    faults += [f"no report of {world}" for world, report in written.items() if not report.exists()]
    for fault in faults:
        print(fault)
    if before:
        print(f"left out: {reports.left_out(cases, before)} that had passed before")
    failed = counts["failed"] + len(faults)
    print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    names = ",".join(sorted(untested | absent))
    if names:
        words = names.replace(",", ", ")
        print(f"not tested here: {words} (UNISONO_REQUIRE={names} requires them)")
    ended = set(statuses.values()) - {NOTHING_CHOSEN}
    return 1 if failed or ended != {0} else 0


def rank_main(arguments: list[str]) -> int:
    """Run as one rank of a world, whose name comes first; started by `main` through mpirun."""
    import pytest

    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    world, *options = arguments
    OUT.mkdir(exist_ok=True)
    if rank > 0:
        # Only rank 0 speaks on the terminal and writes the report; pytest takes over the
        # file descriptors, so they are exchanged before it starts.
        log = os.open(OUT / f"{world}-rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = [o for o in options if not re.match("--junitxml", o)]
    if not any(option.startswith(CONFORMANCE) for option in options):
        options = [CONFORMANCE, *options]
    always = ["-m", "mpi", "--with-mpi", "--color=no", "-p", "no:cacheprovider"]
    return int(pytest.main([*always, *options]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank_main(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
