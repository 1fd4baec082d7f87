"""Compiled part of `collectives.kernels.buffer_address`, which reads NumPy's array structure.

Where an array object has what follows from NumPy's C headers, which programs in C are compiled
with, so that it cannot change without a new major version. Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import fence, load, pointer, store, stream

__all__ = ["make"]

# Bytes before the fields of an object (the first) and of an array (the others).
_KIND = 8
_DATA, _DIMENSIONS, _SHAPE, _STRIDES, _DTYPE, _FLAGS = 16, 24, 32, 40, 56, 64

# Bytes of an element of the widest type.
_WIDEST = 16

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
    return numba_compiler.from_number(found)


@njit
def _fits(x: int, out: int) -> bool:
    """Whether something is such an array that another one's result can be written into it."""
    both = _C_CONTIGUOUS | _WRITEABLE
    if (
        load(x + _KIND) != load(out + _KIND)
        or load(x + _DTYPE) != load(out + _DTYPE)
        or _int(x + _DIMENSIONS) != _int(out + _DIMENSIONS)
        or _int(out + _FLAGS) & both != both
    ):
        return False
    for axis in range(_int(x + _DIMENSIONS)):
        if load(load(x + _SHAPE) + 8 * axis) != load(load(out + _SHAPE) + 8 * axis):
            return False
    return True


def _writable(module: int, arguments: int, count: int) -> int:
    x, out = load(arguments), load(arguments + 8)
    return numba_compiler.from_number(load(out + _DATA) if _fits(x, out) else 0)


def _bind(module: int, arguments: int, count: int) -> int:
    words = numba_compiler.to_number(pointer(load(arguments)))
    x, out = load(arguments + 8), load(arguments + 16)
    found = 0
    if words and _int(x + _FLAGS) & _C_CONTIGUOUS and _fits(x, out):
        # From the first axis on along which there is a next one, they lie one behind the other.
        nbytes = _WIDEST
        for axis in range(_int(x + _DIMENSIONS)):
            length = load(load(x + _SHAPE) + 8 * axis)
            if length != 1:
                nbytes = length * load(load(x + _STRIDES) + 8 * axis)
                break
        between = load(out + _DATA) - load(x + _DATA)
        if x == out or between >= nbytes or -between >= nbytes:
            store(words, load(x + _DATA))
            store(words + 8, load(out + _DATA))
            found = 1
    return numba_compiler.from_number(found)


def _stream(dest: int, source: int, nbytes: int) -> int:
    stream(dest, source, nbytes)
    fence()  # for other threads that read it
    return nbytes


_KINDS: dict[str, tuple[Any, Any]] = {
    "readable": (_readable, types.int64(types.int64, types.int64)),
    "writable": (_writable, types.int64(types.int64, types.int64, types.int64)),
    "bind": (_bind, types.int64(types.int64, types.int64, types.int64)),
}


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a function; arguments as `machine_code.load`."""
    if kind == "stream":
        return numba_compiler.python_code(_stream, symbol, arguments=3)
    return numba_compiler.object_code(*_KINDS[kind], symbol)
