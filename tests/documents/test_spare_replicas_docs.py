"""The program of docs/spare-replicas.md learns."""

import importlib.util

import numpy as np
import pytest

import strategies
from launcher import ROOT, asked_to_stop, mpirun
from pairwise import also
from requirements import needs


@pytest.mark.parametrize(("size", "count"), [(1, 1), also(2, 3), (4, 3)])
def test_the_digits_are_learned(size, count):
    needs("sklearn")
    program = ROOT / "examples" / "spare_replicas.py"
    result = mpirun(size, program, "--replicas-to-aggregate", count, timeout=110).checked()
    (line,) = [t for t in result.stdout.splitlines() if t.startswith("accuracy on the held-out")]
    assert float(line.rpartition(" ")[2]) >= 0.96
    used = [int(t.split()[2]) for t in result.stdout.splitlines() if t.endswith(" late")]
    assert len(used) == size
    assert sum(used) == 300 * count


def used_in(result):
    return [int(t.split()[2]) for t in result.stdout.splitlines() if t.endswith(" late")]


def test_asked_to_stop_all_leave_with_a_checkpoint_and_go_on(tmp_path):
    needs("sklearn")
    program = (ROOT / "examples" / "spare_replicas.py", "--checkpoints", tmp_path)
    result = asked_to_stop(3, *program, "--steps", 10**6, saves=tmp_path)
    assert result.status == 85, result
    saved = strategies.CheckpointManager(tmp_path).restore_or_none()
    assert any(name.startswith("optimizer/") for name in saved.tensors)
    last = saved.step + 60
    result = mpirun(4, *program, "--resume", "--steps", last, timeout=110).checked()
    assert sum(used_in(result)) == 60 * 3
    assert strategies.CheckpointManager(tmp_path).restore_or_none().step == last


def test_after_a_death_the_program_ends_as_any_other():
    needs("sklearn")
    program = ROOT / "examples" / "spare_replicas.py"
    result = mpirun(
        4, program, "--steps", 100, options=("--with-ft", "ulfm"), timeout=110,
        UNISONO_FAULT="step=50,rank=2,kind=kill",
    ).checked()  # fmt: skip
    used = used_in(result)
    assert sum(used) == 300
    assert used[2] <= 50


def benchmark():
    file = ROOT / "benchmarks" / "spare_replicas.py"
    spec = importlib.util.spec_from_file_location("spare_replicas_benchmark", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_benchmark_expects():
    expected = benchmark().expected
    drawn = np.array([[1.0, 2.0, 9.0], [1.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 5.0, 1.0]])
    np.testing.assert_allclose(expected(drawn, 3), np.cumsum(drawn.max(axis=1)))
    # Whoever is late finishes what it has begun, and then takes part in what is the newest.
    np.testing.assert_allclose(expected(drawn, 2), [2, 4, 7, 10])
    np.testing.assert_allclose(expected(drawn, 1), [1, 2, 4, 6])


def test_the_picture_of_the_benchmark(tmp_path):
    values = {"ms per step": 2.0, "expected": 1.5, "measured / expected": 1.3}
    file = tmp_path / "curve.png"
    benchmark().picture({0: values, 1: values}, str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
