"""Answers of docs/faq.md beyond outputs of programs: debugger, notebook, foreign packages."""

import subprocess
import sys

import programs
from launcher import ROOT, environment, mpirun_path, run

PAGE = programs.read(ROOT / "docs" / "faq.md")


def test_the_terminal_is_that_of_a_breakpoint_on_the_first_rank(tmp_path):
    (tmp_path / "debug.py").write_text(PAGE.files["debug.py"])
    ((command,),) = (s.commands for s in PAGE.sessions if "debug.py" in s.commands[0])
    words = command.split()
    words[0], words[words.index("python")] = mpirun_path(), sys.executable
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), input="p x\nx = 2 * x\nc\n",
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "array([0., 1.])" in done.stdout
    # What was typed counts: twice [0, 1] and [1, 2] have this mean.
    assert "0 [0.5 2. ]" in done.stdout
    assert "1 [0.5 2. ]" in done.stdout


def test_a_notebook_is_a_world_of_one_and_may_start_mpirun(tmp_path):
    """A kernel runs cells in one process and gives lines with `!` to a shell."""
    (tmp_path / "train.py").write_text(
        "import collectives as cc\n\ncomm = cc.init()\nprint(comm.rank, comm.size)\n"
    )
    cells = f"""
import subprocess
import collectives as cc
print(cc.init().size, flush=True)
command = "{mpirun_path()} -np 2 {sys.executable} train.py"
subprocess.run(command, shell=True, check=True)
print(cc.init().allreduce(3.0))
"""
    result = run([sys.executable, "-c", cells], timeout=60, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.status == 0, result
    assert sorted(result.stdout.splitlines()) == ["0 2", "1", "1 2", "3.0"]


def test_the_check_for_another_project_of_the_name_finds_one(tmp_path):
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives" / "__init__.py").touch()
    ((command,),) = (s.commands for s in PAGE.sessions if "import collectives" in s.commands[0])
    code = command.split(maxsplit=2)[2].strip('"')
    other = run([sys.executable, "-c", code], timeout=60, PYTHONPATH=str(tmp_path), cwd=tmp_path)
    assert other.status != 0
    assert "AttributeError" in other.stderr
