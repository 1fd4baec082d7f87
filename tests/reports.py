"""What the reports of a run say: which tests passed, which never ran, and what that depends on."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import requirements

# What machines without a GPU leave to others: `make test-gpu` requires it.
_ELSEWHERE = {"gpu"}


class Case(NamedTuple):
    """What became of one test in one world."""

    world: str  # name of the report
    name: str  # "tests.unit.test_a::test_b[c]"; "tests.unit.test_a" if the whole file was skipped
    outcome: str  # "passed", "failed" or "skipped"
    requirement: str | None = None  # that a skip names

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def under_mpi(self) -> bool:
        return self.world.startswith("mpi")


def read(report: Path) -> Iterator[Case]:
    """Read a report in JUnit's XML."""
    for case in ElementTree.parse(report).iter("testcase"):
        # A test that shares its process with its group has "@group" behind its name.
        name = re.sub(r"@[\w-]+$", "", case.get("name", ""))
        place = case.get("classname")
        outcome, requirement = "passed", None
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
            elif child.tag == "skipped":
                outcome = "skipped"
                requirement = _requirement(child)
        yield Case(report.stem, f"{place}::{name}" if place else name, outcome, requirement)


def _requirement(skip: ElementTree.Element) -> str | None:
    return requirements.missing(skip.get("message", "")) or requirements.missing(skip.text or "")


def name_of(test: str) -> str:
    """Return the name that a report gives to a test, of what pytest calls it."""
    path, bracket, parameters = test.partition("[")
    file, *rest = path.split("::")
    place = [file.removesuffix(".py").replace("/", "."), *rest[:-1]]
    return f"{'.'.join(place)}::{rest[-1]}{bracket}{parameters}"


def passed(report: Path) -> set[str]:
    """Return the names of the tests that passed, and did not fail later."""
    cases = list(read(report))
    failed = {case.name for case in cases if case.outcome == "failed"}
    return {case.name for case in cases if case.outcome == "passed"} - failed


class Summary(NamedTuple):
    """What all worlds together say."""

    counts: Counter[str]  # of the outcomes
    untested: set[str]  # requirements of tests that ran nowhere
    faults: list[str]  # tests that ran nowhere and should have


def summary(cases: Iterable[Case], before: Iterable[Case] = ()) -> Summary:
    """Add up a run, or the second of two of which each leaves out what the other has tested.

    A test may be skipped in some worlds: with fewer ranks than it needs, or beside other parameters
    that need threads. Skipped everywhere, it says what it requires, or it is a fault. After two
    runs only what needs another machine may be left.

    Args:
        cases: of the run.
        before: of the first run, if this is the second.
    """
    cases, before = list(cases), list(before)
    everything = [*cases, *before]
    ran = {(case.under_mpi, case.file) for case in everything if case.outcome != "skipped"}
    left = [case for case in everything if (case.under_mpi, case.name) not in ran]
    requirements_of = {
        test: {case.requirement for case in group if case.requirement}
        for test, group in _skipped_everywhere(left, _test).items()
    }
    faults = [
        f"skipped everywhere: {name}"
        for (_, name), group in _skipped_everywhere(left, _function).items()
        if not any(case.requirement for case in group)
    ]
    untested = set().union(*requirements_of.values())
    if before:
        faults += [
            f"skipped in both runs: {name} ({', '.join(sorted(names))})"
            for (_, name), names in requirements_of.items()
            if names - _ELSEWHERE
        ]
    return Summary(Counter(case.outcome for case in cases), untested, sorted(faults))


def left_out(cases: Iterable[Case], before: Iterable[Case]) -> int:
    """Count what passed in the first of two runs, and was not repeated in the second."""
    repeated = {(case.world, case.name) for case in cases}
    return len({(c.world, c.name) for c in before if c.outcome == "passed"} - repeated)


def _skipped_everywhere(
    cases: Iterable[Case], key: Callable[[Case], tuple[bool, str]]
) -> dict[tuple[bool, str], list[Case]]:
    groups = defaultdict(list)
    for case in cases:
        groups[key(case)].append(case)
    return {
        name: group
        for name, group in groups.items()
        if all(case.outcome == "skipped" for case in group)
    }


def _test(case: Case) -> tuple[bool, str]:
    """What is one test: the same parameters, with any number of MPI ranks and kind of world."""
    return case.under_mpi, re.sub(r"\bmpi-(messages|shared)\b", "mpi", case.name)


def _function(case: Case) -> tuple[bool, str]:
    """As `_test`, but where ranks are threads their number is a parameter, too."""
    return _test(case) if case.under_mpi else (False, case.name.partition("[")[0])
