"""The example of parameter servers, and that of docs/parameter-server.md, run as users would."""

import re

import pytest

import programs
import strategies
from launcher import ROOT, asked_to_stop, mpirun
from pairwise import also
from requirements import installed

PROGRAM = ROOT / "examples" / "parameter_server.py"


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, []),
        (9, []),  # 8 workers: each gradient is 7 updates late
        (9, ["--coordinator"]),
        (4, ["--scale", "--epochs", "15"]),
        (5, ["--ps", "2", "--synchronous", "--epochs", "15"]),
        (4, ["--coordinator", "--epochs", "15"]),
    ],
)
def test_the_digits_are_learnt(size, options):
    result = mpirun(size, PROGRAM, *options, timeout=110).checked()
    (accuracy,) = re.findall(r"^accuracy on the held-out digits: (.*)$", result.stdout, re.M)
    assert float(accuracy) >= 0.96, result
    (mean,) = re.findall(r"^mean staleness (.*), at most", result.stdout, re.M)
    workers = size - 1 - ("--ps" in options) - ("--coordinator" in options)
    if workers == 1 or "--synchronous" in options:
        assert float(mean) == 0, result


def test_training_goes_on_from_a_checkpoint(tmp_path):
    options = ["--synchronous", "--resume", "--checkpoints", tmp_path / "run", "--epochs"]
    first, second, third = (
        mpirun(size, PROGRAM, *options, epochs, timeout=110).stdout
        for size, epochs in ((3, "20"), (3, "40"), (2, "40"))
    )
    assert (tmp_path / "run" / "step-000040").is_dir()
    last = [re.findall(r"^accuracy.*$", output, re.M) for output in (first, second, third)]
    assert last[1] == last[2], (first, second, third)  # nothing was left to do
    assert float(last[2][0].split()[-1]) >= 0.96
    assert "at most 0" in third


@pytest.mark.parametrize("options", [[], also(["--synchronous"])])
def test_asked_to_stop_all_tasks_leave_with_a_checkpoint(tmp_path, options):
    arguments = [*options, "--resume", "--checkpoints", str(tmp_path / "run"), "--epochs"]
    result = asked_to_stop(3, PROGRAM, *arguments, "100000", saves=tmp_path / "run", step=2)
    assert result.status == 85, result
    done = strategies.CheckpointManager(tmp_path / "run").restore_or_none().step
    assert done >= 2
    assert mpirun(2, PROGRAM, *arguments, done + 1, timeout=60).status == 0
    assert (tmp_path / "run" / f"step-{done + 1:06d}").is_dir()


def test_the_program_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "parameter-server.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(re.findall(r"```python\n(.*?)```", text, re.S)[0])
    result = mpirun(3, program, timeout=60).checked()
    assert result.stdout.splitlines() == ["(3,) True"] * 2, result


def test_a_net_of_torch_beside_a_table(tmp_path):
    installed("torch")
    page = programs.read(ROOT / "docs" / "parameter-server.md")
    assert programs.try_out(page, tmp_path, 90) == 1
