"""The commands and the launch guard under MPI libraries beside the first one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher import mpirun_path, run
from requirements import require

NAMES = {"mpich": "MPICH", "impi": "Intel MPI"}


@pytest.fixture(params=NAMES)
def home(request):
    """Where a library stands."""
    folder = Path(sys.prefix) / request.param
    if not (folder / "bin" / "mpiexec").exists():
        require(request.param, f"there is none in {folder}")
    return folder


def start(home, size, *arguments, **extra):
    command = [str(home / "bin" / "mpiexec"), "-np", str(size), sys.executable]
    return run([*command, *map(str, arguments)], timeout=110, **extra)


def under(home, *command):
    """Run a command of ours on two ranks that load the library."""
    loaded = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.12")}
    result = start(home, 2, "-m", "collectives", *command, **loaded)
    assert result.status == 0, result
    return result.stdout


def test_info_tells_the_library_and_no_settings_of_another_one(home):
    text = under(home, "info")
    line = next(line for line in text.splitlines() if line.startswith("mpi library"))
    assert NAMES[home.name].split()[0] in line
    assert "OMPI_MCA" not in text


def test_check_passes(home):
    assert under(home, "check").endswith("all well\n")


def test_bench_names_the_library_as_its_peer(home, tmp_path):
    under(home, "bench", "--sizes", "8,64K", "--json", tmp_path / "figures.json")
    name = json.loads((tmp_path / "figures.json").read_text())["names"]["native"]
    assert name.startswith(f"{NAMES[home.name]} "), name
    assert name.split()[-1][0].isdigit(), name


def test_its_launcher_is_refused_where_python_loads_open_mpi(home, tmp_path):
    if "Open MPI" not in run([mpirun_path(), "--version"], timeout=30).stdout:
        require("ulfm", "Python loads another library than Open MPI")
    result = start(home, 2, "-c", "import collectives; collectives.init()")
    told = f"LaunchError: init: mpirun of {NAMES[home.name]} started 2 processes (PMI_SIZE=2)"
    assert told in result.stderr, result
    assert "another MPI" in result.stderr
    assert result.status != 0
