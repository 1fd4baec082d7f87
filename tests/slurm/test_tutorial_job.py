"""The program of the first tutorial, submitted as the page says, prints what is shown there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import programs
from cluster import Ending, SlurmCluster
from launcher import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("machines")]

PAGE = ROOT / "docs" / "tutorials" / "from-one-machine-to-slurm.md"
SECONDS = 90.0


def test_the_tutorial_s_program_trains_on_two_nodes_of_slurm(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    page = programs.read(PAGE)
    (tmp_path / "train.py").write_text(page.files["train.py"])
    submit, shown = page.sessions[-2:]
    assert shown.commands == ["tail -n 1 train-*.out"]
    assert shown.output is not None
    python, *words = submit.commands[0].split()
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=os.environ | slurm_cluster.environment(),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    job = int(done.stdout.split()[-1])
    ending = slurm_cluster.wait(job, SECONDS)
    (file,) = tmp_path.glob("train-*.out")
    assert ending == Ending("COMPLETED", 0), file.read_text()
    programs.compare(shown.commands, shown.output.splitlines(), file.read_text().splitlines()[-1:])
