"""The commands and the launch guard under MPI libraries beside the first one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher import library_beside, mpirun, mpirun_path, run
from requirements import require

NAMES = {"mpich": "MPICH", "impi": "Intel MPI"}


class Library(NamedTuple):
    name: str
    launcher: Path
    found_by: dict[str, str]

    def start(self, *arguments, launching=(), **extra):
        """Run Python on two ranks that this library starts."""
        python = sys.executable, *map(str, arguments)
        command = [str(self.launcher), *launching, "-np", "2", *python]
        return run(command, timeout=110, **extra)

    def says(self, *command):
        """What a command of ours prints where it loads this library."""
        return self.start("-m", "collectives", *command, **self.found_by).checked().stdout


@pytest.fixture(params=NAMES)
def library(request):
    there = library_beside(request.param)
    if there is None:
        require(request.param, f"{NAMES[request.param]} is not beside the interpreter")
    return Library(NAMES[request.param], *there)


def test_info_tells_the_library_and_no_settings_of_another_one(library):
    text = library.says("info")
    line = next(line for line in text.splitlines() if line.startswith("mpi library"))
    assert library.name.split()[0] in line
    assert "OMPI_MCA" not in text


def test_check_passes(library):
    assert library.says("check").endswith("all well\n")


def test_bench_names_the_library_as_its_peer(library, tmp_path):
    library.says("bench", "--sizes", "8,64K", "--json", tmp_path / "figures.json")
    name = json.loads((tmp_path / "figures.json").read_text())["names"]["native"]
    assert re.fullmatch(rf"{library.name} \d+\.\d+.*", name)


def test_check_reports_a_machine_that_the_list_of_hosts_names_twice(library):
    text = """if True:
        import collectives
        from collectives.tools import environment
        print(environment.nodes(collectives.init()))
    """
    hosts = ("-hosts", "localhost,127.0.0.1", "-ppn", "1")
    result = library.start("-c", text, launching=hosts, **library.found_by).checked()
    told = "verdict='note', text='ranks 0 and 1 run on one machine, but on different nodes of MPI"
    assert result.stdout.count(told) == 2, result


def test_python_that_loads_it_under_open_mpi_warns_before_mpi_stops(library):
    if "Open MPI" not in run([mpirun_path(), "--version"], timeout=30).stdout:
        require("ulfm", "Python loads another library than Open MPI")
    program = ("-c", "import collectives; collectives.init()")
    result = mpirun(2, *program, timeout=100, **library.found_by)
    assert "init: mpirun belongs to Open MPI, but Python loaded" in result.stderr, result


def test_a_second_library_in_the_process_is_named(library):
    if "Open MPI" not in run([mpirun_path(), "--version"], timeout=30).stdout:
        require("ulfm", "Python loads another library than Open MPI")
    second = library.found_by["MPI4PY_LIBMPI"]
    program = f"import ctypes, collectives; ctypes.CDLL({second!r}); collectives.init()"
    result = mpirun(2, "-c", program, timeout=100).checked()
    assert result.stderr.count("init: this process has loaded 2 MPI libraries, ") == 1, result
    assert second[: second.rindex("/")] in result.stderr


def test_its_launcher_is_refused_where_python_loads_open_mpi(library):
    if "Open MPI" not in run([mpirun_path(), "--version"], timeout=30).stdout:
        require("ulfm", "Python loads another library than Open MPI")
    result = library.start("-c", "import collectives; collectives.init()")
    told = f"LaunchError: init: mpirun of {library.name} started 2 processes (PMI_SIZE=2)"
    assert told in result.stderr, result
    assert "another MPI" in result.stderr
    assert result.status != 0
