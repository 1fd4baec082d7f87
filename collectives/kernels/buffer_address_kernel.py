"""Compiled part of `collectives.kernels.buffer_address`, which reads NumPy's array structure.

Where an array object has what follows from NumPy's C headers, which programs in C are compiled
with, so that it cannot change without a new major version. Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import fence, load, pointer, record, store, stream

__all__ = ["make"]

# An array object (`PyArrayObject_fields` of NumPy, which begins with a `PyObject`).
_NDARRAY = np.dtype(
    [
        ("references", "i8"),
        ("type", "i8"),  # address, as all that follow but two
        ("data", "i8"),
        ("ndim", "i4"),
        ("shape", "i8"),
        ("strides", "i8"),
        ("base", "i8"),
        ("descr", "i8"),
        ("flags", "i4"),
    ],
    align=True,
)

# Bytes of an element of the widest type.
_WIDEST = 16

# Bits of `flags`.
_C_CONTIGUOUS, _WRITEABLE = 0x1, 0x400


@njit
def _array(address: Any) -> Any:
    """Return an array object as a record."""
    return record(address, _NDARRAY)


def _readable(module: int, x: int) -> int:
    array = _array(x)
    return numba_compiler.from_number(array.data if array.flags & _C_CONTIGUOUS else 0)


@njit
def _fits(x: Any, out: Any) -> bool:
    """Whether something is such an array that another one's result can be written into it."""
    both = _C_CONTIGUOUS | _WRITEABLE
    if x.type != out.type or x.descr != out.descr or x.ndim != out.ndim or out.flags & both != both:
        return False
    for axis in range(x.ndim):  # noqa: SIM110 (numba compiles no generator expression)
        if load(x.shape + 8 * axis) != load(out.shape + 8 * axis):
            return False
    return True


def _writable(module: int, arguments: int, count: int) -> int:
    x, out = _array(load(arguments)), _array(load(arguments + 8))
    return numba_compiler.from_number(out.data if _fits(x, out) else 0)


def _bind(module: int, arguments: int, count: int) -> int:
    words = numba_compiler.to_number(pointer(load(arguments)))
    first, second = load(arguments + 8), load(arguments + 16)
    x, out = _array(first), _array(second)
    found = 0
    if words and x.flags & _C_CONTIGUOUS and _fits(x, out):
        # From the first axis on along which there is a next one, they lie one behind the other.
        nbytes = _WIDEST
        for axis in range(x.ndim):
            length = load(x.shape + 8 * axis)
            if length != 1:
                nbytes = length * load(x.strides + 8 * axis)
                break
        between = out.data - x.data
        if first == second or between >= nbytes or -between >= nbytes:
            store(words, x.data)
            store(words + 8, out.data)
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
