"""The examples of docs/between-nodes.md are true, and so is its table of sums that overflow."""

from __future__ import annotations

import doctest

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.settings import Settings
from launcher import ROOT

PAGE = ROOT / "docs" / "between-nodes.md"

# Two nodes of two ranks, and one node; what each rank gives.
TWO_NODES, ONE_NODE, APART = [0, 0, 2, 2], [0, 0, 0, 0], [0, 1, 2, 3]
GIVEN = [40000, 40000, -30000, -30000]


def test_examples():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 7
    assert result.failed == 0


def table() -> list[list[str]]:
    lines = PAGE.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| arrays | `compression`"))
    rows = lines[begin + 2 : lines.index("", begin)]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def reduced(leaders, dtype, count, **options) -> float:
    """What all ranks get for an array of GIVEN."""
    results = [np.empty(0)] * len(GIVEN)

    def check(comm):
        x = np.full(count, GIVEN[comm.rank], np.dtype(getattr(ml_dtypes, dtype, dtype)))
        results[comm.rank] = comm.allreduce(x, **options)

    settings = Settings(timeout=20)
    inprocess.run_ranks(len(GIVEN), check, "synchronous", leaders=leaders, settings=settings)
    (value,) = {float(number) for result in results for number in result}
    return value


@pytest.mark.parametrize("count", [4, 50_000])  # one rail, both rails
@pytest.mark.parametrize("row", table(), ids=" ".join)
def test_sums_of_nodes(row, count):
    dtype, name, total, mean = row
    compression = eval(name, {"cc": cc})
    for op, expected in ((cc.SUM, total), (cc.MEAN, mean)):
        options = {"op": op, "compression": compression}
        assert reduced(TWO_NODES, dtype, count, **options) == float(expected)


def test_where_the_sum_of_a_node_does_not_overflow():
    options = {"op": cc.SUM, "compression": cc.FP16}
    assert reduced(ONE_NODE, "float32", 100, **options) == 20000
    assert reduced(APART, "float32", 100, **options) == 20000
    assert reduced(TWO_NODES, "float32", 100, algorithm="ring", **options) == 20000
