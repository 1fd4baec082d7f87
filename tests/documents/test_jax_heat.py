"""The plate of `examples/jax_heat.py` is as warm on any number of ranks as in NumPy."""

from __future__ import annotations

import re

import numpy as np
import pytest

from launcher import ROOT, mpirun
from requirements import needs

SIZE, STEPS = 24, 300


def warmth():
    """The temperature in the middle, by NumPy in float64."""
    plate = np.zeros((SIZE + 2, SIZE + 2))
    plate[0] = 100
    for _ in range(STEPS):
        around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        plate[1:-1, 1:-1] = around / 4
    return plate[1 + SIZE // 2, 1 + SIZE // 2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_plate_has_the_temperatures_of_numpy(ranks):
    needs("jax")
    program = ROOT / "examples" / "jax_heat.py"
    options = ["--size", str(SIZE), "--steps", str(STEPS)]
    result = mpirun(ranks, program, *options, timeout=60, JAX_PLATFORMS="cpu").checked()
    (found,) = re.findall(rf"^{ranks} ranks, {STEPS} steps: (\S+) degrees", result.stdout, re.M)
    # float32: one rounding of numbers below 100 in every step.
    assert float(found) == pytest.approx(warmth(), abs=STEPS * 100 * 2.0**-24 + 1e-4)
