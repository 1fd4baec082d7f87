"""The compiled part of `collectives.kernels.addresses`: NumPy's arrays as they lie in memory.

Where an array object has what follows from NumPy's C headers, which programs in C are compiled
with, so that it cannot change without a new major version. Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from collectives.kernels import compiling
from collectives.kernels.intrinsics import load, pointer

__all__ = ["make"]

# Bytes before the fields of an object (the first) and of an array (the others).
_KIND = 8
_DATA, _DIMENSIONS, _SHAPE, _DTYPE, _FLAGS = 16, 24, 32, 56, 64

# Bits of _FLAGS.
_C_CONTIGUOUS, _WRITEABLE = 0x1, 0x400


@njit
def _int(address: int) -> Any:
    """Load an int of C."""
    return carray(pointer(address), 1, np.int32)[0]


def _readable(module: int, x: int) -> int:
    found = 0
    if _int(x + _FLAGS) & _C_CONTIGUOUS:
        found = load(x + _DATA)
    return compiling.from_number(found)


def _writable(module: int, arguments: int, count: int) -> int:
    x, out = load(arguments), load(arguments + 8)
    both = _C_CONTIGUOUS | _WRITEABLE
    found = 0
    if (
        load(x + _KIND) == load(out + _KIND)
        and load(x + _DTYPE) == load(out + _DTYPE)
        and _int(x + _DIMENSIONS) == _int(out + _DIMENSIONS)
        and _int(out + _FLAGS) & both == both
    ):
        found = load(out + _DATA)
        for axis in range(_int(x + _DIMENSIONS)):
            if load(load(x + _SHAPE) + 8 * axis) != load(load(out + _SHAPE) + 8 * axis):
                found = 0
    return compiling.from_number(found)


_KINDS: dict[str, tuple[Any, Any]] = {
    "readable": (_readable, types.int64(types.int64, types.int64)),
    "writable": (_writable, types.int64(types.int64, types.int64, types.int64)),
}


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a function; arguments as `machine_code.address`."""
    return compiling.object_code(*_KINDS[kind], symbol)
