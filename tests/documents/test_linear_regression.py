"""The example that fits a line and a ridge under every strategy."""

import importlib.util

import pytest

from launcher import ROOT, mpirun
from pairwise import also

ALONE = ("default", "one device")
IN_STEP = (*ALONE, "mirrored", "multi-worker", "central storage", "server, in step")
JAX = importlib.util.find_spec("jax") is not None


# JAX takes most of the time of several ranks: its start, and a program for each fit.
@pytest.mark.parametrize(
    ("size", "without"), [(1, []), also(2, []), (3, ["TPU"] * JAX), also(3, [])]
)
def test_every_strategy_finds_the_weights_of_the_direct_solution(size, without):
    options = ["--without", *without]
    result = mpirun(
        size, ROOT / "examples" / "linear_regression.py", *options, timeout=115
    ).checked()
    _, *lines = result.stdout.splitlines()
    found = {}
    for line in lines:
        name, descent = line[:16].strip(), line[17:29].strip()
        found[name, descent] = tuple(map(float, line[29:].split()[:2]))
    assert len(found) == 3 * ((6 if size == 1 else 8) + JAX - len(without)), result
    for (name, descent), off in found.items():
        # In step, batches are all rows: what is left is 0.5^40 of the way, but for the condition.
        limit = 1e-6 if descent == "batch" and name in IN_STEP else 1.0
        if (name, descent) == ("TPU", "batch"):
            limit = 1e-5  # some roundings of float32 of weights up to 7
        assert max(off) < limit, (name, descent, off)  # of weights from 0 to 7
