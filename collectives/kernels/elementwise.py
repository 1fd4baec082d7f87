"""Loops over the elements of arrays, one for each dtype and op, compiled by numba at first use.

The rounds of the node engine (`collectives.node.rounds`) call them by address, tile by tile. A loop
is `f(dest, source, n, size)`: addresses of two arrays of `n` elements that do not overlap, and the
number of ranks, by which MEAN divides. Each is simple, one array read and one changed, and thereby
vectorised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from collectives.arrays.device import is_half
from collectives.arrays.reduction import RULES, Op
from collectives.kernels import combine, compiling, float16, intrinsics
from collectives.kernels.combine import FUNCTIONS
from collectives.kernels.intrinsics import pointer

__all__ = ["Loops", "loops"]


class Loops(NamedTuple):
    """Addresses of the loops of one dtype and op; 0 stands for a plain copy.

    `fill` copies a contribution to where others read it, `start` and `add` begin a sum in the
    working type and go on with it, `save` writes it back in the type of the arrays.
    """

    fill: int
    start: int
    add: int
    save: int


def loops(dtype: np.dtype[Any], op: str) -> Loops:
    """Return the loops for arrays of a dtype.

    16-bit floats are added as 32-bit ones and rounded once, at the end; MEAN divides them there,
    and others before the sum, so that it does not overflow where the mean fits.

    Args:
        dtype: of the arrays.
        op: "SUM", "MEAN", "MIN", "MAX" or "PRODUCT", defined for the dtype.
    """
    function = RULES[Op(op)].function
    if is_half(dtype):
        half = dtype.name
        return Loops(0, _widen(half), _add_half(half, function), _round(half, op == "MEAN"))
    storage = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    return Loops(_divide(storage) if op == "MEAN" else 0, 0, _add(storage, function), 0)


@functools.cache
def _divide(dtype: np.dtype[Any]) -> int:
    """Return a loop that copies, and divides by the number of ranks."""
    number = dtype.type

    def divide(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, dtype)
        x = carray(pointer(source), n, dtype)
        divisor = number(size)
        for i in range(n):
            y[i] = number(x[i] / divisor)

    return _compiled(divide)


@functools.cache
def _add(dtype: np.dtype[Any], function: str) -> int:
    """Return a loop that combines two arrays of one type."""
    combined = FUNCTIONS[function]

    def add(dest: int, source: int, n: int, size: int) -> None:
        a = carray(pointer(dest), n, dtype)
        x = carray(pointer(source), n, dtype)
        for i in range(n):
            a[i] = combined(a[i], x[i])

    return _compiled(add)


@functools.cache
def _widen(half: str) -> int:
    """Return a loop that turns 16-bit floats into float32."""
    widen, _ = float16.CONVERSIONS[half]

    def copy(dest: int, source: int, n: int, size: int) -> None:
        a = carray(pointer(dest), n, np.float32)
        x = carray(pointer(source), n, np.uint16)
        for i in range(n):
            a[i] = widen(x[i])

    return _compiled(copy)


@functools.cache
def _add_half(half: str, function: str) -> int:
    """Return a loop that combines float32 with 16-bit floats."""
    widen, _ = float16.CONVERSIONS[half]
    combined = FUNCTIONS[function]

    def add(dest: int, source: int, n: int, size: int) -> None:
        a = carray(pointer(dest), n, np.float32)
        x = carray(pointer(source), n, np.uint16)
        for i in range(n):
            a[i] = combined(a[i], widen(x[i]))

    return _compiled(add)


@functools.cache
def _round(half: str, divide: bool) -> int:
    """Return a loop that rounds float32 to 16 bits, the mean after a division."""
    _, narrow = float16.CONVERSIONS[half]

    def copy(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(source), n, np.float32)
        for i in range(n):
            y[i] = narrow(a[i])

    def mean(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(source), n, np.float32)
        divisor = np.float32(size)
        for i in range(n):
            y[i] = narrow(np.float32(a[i] / divisor))

    return _compiled(mean if divide else copy)


def _compiled(loop: Callable[[int, int, int, int], None]) -> int:
    """Compile a loop, unless a file holds it already, and return its address."""
    # With Python's error model each division is checked, and no loop with one is vectorised.
    signature = types.void(*[types.int64] * 4)
    sources = [combine.__file__, float16.__file__, intrinsics.__file__]
    function = compiling.callback(loop, signature, includes=sources, error_model="numpy")
    _alive.append(function)
    address: int = function.address
    return address


# Code lives as long as the object that holds it.
_alive: list[Any] = []
