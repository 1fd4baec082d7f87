"""The batch script that `python -m strategies submit` writes."""

import os
import subprocess
import sys

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
        words = words_of(text, tmp_path, SLURM_RESTART_COUNT=restarts)
        assert words[:4] == ["--bind-to", "none", "-n", "3"]
        assert words[5:] == [str(program), "--name", "two words", "$HOME"] + (
            ["--resume"] if restarts == "1" else []
        )


def words_of(text, tmp_path, launcher="mpirun", **variables):
    """Run a script with a launcher that prints its arguments."""
    name, *words = launcher.split()
    fake = tmp_path / name
    fake.write_text('#!/bin/bash\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    own = {"SLURM_SUBMIT_DIR": str(tmp_path), "UNISONO_LAUNCHER": " ".join([str(fake), *words])}
    done = subprocess.run(
        ["bash"], input=text, text=True, capture_output=True, timeout=30,
        env=os.environ | JOB | own | variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout.split("\n")[1].split("|")[:-1]


def test_a_resumed_job_is_not_told_twice(program, tmp_path, capsys):
    assert main(["submit", str(program), "--dry-run", "--", "--resume"]) == 0
    text = capsys.readouterr().out
    words = words_of(text, tmp_path, SLURM_RESTART_COUNT="1")
    assert words[5:] == [str(program), "--resume"]


@pytest.mark.parametrize(
    ("launcher", "options", "expected"),
    [
        ("mpirun", "", ["--bind-to", "none", "-n", "3"]),
        ("mpirun", "--display map", ["--bind-to", "none", "--display", "map", "-n", "3"]),
        ("mpirun", "--bind-to core", ["--bind-to", "core", "-n", "3"]),
        ("mpirun", "--map-by node:PE=2", ["--map-by", "node:PE=2", "-n", "3"]),
        ("mpirun -bind-to core", "", ["-bind-to", "core", "-n", "3"]),
        ("srun --mpi=pmix", "", ["--mpi=pmix"]),
    ],
)
def test_options_of_the_launcher(program, tmp_path, capsys, launcher, options, expected):
    text = script(capsys, program)
    words = words_of(text, tmp_path, launcher, UNISONO_MPIRUN_OPTIONS=options)
    assert words[: len(expected)] == expected
    assert words[len(expected) + 1 :] == [str(program)]


def test_an_elastic_job_outlives_its_ranks(program, tmp_path, capsys):
    plain, elastic = script(capsys, program), script(capsys, program, "--elastic")
    ulfm = ["--bind-to", "none", "--with-ft", "ulfm", "-n"]
    assert words_of(plain, tmp_path)[:3] == ["--bind-to", "none", "-n"]
    assert words_of(elastic, tmp_path)[:5] == ulfm
    variable = {"UNISONO_MPIRUN_OPTIONS": "--with-ft ulfm"}
    assert words_of(plain, tmp_path, **variable)[:5] == ulfm


@pytest.mark.parametrize(
    ("missing", "variables", "message"),
    [
        ("type -P mpirun", {}, "no mpirun on PATH. Load the MPI module before sbatch"),
        (
            "",
            {"UNISONO_LAUNCHER": "srun", "UNISONO_MPIRUN_OPTIONS": "--with-ft ulfm"},
            "UNISONO_MPIRUN_OPTIONS is for mpirun, expected options of srun in UNISONO_LAUNCHER",
        ),
        (
            "",
            {"UNISONO_LAUNCHER": "srun --mpi=pmix", "SLURM_HET_SIZE": "2"},
            "expected UNISONO_LAUNCHER='srun --mpi=pmix --het-group",
        ),
    ],
)
def test_mistakes_in_the_job_are_named(
    program, tmp_path, capsys, monkeypatch, missing, variables, message
):
    # A Python that has no mpirun beside it: the script then looks for one on PATH.
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    text = script(capsys, program)
    assert missing in text
    if missing:
        text = text.replace(missing, "type -P no-such-program")
    done = subprocess.run(
        ["bash"], input=text, text=True, capture_output=True, timeout=30,
        env=os.environ | JOB | {"SLURM_SUBMIT_DIR": str(tmp_path)} | variables, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr


def test_it_ends_as_the_script_of_the_checkout(program, capsys):
    of_checkout = (ROOT / "slurm" / "train.sbatch").read_text()
    beginning = "[[ -z ${SLURM_HET_SIZE:-} "
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
        (["--launcher="], "submit: expected --launcher mpirun or srun, and its options, got ''"),
        (["--launcher=aprun -B"], "got 'aprun -B'"),
        (["--launcher=srun", "--elastic"], "expected --launcher mpirun with --elastic, got srun"),
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
