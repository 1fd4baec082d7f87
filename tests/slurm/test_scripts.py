"""The other batch scripts of slurm/ on a real Slurm of two nodes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import strategies
from cluster import Ending, SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("machines")]

CHECKOUT = Path(__file__).resolve().parents[2]
JOB_SECONDS = 90.0  # one takes some seconds; the machine may be busy
HERE = {"UNISONO_CHECKOUT": str(CHECKOUT), "UNISONO_VENV": sys.prefix}


def accuracies(output: str) -> list[float]:
    return [float(word) for word in re.findall(r"accuracy on the held-out digits: (\S+)", output)]


@pytest.mark.parametrize(
    ("script", "ranks", "arguments"),
    [
        ("spare_replicas", 2, []),
    ],
)
def test_it_trains_the_digits_on_two_nodes(
    slurm_cluster: SlurmCluster, tmp_path: Path, script: str, ranks: int, arguments: list[str]
) -> None:
    job = slurm_cluster.submit(
        CHECKOUT / "slurm" / f"{script}.sbatch", *arguments,
        nodes=2, ntasks_per_node=ranks, cwd=tmp_path, env=HERE,
    )  # fmt: skip
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output
    (accuracy,) = accuracies(output)
    assert accuracy >= 0.96, output


def test_a_sweep_trains_once_for_each_task_of_the_array(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = slurm_cluster.submit(
        CHECKOUT / "slurm" / "sweep.sbatch", "--epochs", "20", array="1-2", cwd=tmp_path, env=HERE,
        output=f"{tmp_path}/%a.out",
    )  # fmt: skip
    for task in ("1", "2"):
        results = tmp_path / f"runs/sweep-{job}/{task}"
        ending = slurm_cluster.wait(f"{job}_{task}", JOB_SECONDS)
        output = (tmp_path / f"{task}.out").read_text()
        assert ending == Ending("COMPLETED", 0), output
        assert accuracies(output)[0] >= 0.95, output
        assert len(strategies.training.read_metrics(results / "metrics.jsonl")) == 20
    first, second = (
        strategies.training.read_metrics(tmp_path / f"runs/sweep-{job}/{task}/metrics.jsonl")
        for task in "12"
    )
    assert first[-1]["loss"] != second[-1]["loss"], "another learning rate each"
