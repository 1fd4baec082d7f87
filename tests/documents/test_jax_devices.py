"""One program for one device, for eight, and for two ranks of four, with equal results."""

from __future__ import annotations

import re

import numpy as np

from launcher import ROOT, mpirun
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
        )  # fmt: skip
        assert result.status == 0, result
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
