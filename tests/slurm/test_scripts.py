"""The other batch scripts of slurm/, and that of `submit`, on a real Slurm of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from configuration import GPUS

import strategies
from cluster import Ending, SlurmCluster
from pairwise import also
from requirements import needs

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("machines")]

CHECKOUT = Path(__file__).resolve().parents[2]
JOB_SECONDS = 90.0  # one takes some seconds; the machine may be busy
EPOCHS = 40
# The job waits so long at this epoch, the third after a checkpoint: a busy Slurm takes some seconds
# to ask it to go, in which it would have trained to its end.
PAUSE = "step=12,rank=0,kind=slow:15"
HERE = {"UNISONO_CHECKOUT": str(CHECKOUT), "UNISONO_VENV": sys.prefix}


def accuracies(output: str) -> list[float]:
    return [float(word) for word in re.findall(r"accuracy on the held-out digits: (\S+)", output)]


@pytest.mark.parametrize(
    ("script", "launcher", "arguments"),
    [
        ("parameter_server", "mpirun", ["--scale", "--epochs", "15"]),
        ("spare_replicas", "srun --mpi=pmix", []),
        also("parameter_server", "srun --mpi=pmix", ["--scale", "--epochs", "15"]),
        also("spare_replicas", "mpirun", []),
    ],
)
def test_it_trains_the_digits_on_two_nodes(
    slurm_cluster: SlurmCluster, tmp_path: Path, script: str, launcher: str, arguments: list[str]
) -> None:
    job = slurm_cluster.submit(
        CHECKOUT / "slurm" / f"{script}.sbatch", *arguments,
        nodes=2, ntasks_per_node=2, cwd=tmp_path, env=HERE | {"UNISONO_LAUNCHER": launcher},
    )  # fmt: skip
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output
    (accuracy,) = accuracies(output)
    assert accuracy >= 0.96, output


def test_those_that_live_train_to_the_end_when_a_rank_dies(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    given = {
        "UNISONO_PROGRAM": str(CHECKOUT / "examples" / "elastic_digits.py"),
        "UNISONO_MPIRUN_OPTIONS": "--with-ft ulfm",
        "UNISONO_FAULT": "step=40,rank=0,kind=kill",
    }
    job = slurm_cluster.submit(
        CHECKOUT / "slurm" / "train.sbatch",
        "--epochs", "12", "--checkpoints", str(tmp_path / "out"),
        nodes=2, ntasks_per_node=2, cwd=tmp_path, env=HERE | given,
    )  # fmt: skip
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output
    assert "3 of 4 ranks; each row was used 12 to 12 times" in output
    (accuracy,) = accuracies(output)
    assert accuracy >= 0.96, output


@pytest.mark.parametrize("launcher", ["mpirun", also("srun --mpi=pmix")])
def test_a_sweep_trains_once_for_each_task_of_the_array(
    slurm_cluster: SlurmCluster, tmp_path: Path, launcher: str
) -> None:
    job = slurm_cluster.submit(
        CHECKOUT / "slurm" / "sweep.sbatch", "--epochs", "20", array="1-2", cwd=tmp_path,
        env=HERE | {"UNISONO_LAUNCHER": launcher}, output=f"{tmp_path}/%a.out",
    )  # fmt: skip
    for task in ("1", "2"):
        results = tmp_path / f"runs/sweep-{job}/{task}"
        ending = slurm_cluster.wait(f"{job}_{task}", JOB_SECONDS)
        output = (tmp_path / f"{task}.out").read_text()
        assert ending == Ending("COMPLETED", 0), output
        assert accuracies(output)[0] >= 0.95, output
        assert len(strategies.session.read_metrics(results / "metrics.jsonl")) == 20
    first, second = (
        strategies.session.read_metrics(tmp_path / f"runs/sweep-{job}/{task}/metrics.jsonl")
        for task in "12"
    )
    assert first[-1]["loss"] != second[-1]["loss"], "another learning rate each"


@pytest.mark.parametrize("launcher", ["mpirun", also("srun --mpi=pmix")])
def test_a_rank_for_each_gpu(slurm_cluster: SlurmCluster, tmp_path: Path, launcher: str) -> None:
    needs("torch")
    script, env = CHECKOUT / "slurm" / "gpu.sbatch", HERE | {"UNISONO_LAUNCHER": launcher}
    job = slurm_cluster.submit(script, cwd=tmp_path, env=env)
    wrong = slurm_cluster.submit(script, cwd=tmp_path, env=env, nodes=2, ntasks=GPUS + 1)
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    assert ending == Ending("COMPLETED", 0), slurm_cluster.output(job)
    assert accuracies(slurm_cluster.output(job))[0] >= 0.96
    assert slurm_cluster.wait(wrong, JOB_SECONDS) == Ending("FAILED", 2)
    assert f"got 1 ranks and {GPUS} GPUs on n2" in slurm_cluster.output(wrong)


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("mpirun", {"gpus": 2 * GPUS}),
        ("mpirun", {"gpus_per_task": 1}),
        ("srun --mpi=pmix", {"gpus_per_task": 1}),
    ],
)
def test_every_rank_sees_the_gpus_of_its_node(
    slurm_cluster: SlurmCluster, tmp_path: Path, launcher: str, options: dict[str, int]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.gather(os.environ['CUDA_VISIBLE_DEVICES']))\n"
    )
    job = slurm_cluster.submit(
        CHECKOUT / "slurm" / "train.sbatch", nodes=2, ntasks_per_node=GPUS, cwd=tmp_path,
        env=HERE | {"UNISONO_PROGRAM": str(program), "UNISONO_LAUNCHER": launcher}, **options,
    )  # fmt: skip
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output
    assert f"\n{2 * GPUS * [','.join(map(str, range(GPUS)))]}\n" in output


def test_a_job_that_was_preempted_and_requeued_ends_with_the_bits_of_one_that_was_not(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """By the script that `submit` writes, which is that of train.sbatch in small.

    A job of higher priority wants all of both nodes: Slurm asks this one to go.
    """
    needs("torch")
    folders = [tmp_path / "preempted", tmp_path / "whole"]
    preempted = train_on_both_nodes(slurm_cluster, folders[0], UNISONO_FAULT=PAUSE)
    checkpoint = folders[0] / "out/step-000010"
    slurm_cluster.until("a checkpoint", lambda: checkpoint.exists() or None, JOB_SECONDS, preempted)
    urgent = slurm_cluster.submit(
        script_of(tmp_path, "exit 0"), partition="urgent", nodes=2, exclusive=True
    )
    slurm_cluster.wait_field(preempted, "JobState", "PENDING", JOB_SECONDS)
    assert slurm_cluster.field(preempted, "Restarts") == "1"
    early = strategies.CheckpointManager(folders[0] / "out").restore_or_none()
    assert early is not None
    assert 10 <= early.step < EPOCHS, "stopped in the middle"
    assert slurm_cluster.wait(urgent, JOB_SECONDS) == Ending("COMPLETED", 0)

    slurm_cluster.start_again(preempted)
    jobs = preempted, train_on_both_nodes(slurm_cluster, folders[1])
    outputs = []
    for job in jobs:
        ending = slurm_cluster.wait(job, JOB_SECONDS)
        outputs.append(slurm_cluster.output(job))
        assert ending == Ending("COMPLETED", 0), outputs[-1] + slurm_cluster.logs(30)
    ends = [strategies.CheckpointManager(folder / "out").restore_or_none() for folder in folders]
    assert all(end is not None and end.step == EPOCHS for end in ends)
    first, second = (end.tensors for end in ends if end is not None)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.tobytes() == second[name].tobytes(), name
    assert accuracies(outputs[0]) == accuracies(outputs[1])


def train_on_both_nodes(slurm_cluster: SlurmCluster, folder: Path, **given: str) -> int:
    """Submit examples/torch_digits.py with one rank on each node; checkpoints go to folder/out."""
    folder.mkdir()
    # Ranks of other numbers add in another order: both jobs have one on each node.
    done = subprocess.run(
        [sys.executable, "-m", "strategies", "submit", CHECKOUT / "examples" / "torch_digits.py",
         "--nodes", "2", f"--sbatch=--output={slurm_cluster.directory}/out/%j", "--",
         "--checkpoints", "out", "--epochs", str(EPOCHS)],
        cwd=folder, env=os.environ | slurm_cluster.environment() | given, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return int(done.stdout.split()[-1])


def script_of(folder: Path, line: str) -> Path:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    return script
