"""The batch script that `python -m strategies submit` writes."""

from __future__ import annotations

import os
import subprocess

import pytest

from launcher import ROOT
from strategies.__main__ import main
from strategies.elastic.preemption import STOPPED_EARLY

# What Slurm says to a batch script.
JOB = {
    "SLURM_NTASKS": "3",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
}


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "my train.py"
    file.write_text("")
    return file


def script(capsys, *arguments):
    assert main(["submit", *map(str, arguments), "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_script_says_what_was_asked_for(program, capsys):
    text = script(capsys, program, "--nodes", 2, "--ranks-per-node", 4, "--gpus-per-node", 4,
                  "--time", "04:00:00", "--sbatch=--partition=long")  # fmt: skip
    assert "# nodes x ranks x GPUs: 2 x 4 x 4; " in text
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert options == [
        "--job-name=my-train", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=1",
        "--output=%x-%j.out", "--open-mode=append", "--signal=B:USR1@120", "--requeue",
        "--gpus-per-node=4", "--time=04:00:00", "--partition=long",
    ]  # fmt: skip
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_script_runs_the_program_and_hands_on_its_arguments(program, tmp_path, capsys):
    assert main(["submit", str(program), "--dry-run", "--", "--name", "two words", "$HOME"]) == 0
    text = capsys.readouterr().out
    for restarts in ("0", "1"):
        words = words_of_mpirun(text, tmp_path, SLURM_RESTART_COUNT=restarts)
        assert words[:4] == ["--bind-to", "none", "-n", "3"]
        assert words[5:] == [str(program), "--name", "two words", "$HOME"] + (
            ["--resume"] if restarts == "1" else []
        )


def words_of_mpirun(text, tmp_path, **variables):
    """Run a script with an mpirun that prints its arguments."""
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/bash\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    lines = [f"mpirun={fake}" if t.startswith("mpirun=") else t for t in text.splitlines()]
    done = subprocess.run(
        ["bash"], input="\n".join(lines), text=True, capture_output=True, timeout=30,
        env=os.environ | JOB | {"SLURM_SUBMIT_DIR": str(tmp_path)} | variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout.split("\n")[1].split("|")[:-1]


def test_a_resumed_job_is_not_told_twice(program, tmp_path, capsys):
    assert main(["submit", str(program), "--dry-run", "--", "--resume"]) == 0
    text = capsys.readouterr().out
    words = words_of_mpirun(text, tmp_path, SLURM_RESTART_COUNT="1")
    assert words[5:] == [str(program), "--resume"]


def test_an_elastic_job_outlives_its_ranks(program, tmp_path, capsys):
    plain, elastic = script(capsys, program), script(capsys, program, "--elastic")
    ulfm = ["--bind-to", "none", "--with-ft", "ulfm", "-n"]
    assert words_of_mpirun(plain, tmp_path)[:3] == ["--bind-to", "none", "-n"]
    assert words_of_mpirun(elastic, tmp_path)[:5] == ulfm
    variable = {"UNISONO_MPIRUN_OPTIONS": "--with-ft ulfm"}
    assert words_of_mpirun(plain, tmp_path, **variable)[:5] == ulfm


def test_it_says_that_mpirun_is_missing(program, tmp_path, capsys):
    lines = [
        "mpirun=$(type -P no-such-mpirun) ||" + t.partition("||")[2]
        if t.startswith("mpirun=")
        else t
        for t in script(capsys, program).splitlines()
    ]
    done = subprocess.run(
        ["bash"], input="\n".join(lines), text=True, capture_output=True, timeout=30,
        env=os.environ | JOB | {"SLURM_SUBMIT_DIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "submit: no mpirun on PATH. Load the MPI module before sbatch" in done.stderr


def test_it_ends_as_the_script_of_the_checkout(program, capsys):
    of_checkout = (ROOT / "slurm" / "train.sbatch").read_text()
    beginning = "# Slurm sends SIGTERM to a preempted job"
    found = [
        beginning + text.partition(beginning)[2] for text in (of_checkout, script(capsys, program))
    ]
    assert found[0] == found[1]
    assert len(found[0].splitlines()) > 40
    assert f"((status == {STOPPED_EARLY}))" in found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes=0"], "argument --nodes: expected an integer >= 1, got '0'"),
        (["--gpus-per-node=-1"], "argument --gpus-per-node: expected an integer >= 0, got '-1'"),
        (["--gpus-per-node=2"], "expected --gpus-per-node 0 or equal to --ranks-per-node, got 2"),
        (["--time=abc"], "submit: bad --time, expected minutes or [days-]hours:minutes:seconds"),
        (["--time="], "got ''"),
        (["--time=4h"], "got '4h'"),
        (["--time=1:2:3:4"], "got '1:2:3:4'"),
        (["--time=1\n#SBATCH --nodes=9"], "bad --time"),
        (["--sbatch=long"], "expected a long option of sbatch, such as --partition=long"),
    ],
)
def test_mistakes_are_named(program, capsys, options, message):
    try:
        status = main(["submit", str(program), *options, "--dry-run"])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "limit", ["90", "90:30", "04:00:00", "2-12", "2-12:30", "2-12:30:00", "unlimited"]
)
def test_the_formats_of_slurm_for_a_time_limit(program, capsys, limit):
    assert f"#SBATCH --time={limit}\n" in script(capsys, program, "--time", limit)


def test_no_program(tmp_path, capsys):
    assert main(["submit", str(tmp_path / "none.py"), "--dry-run"]) == 2
    assert "submit: no program, expected a file, got" in capsys.readouterr().err


def test_without_slurm_it_says_what_to_do(program, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", str(program)]) == 2
    assert "no sbatch here, expected a login node of Slurm" in capsys.readouterr().err


def test_what_slurm_says_against_it_is_told(program, capsys, monkeypatch, tmp_path):
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["submit", str(program)]) == 2
    assert "submit: sbatch refuses: no such partition" in capsys.readouterr().err
