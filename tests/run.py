"""Run all tests: alone, then the same conformance tests as 1, 2, 3 and 4 MPI ranks.

    python tests/run.py [arguments for pytest]

Where the environment holds MPICH as a second library, in `mpich/` (`make test` puts it there if
UNISONO_REQUIRE names it), 2 and 3 ranks meet once more over that one.

Rank 0 reports on the terminal; the others write to `out/mpi-SIZE-rank-R.log`. A test that asks
for an MPI world and is skipped at every size is a failure: it would never run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from launcher import MPI_ENVIRONMENT, ROOT, mpirun_path

SIZES = (1, 2, 3, 4)
OUT = ROOT / "out"

# Of the second library: a power of two and another number, since the rest takes minutes more.
SECOND_SIZES = (2, 3)

# Processes that share the tests without a world of their own; many of them start several ranks.
MOST_WORKERS = 4

# Seconds for all tests of one size; a world that hangs beyond pytest's own limit is killed.
LIMIT = 1500


def main(arguments: list[str]) -> int:
    OUT.mkdir(exist_ok=True)
    environment = {**os.environ, **MPI_ENVIRONMENT}
    pytest = [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider"]
    # One worker per core; what needs a machine for itself stays together, see `xdist_group`.
    pytest += ["-n", str(min(os.cpu_count() or 1, MOST_WORKERS)), "--dist", "loadgroup"]
    reports = [OUT / "serial.xml"]
    print("== one process, and ranks as threads", flush=True)
    statuses = [
        subprocess.run(
            [*pytest, "-m", "not mpi", f"--junitxml={reports[0]}", *arguments],
            cwd=ROOT, env=environment, check=False,
        ).returncode
    ]  # fmt: skip
    for library in (FIRST, *second_libraries()):
        for size in library.sizes:
            print(f"== {size} MPI ranks{library.label}", flush=True)
            report = OUT / f"mpi-{size}{library.label}.xml"
            command = [library.mpirun or mpirun_path(), "-np", str(size)]
            command += [sys.executable, __file__, "--rank", str(size), f"--junitxml={report}"]
            settings = {**environment, **library.environment}
            statuses.append(_world([*command, *arguments], settings))
            reports.append(report)
    return _summary(statuses, reports)


class Library(NamedTuple):
    """An MPI library: how its worlds are told apart, started and found by mpi4py."""

    label: str
    mpirun: str
    environment: dict[str, str]
    sizes: tuple[int, ...]


FIRST = Library("", "", {}, SIZES)


def second_libraries() -> list[Library]:
    """MPICH, where it is there beside the first library; required if UNISONO_REQUIRE names it."""
    home = Path(sys.prefix) / "mpich"
    if (home / "bin" / "mpiexec").exists():
        found_by = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.12")}
        return [Library("-mpich", str(home / "bin" / "mpiexec"), found_by, SECOND_SIZES)]
    if "mpich" in os.environ.get("UNISONO_REQUIRE", "").split(","):
        sys.exit(f"UNISONO_REQUIRE names mpich, but there is none in {home}")
    return []


def _world(command: list[str], environment: dict[str, str]) -> int:
    try:
        return subprocess.run(
            command, cwd=ROOT, env={**environment, "UNISONO_TEST_WORLD": "mpi"}, check=False,
            timeout=LIMIT,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"the tests did not end within {LIMIT} s", flush=True)
        return 1


def _summary(statuses: list[int], reports: list[Path]) -> int:
    """Print one line in total; the exit status says whether all is well."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    outcomes: dict[str, set[str]] = {}
    for report in reports:
        if not report.exists():
            counts["failed"] += 1
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = _outcome(case)
            counts[outcome] += 1
            if report is not reports[0]:
                name = f"{case.get('classname')}::{case.get('name')}"
                outcomes.setdefault(name, set()).add(outcome)
    never_run = sorted(name for name, seen in outcomes.items() if seen == {"skipped"})
    for name in never_run:
        print(f"skipped at every number of ranks: {name}")
    counts["failed"] += len(never_run)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or any(statuses) else 0


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def rank_main(arguments: list[str]) -> int:
    """Run as one rank of a world, started by `main` through mpirun."""
    import pytest

    size = int(arguments[0])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    options = arguments[1:]
    if rank > 0:
        # Only rank 0 speaks on the terminal and writes the report; pytest takes over the
        # file descriptors, so they are exchanged before it starts.
        log = os.open(OUT / f"mpi-{size}-rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = [o for o in options if not re.match("--junitxml", o)]
    return int(
        pytest.main(
            [
                *("tests/conformance", "-m", "mpi", "--with-mpi", "--color=no"),
                *("-p", "no:cacheprovider", *options),
            ]
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank_main(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
