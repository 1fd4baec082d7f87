"""The programs about parts of models and many models, run as people would run them."""

import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import groupby

import numpy as np
import pytest
from safetensors import safe_open

from launcher import ROOT, complaints, environment, mpirun, mpirun_path, run
from pairwise import also

EXAMPLES = ROOT / "examples"
NAMES = [
    "vertical_split",
    "pipelined_rnn",
    "hyper_parameter_search",
    "ensemble",
    "ensemble_of_devices",
    "ensemble_of_ranks",
]


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_a_program_does(name):
    result = run([sys.executable, str(EXAMPLES / f"{name}.py"), "--help"], timeout=60).checked()
    assert "usage:" in result.stdout
    assert complaints(result) == []


def test_every_file_beside_the_shared_ones_is_a_program():
    files = list(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} > set(NAMES)
    for file in files:
        assert '__name__ == "__main__"' in file.read_text(), file


def test_a_program_is_copied_with_the_folder_that_it_imports(tmp_path):
    shutil.copy(EXAMPLES / "vertical_split.py", tmp_path)
    shutil.copytree(EXAMPLES / "common", tmp_path / "common")
    result = run(
        [sys.executable, "vertical_split.py", "--help"], timeout=60, cwd=tmp_path
    ).checked()
    assert "usage:" in result.stdout


def facts(result):
    """The losses, the accuracy, and the difference to one rank, as a program has printed them."""
    assert result.status == 0, result
    assert complaints(result) == [], result
    losses = re.search(r"^loss: (.*)$", result.stdout, re.M)[1].split()
    accuracy = re.search(r"accuracy on the held-out digits: (\S+)", result.stdout)[1]
    difference = re.search(r"difference to the losses of one rank: (\S+)", result.stdout)[1]
    assert re.search(r"ms per epoch on \d ranks?, \d+ ms on one: \d+\.\d\d times", result.stdout)
    return [float(loss) for loss in losses], float(accuracy), float(difference)


# Program, its options, and the least accuracy.
SPLIT = {
    "network": ("vertical_split", "--hidden 70 --epochs 6 --batch-size 100", 0.9),  # 24, 23 and 23
    "pipeline of recurrent layers": (
        "pipelined_rnn", "--layers 3 --units 32 --epochs 6 --batch-size 50 --parts 3", 0.85,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, also(2), 3])
@pytest.mark.parametrize(("program", "options", "least"), SPLIT.values(), ids=SPLIT)
def test_a_model_split_over_the_ranks_learns_as_on_one(program, options, least, size):
    result = mpirun(size, EXAMPLES / f"{program}.py", *options.split())
    losses, accuracy, difference = facts(result)
    assert difference <= 1e-9
    assert losses[-1] < 0.3 * losses[0]
    assert accuracy > least


def test_a_pipeline_needs_a_layer_for_every_rank():
    result = mpirun(2, EXAMPLES / "pipelined_rnn.py", "--layers", 1)
    assert result.status != 0
    assert "2 ranks need at least as many layers, got 1" in result.stderr


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """A folder with the three best networks of a small search on 2 ranks."""
    folder = tmp_path_factory.mktemp("a search")
    search(2, folder)
    return folder


def search(size, folder):
    options = ["--trials", 6, "--epochs", 4, "--output-dir", folder]
    result = mpirun(size, EXAMPLES / "hyper_parameter_search.py", *options).checked()
    assert complaints(result) == [], result
    return result


def test_the_search_keeps_the_three_best(networks):
    assert sorted(p.name for p in networks.iterdir()) == [
        f"best-{n}.safetensors" for n in (1, 2, 3)
    ]
    accuracies = []
    for number in (1, 2, 3):
        with safe_open(networks / f"best-{number}.safetensors", "numpy") as file:
            accuracies.append(float(file.metadata()["accuracy"]))
            hidden = int(file.metadata()["hidden"])
            assert file.get_tensor("w1").shape == (64, hidden)
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > 0.8


@pytest.mark.parametrize("size", [1, 3])
def test_the_search_finds_the_same_on_any_number_of_ranks(networks, tmp_path, size):
    result = search(size, tmp_path)
    workers = list(range(1, size)) or [0]
    ranks = re.search(r"6 trials on ranks \[(.*)\]", result.stdout)[1].split(", ")
    assert set(map(int, ranks)) <= set(workers)
    for file in networks.iterdir():
        with safe_open(file, "numpy") as ours, safe_open(tmp_path / file.name, "numpy") as other:
            assert ours.metadata() == other.metadata()
            for name in ours.keys():  # noqa: SIM118 (not a dict)
                np.testing.assert_array_equal(ours.get_tensor(name), other.get_tensor(name))


def test_an_ensemble_in_one_program_averages_the_networks(networks):
    command = [sys.executable, str(EXAMPLES / "ensemble.py"), "--networks", str(networks)]
    result = run(command, timeout=60).checked()
    *alone, together = map(float, re.findall(r"accuracy (\S+)", result.stdout))
    assert len(alone) == 3
    assert together >= min(alone)


def test_an_ensemble_without_networks_says_what_to_do(tmp_path):
    command = [sys.executable, str(EXAMPLES / "ensemble.py"), "--networks", str(tmp_path)]
    result = run(command, timeout=60)
    assert result.status != 0
    assert "run hyper_parameter_search.py before" in result.stderr


ULFM = ["--with-ft", "ulfm"]


@pytest.mark.parametrize("size", [2, also(4)])
def test_an_ensemble_of_ranks_answers_like_the_one_in_one_program(networks, size):
    options = ["--networks", networks, "--batches", 10, "--interval", 0, "--timeout", 20]
    result = mpirun(size, EXAMPLES / "ensemble_of_ranks.py", *options).checked()
    assert complaints(result) == [], result
    everyone = " ".join(map(str, range(1, size)))
    answered = re.findall(r"batch (\d+): answered by (.*) within", result.stdout)
    assert answered == [(str(n), everyone) for n in range(10)]
    assert float(re.search(r"what was answered: (\S+)", result.stdout)[1]) > 0.8


def test_one_rank_is_no_ensemble_of_ranks(networks):
    result = mpirun(1, EXAMPLES / "ensemble_of_ranks.py", "--networks", networks)
    assert result.status != 0
    assert "needs a rank for the questions" in result.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_member_that_dies_or_stops_does_not_block_the_others(networks, how):
    command = [mpirun_path(), *ULFM, "-np", "4", sys.executable]
    command += [str(EXAMPLES / "ensemble_of_ranks.py"), "--networks", str(networks)]
    command += ["--batches", "150", "--interval", "0.05", "--timeout", "5"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    lines, victim, without = [], None, 0
    asked = has_fallen = False
    try:
        for line in process.stdout:
            lines.append(line)
            if "member 2: process" in line:
                victim = int(line.rpartition(" ")[2])
            asked = asked or "batch 4:" in line
            if asked and victim is not None and not has_fallen:  # the lines come in any order
                os.kill(victim, how)
                has_fallen = True
            if "answered by 1 3 within" in line:
                without += 1
                if without == 20 and how == signal.SIGSTOP:
                    os.kill(victim, signal.SIGCONT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stderr = process.stderr.read()
        process.stdout.close()
        process.stderr.close()
    answers = dict(re.findall(r"batch (\d+): answered by (.*) within", "".join(lines)))
    assert list(answers) == [str(n) for n in range(150)], (lines, stderr)
    # However many batches are answered until it falls, the others answer the next ones at once.
    told = [(names, len(list(batches))) for names, batches in groupby(answers.values())]
    assert [names for names, _ in told[:2]] == ["1 2 3", "1 3"], lines
    assert told[0][1] >= 5, lines
    assert told[1][1] >= 20, lines
    assert answers["149"] == ("1 2 3" if how == signal.SIGSTOP else "1 3"), lines  # it is back
    assert any(line.startswith("accuracy of what was answered: 0.") for line in lines), stderr
