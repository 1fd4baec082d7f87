"""The programs that people copy, run as they would run them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import strategies
from launcher import ROOT, asked_to_stop, complaints, environment, mpirun, mpirun_path, run
from limits import Limit, output_of
from pairwise import also
from requirements import needs

TRAIN = ROOT / "examples" / "train_digits.py"


def accuracy_of(stdout):
    line = next(t for t in stdout.splitlines() if t.startswith("accuracy on the held-out digits"))
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("size", [also(1), also(2), 3])
def test_the_main_job_learns_the_digits(tmp_path, size):
    # A path with a space, and more ranks than cores.
    data, output = tmp_path / "the data", tmp_path / "the results"
    result = mpirun(size, TRAIN, "--data-dir", data, "--output-dir", output, timeout=100).checked()
    assert accuracy_of(result.stdout) >= 0.96
    assert f"{size} rank" in result.stdout
    assert "samples per second" in result.stdout
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = strategies.session.read_metrics(output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 41))
    assert metrics[-1]["loss"] < 0.1 * metrics[0]["loss"]
    if size == 2:  # another processor may round otherwise
        assert metrics[-1]["loss"] == pytest.approx(0.01111, rel=0.02)
    (newest,) = [
        p for p in (output / "checkpoints").iterdir() if p.name == f"step-{metrics[-1]['step']:06d}"
    ]
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["step"] == metrics[-1]["step"]
    assert (newest / "rank-00000.safetensors").stat().st_size > 4 * (64 * 96 + 96 * 10)
    progress = [line for line in result.stderr.splitlines() if line.startswith("epochs: ")]
    assert "40/40 (100%)" in progress[-1]
    # Nothing else that a user would wonder about.
    assert len(complaints(result)) == len(progress), result.stderr


def test_a_script_for_horovod_runs_with_another_import():
    needs("torch", "sklearn")
    result = mpirun(2, ROOT / "examples" / "horovod_digits.py", timeout=100).checked()
    assert accuracy_of(result.stdout) >= 0.97


LIBRARIES = pytest.mark.parametrize(
    ("library", "packages"), [("torch", ["torch"]), ("jax", ["jax", "optax"])]
)


def program_of(library, packages):
    needs(*packages, "sklearn")
    return ROOT / "examples" / f"{library}_digits.py"


def learns(program, size, folder, *options):
    """Let a program of another library learn the digits on some ranks."""
    result = mpirun(size, program, "--checkpoints", folder, *options, timeout=110).checked()
    assert accuracy_of(result.stdout) >= 0.96
    # Every rank learns, and one of them reports.
    assert result.stdout.count("accuracy") == 1


# 2 ranks are in the next test.
@pytest.mark.parametrize("size", [also(1), 3, also(4)])
@LIBRARIES
def test_programs_of_other_libraries_become_distributed_by_three_lines(
    tmp_path, library, packages, size
):
    program = program_of(library, packages)
    marked = re.findall(r"  # (\d): ", program.read_text())
    assert marked == ["1", "2", "3"]
    learns(program, size, tmp_path)


@LIBRARIES
def test_programs_of_other_libraries_stop_when_asked_to_and_resume_with_the_same_bits(
    tmp_path, library, packages
):
    program = program_of(library, packages)
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    result = asked_to_stop(2, program, "--checkpoints", parts, "--epochs", "100000", saves=parts)
    assert result.status == 85, result
    epochs = strategies.CheckpointManager(parts).restore_or_none().step + 14
    learns(program, 2, parts, "--resume", "--epochs", epochs)
    # Asked to resume before there is anything: as a job that is requeued early.
    learns(program, 2, whole, "--resume", "--epochs", epochs)
    ends = [strategies.CheckpointManager(folder).restore_or_none() for folder in (whole, parts)]
    assert [end.step for end in ends] == [epochs, epochs]
    assert list(ends[0].tensors) == list(ends[1].tensors)
    assert len(ends[0].tensors) > 4, "slots of the optimizer, too"
    for name, tensor in ends[0].tensors.items():
        assert tensor.tobytes() == ends[1].tensors[name].tobytes(), name


def test_resume_goes_on_with_another_number_of_ranks(tmp_path):
    arguments = [TRAIN, "--data-dir", tmp_path / "data", "--output-dir", tmp_path / "out"]
    assert mpirun(2, *arguments, "--epochs", 10, timeout=100).status == 0
    result = mpirun(3, *arguments, "--epochs", 20, "--resume", timeout=100).checked()
    assert "20/20 (100%)" in result.stderr
    assert accuracy_of(result.stdout) >= 0.96
    metrics = strategies.session.read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 21))
    again = mpirun(1, *arguments, "--epochs", 20, "--resume", timeout=100).checked()
    assert accuracy_of(again.stdout) == accuracy_of(result.stdout)


def test_the_main_job_wants_an_epoch(tmp_path):
    arguments = ["--data-dir", tmp_path / "data", "--output-dir", tmp_path / "out", "--epochs", 0]
    result = mpirun(1, TRAIN, *arguments, timeout=100)
    assert result.status == 2
    assert "--epochs: expected at least 1, got 0" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_signal_of_the_batch_system_leaves_a_checkpoint_to_go_on_from(tmp_path):
    arguments = ["--data-dir", str(tmp_path / "data"), "--output-dir", str(tmp_path / "out")]
    command = [mpirun_path(), "-np", "2", sys.executable, str(TRAIN), *arguments]
    process = subprocess.Popen(
        [*command, "--epochs", "100000"], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        limit = Limit(60)
        while not metrics.exists() or not metrics.read_text():
            assert limit.left(), "training has not begun"
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = output_of(process, 60)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == 85, (stdout, stderr)
    epochs = strategies.session.read_metrics(metrics)[-1]["step"]
    result = mpirun(2, TRAIN, *arguments, "--epochs", epochs + 5, "--resume", timeout=60)
    assert f"{epochs + 5}/{epochs + 5} (100%)" in result.stderr


@pytest.mark.packages
def test_info_describes_the_world():
    result = mpirun(3, "-m", "collectives", "info", "--json", CUDA_VISIBLE_DEVICES="0,2")
    facts = json.loads(result.stdout)
    assert facts["ranks"] == 3
    assert list(facts["nodes"].values()) == [3]
    assert facts["thread_level"] == "multiple"
    assert facts["cuda_aware"] in (True, False)
    assert facts["fault_tolerance"] is False
    assert facts["gpus"] == "0,2 on ranks 0 1 2"
    assert set(facts["packages"]) == {"numpy", "mpi4py", "numba", "cupy", "torch", "jax"}
    assert facts["packages"]["numpy"]
    table = run([sys.executable, "-m", "collectives", "info"], timeout=60).stdout
    assert "mpi library" in table
    assert "fault tolerance  no: a dead rank ends this job" in table
    assert "ranks            1" in table


@pytest.mark.parametrize("backend", ["unisono", also("gloo")])
@pytest.mark.parametrize("name", ["torch_ddp_digits", "torch_fsdp_digits"])
def test_by_the_name_of_the_backend_scripts_recognise_digits(tmp_path, name, backend):
    needs("torch", "sklearn")
    script = (ROOT / "examples" / f"{name}.py").read_text()
    assert script.count('init_process_group("unisono")  # the line that changed') == 1
    program = tmp_path / "script.py"
    program.write_text(script.replace('group("unisono")', f'group("{backend}")'))
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    result = mpirun(2, program, timeout=100, PYTHONPATH=path).checked()
    assert accuracy_of(result.stdout) >= 0.97
