"""`bench` beside PyTorch's Gloo: every operation runs, and a dtype it lacks is refused by name."""

import json

import pytest

from collectives.tools import bench
from launcher import commands, mpirun
from requirements import needs


@pytest.fixture(autouse=True)
def _torch():
    needs("torch")


BENCH = ["bench", "--sizes", "8,4K", "--peers", "native,gloo"]


def test_gloo_takes_its_turns_in_every_operation(tmp_path):
    files = {operation: tmp_path / f"{operation}.json" for operation in bench.OPERATIONS}
    lists = ([*BENCH, operation, "--json", file] for operation, file in files.items())
    result = commands(3, *lists)
    assert "Warning" not in result.stderr
    for file in files.values():
        for row in json.loads(file.read_text())["rows"]:
            assert row["ratios"]["gloo"] == pytest.approx(row["peers"]["gloo"] / row["median"])
            assert row["peers"]["gloo"] > 0


def test_gloo_takes_other_dtypes():
    commands(2, *([*BENCH, "--dtype", dtype] for dtype in ("bfloat16", "bool", "float16")))


def test_a_dtype_that_gloo_does_not_reduce_is_refused():
    result = mpirun(2, "-m", "collectives", *BENCH, "--dtype", "complex128")
    assert result.status not in (0, None)
    assert "gloo does not reduce complex128" in result.stderr
