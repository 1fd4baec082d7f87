"""Programs of examples/ and of pages run as one process, without mpirun, by the same arguments."""

import os
import re
import shlex
import sys

import pytest

import programs
from launcher import ROOT, run
from pairwise import also
from requirements import needs

DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"

# Program -> options that keep it short.
SHORT = {
    "compare_compression": "--epochs 1 --hidden 64",
    "cross_validation": "",
    "eight_bit_weights": "--hidden 256",
    "elastic_digits": "--epochs 2",
    "ensemble_of_devices": "--epochs 1 --batches 2",
    "gossip": "--epochs 1",
    "horovod_digits": "",
    "hyper_parameter_search": "--trials 2 --epochs 1",
    "jax_devices": "--epochs 1",
    "jax_digits": "--epochs 1",
    "jax_heat": "--steps 20",
    "keras_digits": "--epochs 1",
    "linear_regression": "",
    "pipelined_rnn": "--epochs 1",
    "spare_replicas": "--steps 10",
    "torch_ddp_digits": "--epochs 1",
    "torch_digits": "--epochs 1",
    "torch_fsdp_digits": "--epochs 1",
    "torch_pipeline": "--epochs 1",
    "train_digits": "--epochs 1",
    "vertical_split": "--epochs 1",
}

# Programs whose subject is several tasks -> the error of one process. `ensemble` needs the results
# of another program.
SEVERAL = {
    "ensemble": "run hyper_parameter_search.py before",
    "ensemble_of_ranks": "a rank for the questions and one per network",
    "four_ways": "expected a replica besides",
    "jax_servers": "expected at least one ps and one worker, got 1 and 0",
    "large_table": "expected 2 ranks for ps:2,worker:0, got 1",
    "parameter_server": "expected at least one ps and one worker, got 1 and 0",
    "serving": "expected a replica besides",
    "time_to_accuracy": "expected a server and two workers",
    "torch_servers": "expected at least one ps and one worker, got 1 and 0",
}
SEVERAL_OF_PAGES = {
    "tutorials/a-parameter-server.md": "expected at least one ps and one worker, got 1 and 0",
    "how-to/simulations.md apart.py": "recv: source is not another rank",
}

PAGES = ["index.md", "start.md", "faq.md", "../README.md"]
PAGES += [f"{d}/{p.name}" for d in ("tutorials", "how-to") for p in sorted((DOCS / d).glob("*.md"))]


def needed(text):
    """Optional packages that a program imports."""
    found = set(re.findall(r"^ *import (torch|jax|keras|optax)\b", text, re.MULTILINE))
    found |= {"torch"} if "keras" in found else set()  # its backend
    return found | ({"sklearn"} if "digits" in text else set())


def alone(command, folder, expected=None):
    """Run a program as one process; `expected` is a part of its error."""
    path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
    result = run([sys.executable, *command], timeout=200, cwd=folder, PYTHONPATH=path)
    if expected is None:
        result.checked()
    else:
        assert result.status != 0, result
        assert expected in result.stderr


@pytest.mark.parametrize("name", [*SHORT, *(also(name) for name in SEVERAL)])
def test_examples(name, tmp_path):
    program = EXAMPLES / f"{name}.py"
    needs(*needed(program.read_text()))
    alone([program, *SHORT.get(name, "").split()], tmp_path, SEVERAL.get(name))


def test_every_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, *SEVERAL}


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_pages(page, tmp_path):
    read = programs.read(DOCS / page)
    for name, text in read.files.items():
        (tmp_path / name).write_text(text)
    for command in [line for session in read.sessions for line in session.commands]:
        words = shlex.split(command.partition(" || ")[0], comments=True)
        names = [word for word in words if word in read.files]
        # Not those that need a terminal or another machine.
        if not names or names == ["debug.py"] or {"--host", "pytest", "submit"} & {*words}:
            continue
        needs(*needed(read.files[names[0]]))
        expected = SEVERAL_OF_PAGES.get(page, SEVERAL_OF_PAGES.get(f"{page} {names[0]}"))
        alone(words[words.index(names[0]) :], tmp_path, expected)
