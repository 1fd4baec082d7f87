"""`bench` beside PyTorch's Gloo: every operation runs, and a dtype it lacks is refused by name."""

from __future__ import annotations

import json

import pytest

from collectives.tools import bench as benchmark
from launcher import mpirun
from requirements import needs


@pytest.fixture(autouse=True)
def _torch():
    needs("torch")


def bench(ranks, *arguments):
    return mpirun(ranks, "-m", "collectives", "bench", "--sizes", "8,4K",
                  "--peers", "native,gloo", *arguments)  # fmt: skip


@pytest.mark.parametrize("operation", benchmark.OPERATIONS)
def test_gloo_takes_its_turns_in_every_operation(operation, tmp_path):
    figures = tmp_path / "figures.json"
    result = bench(3, operation, "--json", figures)
    assert result.status == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr
    for row in json.loads(figures.read_text())["rows"]:
        assert row["ratios"]["gloo"] == pytest.approx(row["peers"]["gloo"] / row["median"])
        assert row["peers"]["gloo"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float16"])
def test_gloo_takes_other_dtypes(dtype):
    result = bench(2, "--dtype", dtype)
    assert result.status == 0, result.stdout + result.stderr


def test_a_dtype_that_gloo_does_not_reduce_is_refused():
    result = bench(2, "--dtype", "complex128")
    assert result.status not in (0, None)
    assert "gloo does not reduce complex128" in result.stderr
