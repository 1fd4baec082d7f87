"""Pickling of Python objects into byte arrays."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from collectives.arrays.host_arrays import Array

__all__ = ["dumps", "loads"]


def dumps(obj: object) -> Array:
    """Return the pickle of an object: shape (n,), uint8."""
    # A bytearray is writable, as memory of messages must be; `bytes` would be read-only.
    return np.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), np.uint8)


def loads(data: Array) -> Any:
    """Return the object pickled in `data`."""
    return pickle.loads(data.data)
