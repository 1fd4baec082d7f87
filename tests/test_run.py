"""What a run of all tests does before them, what it leaves out, and what it says of itself."""

import os
import signal
import subprocess
import sys

import pytest

import reports
from launcher import ROOT, run
from reports import Case
from requirements import REQUIREMENTS, missing

TESTS = """
import pytest
from requirements import require

def test_that_passes():
    pass

def test_that_fails():
    assert False

@pytest.mark.parametrize("what", ["a::b", "[c]"])
@pytest.mark.parametrize("number", [1, 2])
def test_of_what_is_not_here(what, number):
    require("torch", "it is not installed")

def test_without_a_reason():
    pytest.skip("no time: torch: is only a word here")

@pytest.mark.xdist_group("machines")
@pytest.mark.parametrize("name", ["a@b"])
def test_of_a_group(name):
    pass

@pytest.mark.packages
def test_that_depends_on_packages():
    pass
"""

FILE_OF_SKIPS = """
from requirements import installed

torch = installed("torch")

def test_that_nobody_sees():
    pass
"""


@pytest.fixture
def outside(tmp_path):
    """Run pytest on files of its own, with our conftest; returns what it reports."""

    def outside(*arguments):
        folder = tmp_path / "tests"
        folder.mkdir(exist_ok=True)
        (folder / "test_some.py").write_text(TESTS)
        (folder / "test_whole.py").write_text(FILE_OF_SKIPS)
        # Stands for a package that is not there: `find_spec` finds none.
        (folder / "conftest.py").write_text(
            "import importlib.util\nfrom conftest_of_ours import *\n"
            "importlib.util.find_spec = lambda name: None\n"
        )
        (folder / "conftest_of_ours.py").write_text((ROOT / "tests" / "conftest.py").read_text())
        report = tmp_path / "alone.xml"
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider"]
        command += ["-n", "1", "--dist", "loadgroup", "-c", ROOT / "setup.cfg"]
        command += [f"--rootdir={tmp_path}", f"--junitxml={report}", *arguments]
        done = run([str(a) for a in command], timeout=100, cwd=tmp_path, PYTHONPATH=path,
                   UNISONO_REQUIRE="", UNISONO_TEST_WORLD="")  # fmt: skip
        assert report.exists(), done
        return {case.name: case for case in reports.read(report)}, report

    return outside


def test_skips_of_requirements_are_known_and_what_has_passed_is_left_out(outside):
    cases, report = outside()
    some = "tests.test_some::test_"
    outcomes = {name: (case.outcome, case.requirement) for name, case in cases.items()}
    assert outcomes == {
        f"{some}that_passes": ("passed", None),
        f"{some}that_fails": ("failed", None),
        f"{some}of_what_is_not_here[1-a::b]": ("skipped", "torch"),
        f"{some}of_what_is_not_here[1-[c]]": ("skipped", "torch"),
        f"{some}of_what_is_not_here[2-a::b]": ("skipped", "torch"),
        f"{some}of_what_is_not_here[2-[c]]": ("skipped", "torch"),
        f"{some}without_a_reason": ("skipped", None),
        f"{some}of_a_group[a@b]": ("passed", None),
        f"{some}that_depends_on_packages": ("passed", None),
        "tests.test_whole": ("skipped", "torch"),
    }
    again, _ = outside(f"--without={report.rename(report.with_name('before.xml'))}")
    assert cases.keys() - again.keys() == {f"{some}that_passes", f"{some}of_a_group[a@b]"}


def test_a_group_of_tests_stays_together(tmp_path):
    # What needs a machine for itself depends on it; a release of pytest ended it without a word.
    (tmp_path / "test_some.py").write_text(
        "import os, pathlib, time, pytest\n"
        "@pytest.mark.xdist_group('machines')\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_of_a_group(number):\n"
        "    time.sleep(0.1)  # so that the other worker has nothing to do\n"
        "    pathlib.Path(f'{number}.worker').write_text(os.environ['PYTEST_XDIST_WORKER'])\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "."]
    run(command, timeout=100, cwd=tmp_path, UNISONO_TEST_WORLD="").checked()
    workers = [file.read_text() for file in tmp_path.glob("*.worker")]
    assert len(workers) == 6
    assert len(set(workers)) == 1, workers


def test_a_test_that_is_skipped_everywhere_says_what_it_requires_or_is_a_fault():
    cases = [
        Case("alone", "a::needs_four[2 threads]", "skipped"),
        Case("alone", "a::needs_four[5 threads]", "passed"),
        Case("alone", "a::never[1]", "skipped"),
        Case("alone", "a::never[2]", "skipped"),
        Case("mpi-1", "b::needs_two[x]", "skipped"),
        Case("mpi-2", "b::needs_two[x]", "passed"),
        Case("mpi-1", "b::needs_two[y]", "skipped"),
        Case("mpi-2", "b::needs_two[y]", "skipped"),
        Case("mpi-1", "b::chosen[mpi-shared-z]", "skipped"),
        Case("mpi-2", "b::chosen[mpi-messages-z]", "passed"),
        Case("mpi-1", "b::tensors", "skipped"),
        Case("mpi-2", "b::tensors", "skipped", "torch"),
        Case("mpi-2", "c", "skipped", "jax"),
    ]
    summary = reports.summary(cases)
    assert summary.counts == {"passed": 3, "skipped": 10}
    assert summary.untested == {"jax", "torch"}
    assert summary.faults == ["skipped everywhere: a::never", "skipped everywhere: b::needs_two[y]"]


def test_what_the_first_of_two_runs_skipped_runs_in_the_second():
    before = [
        Case("alone", "a::kept", "passed"),
        Case("alone", "a::tensors", "skipped", "torch"),
        Case("alone", "a::lost[1]", "skipped", "slurm"),
        Case("alone", "a::lost[2]", "passed"),
        Case("alone", "b", "skipped", "jax"),
        Case("alone", "gpu::x", "skipped", "gpu"),
    ]
    cases = [
        Case("alone", "a::tensors", "passed"),
        Case("alone", "b::of_jax", "passed"),
        Case("alone", "gpu::x", "skipped", "gpu"),
    ]
    summary = reports.summary(cases, before)
    assert summary.faults == ["skipped in both runs: a::lost[1] (slurm)"]
    assert summary.untested == {"gpu", "slurm"}
    assert reports.left_out(cases, before) == 2


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/unit/test_a.py::test_b", "tests.unit.test_a::test_b"),
        ("tests/test_a.py::C::test_b[x::y/z.py]", "tests.test_a.C::test_b[x::y/z.py]"),
    ],
)
def test_names_are_those_of_the_reports(test, name):
    assert reports.name_of(test) == name


def test_only_the_names_of_requirements_are_marks():
    assert [missing(f"{name}: it is not here") for name in REQUIREMENTS] == list(REQUIREMENTS)
    assert missing("('tests/a.py', 3, 'Skipped: torch: torch is not installed')") == "torch"
    assert missing("needs 4 ranks") is None
    assert missing("needs: more") is None


def test_what_every_first_call_needs_is_compiled_before_the_tests(tmp_path):
    # On a busy machine it has taken longer than the 20 s that a rank waits for another one.
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    run(
        [*command, "tests/test_floors.py"], timeout=110, NUMBA_CACHE_DIR=str(tmp_path),
        UNISONO_TEST_WORLD="",
    ).checked()  # fmt: skip
    files = [file.name for file in tmp_path.rglob("*.o")]
    for kind in ("one_shot", "direct", "pipelined", "one_shot_copy", "shared"):
        assert any(name.startswith(f"reduce_kernels.{kind}") for name in files), (kind, files)


# A run whose child starts a process in another session, like the programs of tests.
STARTED = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import run
run.end_children_on_signals()
program = "print('started', flush=True); import time; time.sleep(60)"
child = (
    "import subprocess, sys;"
    f"subprocess.run([sys.executable, '-c', {program!r}], start_new_session=True)"
)
subprocess.run([sys.executable, "-c", child])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_run_ends_the_programs_of_its_tests(number):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(ROOT / "tests")],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.communicate(timeout=30)[0] == ""  # no process can still write there
        assert process.returncode == -number
    finally:
        if process.poll() is None:
            process.kill()
