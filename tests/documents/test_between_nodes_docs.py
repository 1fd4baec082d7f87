"""The table of sums that overflow of docs/between-nodes.md is true."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import inprocess
import strategies
from collectives.core.settings import Settings
from launcher import ROOT
from requirements import installed

PAGE = ROOT / "docs" / "between-nodes.md"

# Two nodes of two ranks, and one node; what each rank gives.
TWO_NODES, ONE_NODE, APART = [0, 0, 2, 2], [0, 0, 0, 0], [0, 1, 2, 3]
GIVEN = [40000, 40000, -30000, -30000]


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


def digits(part):
    data = installed("sklearn.datasets").load_digits()
    rows = np.random.default_rng(0).permutation(len(data.target))
    rows = rows[:1500] if part == "training" else rows[1500:]
    return data.data[rows].astype(np.float32) / 16, data.target[rows]


def forward(variables, x):
    w, b, v, c = (variable.value for variable in variables)
    hidden = np.maximum(x @ w + b, 0)
    return hidden, hidden @ v + c


def accuracy(comm, optimizer, compression, seed):
    """Train a network on rows of all ranks; its share of right answers to what it has not seen."""
    random = np.random.default_rng(seed)
    shapes = {"w": (64, 64), "b": (64,), "v": (64, 10), "c": (10,)}
    variables = [
        strategies.Variable((len(s) - 1) * random.normal(0, 1 / 8, s).astype(np.float32), name=n)
        for n, s in shapes.items()
    ]
    distributed = strategies.DistributedOptimizer(optimizer, comm=comm, compression=compression)
    x, digit = digits("training")
    for _ in range(12):
        order = random.permutation(len(x))
        for start in range(0, len(x), 100):
            rows = order[start : start + 100][comm.rank :: comm.size]
            hidden, scores = forward(variables, x[rows])
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            errors = shares / shares.sum(axis=1, keepdims=True) - np.eye(10)[digit[rows]]
            errors = (errors / len(rows)).astype(np.float32)
            back = errors @ variables[2].value.T * (hidden > 0)
            gradients = (x[rows].T @ back, back.sum(0), hidden.T @ errors, errors.sum(0))
            distributed.apply_gradients(zip(gradients, variables, strict=True))
    x, digit = digits("held out")
    return (forward(variables, x)[1].argmax(axis=1) == digit).mean()


@pytest.mark.parametrize(
    "optimizer", [lambda: strategies.SGD(0.5), lambda: strategies.Adam(0.003)], ids=["SGD", "Adam"]
)
def test_with_8_bits_the_digits_are_learned_as_well(optimizer):
    settings = Settings(timeout=20)

    def mean(compression):
        found = [
            inprocess.run_ranks(
                2, lambda comm, seed=seed: accuracy(comm, optimizer(), compression(), seed),
                leaders=[0, 1], settings=settings, timeout=60,
            )[0]
            for seed in range(3)
        ]  # fmt: skip
        return np.mean(found)

    exact = mean(lambda: cc.NONE)
    assert exact > 0.94
    assert mean(cc.INT8.with_feedback) >= exact - 0.003
