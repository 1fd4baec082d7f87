"""One program for one device, for eight, and for two ranks of four, with equal results."""

from __future__ import annotations

import re
import sys

import numpy as np

from launcher import ROOT, mpirun, run
from requirements import needs


def test_the_devices_of_jax_train_alike(tmp_path):
    needs("jax", "sklearn")
    program = ROOT / "examples" / "jax_devices.py"
    found = {}
    for ranks, devices in ((1, 1), (1, 8), (2, 4)):
        file = tmp_path / f"{ranks} {devices}.npz"
        # Threads for all devices: without them JAX waits for itself on two cores.
        result = mpirun(
            ranks, program, "--epochs", "6", "--save", str(file), timeout=100,
            JAX_NUM_CPU_DEVICES=str(devices), JAX_PLATFORMS="cpu", NPROC="32",
        ).checked()  # fmt: skip
        assert f"{ranks} ranks of {devices} devices" in result.stdout
        (accuracy,) = re.findall(r"^accuracy on the held-out digits: (.*)$", result.stdout, re.M)
        assert float(accuracy) >= 0.93, result
        with np.load(file) as saved:
            found[ranks, devices] = [saved[name] for name in saved.files]
    alone = found.pop((1, 1))
    for weights in found.values():
        for mine, other in zip(alone, weights, strict=True):
            # Gradients are added in another order in each of 156 steps.
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-3)


def test_an_ensemble_on_devices_answers_without_the_one_that_is_late():
    needs("jax", "sklearn")
    program = str(ROOT / "examples" / "ensemble_of_devices.py")
    options = ["--slow", "2", "--epochs", "2", "--deadline", "1", "--batches", "3"]
    result = run([sys.executable, program, *options], timeout=60, NPROC="32").checked()
    # The late one, whose answer takes three deadlines, is not asked again before.
    answered = re.findall(r"^batch \d: answered by (.*) within", result.stdout, re.M)
    assert answered == ["0 1 3 4 5 6 7"] * 3, result
    (accuracy,) = re.findall(r"^accuracy of what was answered in time: (.*)$", result.stdout, re.M)
    assert float(accuracy) > 0.9
