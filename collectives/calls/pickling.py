"""Python objects as byte arrays, by pickle."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from collectives.arrays.host_arrays import Array

__all__ = ["dumps", "loads"]


def dumps(obj: object) -> Array:
    """Return an object as bytes: shape (n,), uint8."""
    return np.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), np.uint8)


def loads(data: Array) -> Any:
    """Return the object of such bytes."""
    return pickle.loads(data.data)
