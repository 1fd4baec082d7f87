"""What the tests of checkpoints save and how they compare it."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np

from strategies.training import manifest

SHARD = "rank-00000.safetensors"


def tensors_of(seed):
    """One array of every dtype, with shapes without elements and without dimensions."""
    rng = np.random.default_rng(seed)
    tensors = {
        f"layer/{name}": rng.integers(0, 2, (3, 5)).astype(dtype)
        for name, dtype in manifest.DTYPES.items()
    }
    bits = rng.integers(0, 1 << 16, 64).astype(np.uint16)
    return {
        **tensors,
        "all bits": bits.view(ml_dtypes.bfloat16),
        "nan and inf": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]),
        "step": np.array(seed),
        "nothing": np.empty((0, 4), np.float32),
        "empty bfloat16": np.empty((2, 0), ml_dtypes.bfloat16),
    }


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        array = np.asarray(array, order="C")
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def leftovers(directory):
    return [name for name in os.listdir(directory) if name.startswith((".tmp", ".old"))]


def steps(directory):
    return sorted(int(p.name[5:]) for p in Path(directory).glob("step-*"))
