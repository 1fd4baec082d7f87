"""Compiled part of `collectives.kernels.buffer_address`, which reads NumPy's array structure.

NumPy's C headers define the layout. C programs compile it in, so it can change only in a new major
version. Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit, types

from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import fence, load, pointer, record, store, stream

__all__ = ["all_words", "array", "is_contiguous", "is_writable", "make"]

# An array object (`PyArrayObject_fields` of NumPy, which begins with a `PyObject`).
_NDARRAY = np.dtype(
    [
        ("references", "i8"),
        # The pointer to the type identifies NumPy's class, so subclasses do not match.
        ("type", "i8"),  # address, as all fields below except ndim and flags
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
def array(address: Any) -> Any:
    """Return an array object as a record."""
    return record(address, _NDARRAY)


@njit
def is_contiguous(x: Any) -> bool:
    """Return whether an array is in C order."""
    return bool(x.flags & _C_CONTIGUOUS)


@njit
def is_writable(x: Any) -> bool:
    """Return whether an array is in C order and may be written."""
    both = _C_CONTIGUOUS | _WRITEABLE
    return bool(x.flags & both == both)


def _readable(module: int, x: int) -> int:
    # CPython passes a pointer to the object as the argument.
    found = array(x)
    return numba_compiler.from_number(found.data if is_contiguous(found) else 0)


@njit
def _fits(x: Any, out: Any) -> bool:
    """Return whether `out` is a writable array for a result like `x`."""
    # `is_writable`: the result is written in C order.
    if x.type != out.type or x.descr != out.descr or x.ndim != out.ndim or not is_writable(out):
        return False
    for axis in range(x.ndim):  # noqa: SIM110 (numba compiles no generator expression)
        if load(x.shape + 8 * axis) != load(out.shape + 8 * axis):
            return False
    return True


def _writable(module: int, arguments: int, count: int) -> int:
    # METH_FASTCALL passes an array of pointers to the arguments.
    x, out = array(load(arguments)), array(load(arguments + 8))
    return numba_compiler.from_number(out.data if _fits(x, out) else 0)


@njit
def _are_apart(x: Any, out: Any) -> bool:
    """Return whether two contiguous arrays of one shape and dtype share no memory."""
    # Bytes from the first axis longer than 1: the extent of the whole array.
    # At least one element of the widest type, for arrays of one element or none.
    nbytes = _WIDEST
    for axis in range(x.ndim):
        length = load(x.shape + 8 * axis)
        # Axes of length 1 have arbitrary strides.
        if length != 1:
            nbytes = length * load(x.strides + 8 * axis)
            break
    between = out.data - x.data
    return bool(between >= nbytes or -between >= nbytes)


def _bind(module: int, arguments: int, count: int) -> int:
    words = numba_compiler.to_number(pointer(load(arguments)))
    first, second = load(arguments + 8), load(arguments + 16)
    x, out = array(first), array(second)
    found = 0
    # A plan of another form has no words, which is 0. The same object, or no common bytes: kernels
    # read the input while they write.
    if words and is_contiguous(x) and _fits(x, out) and (first == second or _are_apart(x, out)):
        store(words, x.data)
        store(words + 8, out.data)
        found = 1
    return numba_compiler.from_number(found)


def _stream(dest: int, source: int, nbytes: int) -> int:
    stream(dest, source, nbytes)
    # Without the fence another thread could see a flag before the data.
    fence()  # streaming stores must be visible to other threads
    return nbytes


_KINDS: dict[str, tuple[Any, Any]] = {
    "readable": (_readable, types.int64(types.int64, types.int64)),
    "writable": (_writable, types.int64(types.int64, types.int64, types.int64)),
    "bind": (_bind, types.int64(types.int64, types.int64, types.int64)),
}


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all functions."""
    return ((kind,) for kind in ("stream", *_KINDS))


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a function; arguments as `machine_code.load`."""
    if kind == "stream":
        return numba_compiler.python_code(_stream, symbol, arguments=3)
    return numba_compiler.object_code(*_KINDS[kind], symbol)
