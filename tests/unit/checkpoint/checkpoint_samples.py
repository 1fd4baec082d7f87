"""What the tests of checkpoints save and how they compare it."""

import json
import os
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from strategies.checkpoint import checkpoint, manifest

SHARD = "rank-00000.safetensors"


def forge(path, change):
    """Change the manifest and make its own checksum right again, as an attacker would."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("self_checksum")
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["self_checksum"] = zlib.crc32(canonical)
    (path / "manifest.json").write_text(json.dumps(body))


def as_schema_1(path):
    """Write the manifest as earlier versions did; the shard is the same."""
    found = checkpoint.restore(path).tensors

    def change(body):
        body["schema"], body["checksum"] = 1, "crc32"
        for name, entry in body["tensors"].items():
            (one,) = entry.pop("slices")
            entry["file"], entry["checksum"] = one["file"], zlib.crc32(found[name].tobytes())

    forge(path, change)


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
