"""Models of PyTorch and JAX whose steps a strategy makes, as the examples show."""

from __future__ import annotations

import re

import pytest

from launcher import ROOT, mpirun
from pairwise import also
from requirements import needs

PACKAGES = {"torch": ["torch"], "jax": ["jax", "optax"]}


@pytest.mark.parametrize(
    ("library", "size", "options"),
    [
        ("torch", 3, []),
        also("torch", 4, ["--synchronous"]),
        ("torch", 4, ["--spare", "1", "--steps", "300"]),
        ("jax", 3, []),
        also("jax", 4, ["--spare", "1", "--steps", "300"]),
    ],
)
def test_the_digits_are_learnt(library, size, options):
    needs(*PACKAGES[library], "sklearn")
    program = ROOT / "examples" / f"{library}_servers.py"
    result = mpirun(size, program, *options, timeout=110)
    assert result.status == 0, result
    (accuracy,) = re.findall(r"^accuracy on the held-out digits: (.*)$", result.stdout, re.M)
    assert float(accuracy) >= 0.96, result
    expected = "1 of 4 replicas spare" if "--spare" in options else f"{size - 1} workers"
    assert expected in result.stdout
