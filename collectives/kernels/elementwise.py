"""How the loops of `collectives.kernels.loops` are compiled, one for each dtype and op.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import carray, types

from collectives.kernels import compiling, float16
from collectives.kernels.combine import BITWISE, FUNCTIONS
from collectives.kernels.intrinsics import pointer

__all__ = ["make"]

_FUNCTIONS = FUNCTIONS | BITWISE

Loop = Callable[[int, int, int, int], None]


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.address`."""
    return compiling.object_code(_KINDS[kind](*words), types.void(*[types.int64] * 4), symbol)


def _divide(name: str) -> Loop:
    """Return a loop that copies, and divides by the number of ranks; parts of complex numbers."""
    dtype = np.dtype(name)
    parts, dtype = (2, np.empty(0, dtype).real.dtype) if dtype.kind == "c" else (1, dtype)
    number = dtype.type

    def divide(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), parts * n, dtype)
        x = carray(pointer(source), parts * n, dtype)
        divisor = number(size)
        for i in range(parts * n):
            y[i] = number(x[i] / divisor)

    return divide


def _start(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays into a third."""
    dtype = np.dtype(name)
    combined = _FUNCTIONS[function]

    def start(dest: int, first: int, second: int, n: int) -> None:
        y = carray(pointer(dest), n, dtype)
        a = carray(pointer(first), n, dtype)
        b = carray(pointer(second), n, dtype)
        for i in range(n):
            y[i] = combined(a[i], b[i])

    return start


def _add(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays of one type."""
    dtype = np.dtype(name)
    combined = _FUNCTIONS[function]

    def add(dest: int, source: int, n: int, size: int) -> None:
        a = carray(pointer(dest), n, dtype)
        x = carray(pointer(source), n, dtype)
        for i in range(n):
            a[i] = combined(a[i], x[i])

    return add


def _behind(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays of one type, the second operand in place."""
    dtype = np.dtype(name)
    combined = _FUNCTIONS[function]

    def behind(dest: int, source: int, n: int, size: int) -> None:
        b = carray(pointer(dest), n, dtype)
        x = carray(pointer(source), n, dtype)
        for i in range(n):
            b[i] = combined(x[i], b[i])

    return behind


def _start_half(half: str, function: str) -> Loop:
    """Return a loop that combines two arrays of 16-bit floats into float32."""
    widen, _ = float16.CONVERSIONS[half]
    combined = FUNCTIONS[function]

    def start(dest: int, first: int, second: int, n: int) -> None:
        y = carray(pointer(dest), n, np.float32)
        a = carray(pointer(first), n, np.uint16)
        b = carray(pointer(second), n, np.uint16)
        for i in range(n):
            y[i] = combined(widen(a[i]), widen(b[i]))

    return start


def _add_half(half: str, function: str) -> Loop:
    """Return a loop that combines float32 with 16-bit floats."""
    widen, _ = float16.CONVERSIONS[half]
    combined = FUNCTIONS[function]

    def add(dest: int, source: int, n: int, size: int) -> None:
        a = carray(pointer(dest), n, np.float32)
        x = carray(pointer(source), n, np.uint16)
        for i in range(n):
            a[i] = combined(a[i], widen(x[i]))

    return add


def _round(half: str) -> Loop:
    """Return a loop that rounds float32 to 16 bits."""
    _, narrow = float16.CONVERSIONS[half]

    def save(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(source), n, np.float32)
        for i in range(n):
            y[i] = narrow(a[i])

    return save


def _mean(half: str) -> Loop:
    """Return a loop that divides float32 by the number of ranks, and rounds to 16 bits."""
    _, narrow = float16.CONVERSIONS[half]

    def save(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(source), n, np.float32)
        divisor = np.float32(size)
        for i in range(n):
            y[i] = narrow(np.float32(a[i] / divisor))

    return save


_KINDS: dict[str, Callable[..., Loop]] = {
    "divide": _divide,
    "start": _start,
    "add": _add,
    "behind": _behind,
    "start_half": _start_half,
    "add_half": _add_half,
    "round": _round,
    "mean": _mean,
}
