"""Compilation of the loops in `collectives.kernels.loops`, one per dtype and operation.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import register_jitable

from collectives.kernels import float16, numba_compiler
from collectives.kernels.combine import BITWISE, FUNCTIONS
from collectives.kernels.intrinsics import canonical_nan, load_half_pair, pointer, store_half_pair

__all__ = ["loop", "make"]

_FUNCTIONS = FUNCTIONS | BITWISE


@float16.jitable
def _add_wide(a: Any, b: Any) -> Any:
    return a + b


@float16.jitable
def _multiply_wide(a: Any, b: Any) -> Any:
    return a * b


# For 16-bit floats widened to float32. Sums and products need not return NumPy's NaN, because the
# rounding does: 64 KiB of float16 take 4.8 us, and 5.6 us with both.
_WIDE_FUNCTIONS = FUNCTIONS | {"add": _add_wide, "multiply": _multiply_wide}

Loop = Callable[[int, int, int, int], None]


def _inline(function: Loop) -> Loop:
    """Let a loop become a part of another one, which is vectorised for the addresses that it has.

    Called as a function it is not where two addresses are the same: 64 KiB of float32 are added in
    place in 9 us then, and in 2.
    """
    inlined: Loop = register_jitable(inline="always")(function)
    return inlined


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.load`."""
    return numba_compiler.object_code(loop(kind, *words), types.void(*[types.int64] * 4), symbol)


def loop(kind: str, *words: str) -> Loop:
    """Return a loop that numba can compile; `collectives.kernels.loops` knows the words."""
    return _KINDS[kind](*words)


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


def _binary(name: str, function: str) -> Loop:
    """Return a loop `f(dest, a, b, n)` that combines two arrays; `dest` may be one of them."""
    if name in float16.CONVERSIONS:
        return _both_halves(name, function)
    dtype, parts = np.dtype(name), 1
    if dtype.kind == "c" and function != "multiply":  # real and imaginary parts alike
        dtype, parts = np.empty(0, name).real.dtype, 2
    combined = _mean_of_two(dtype) if function == "mean" else _FUNCTIONS[function]

    def both(dest: int, first: int, second: int, n: int) -> None:
        y = carray(pointer(dest), parts * n, dtype)
        a = carray(pointer(first), parts * n, dtype)
        b = carray(pointer(second), parts * n, dtype)
        for i in range(parts * n):
            y[i] = combined(a[i], b[i])

    return _inline(both)


def _mean_of_two(dtype: np.dtype[Any]) -> Callable[..., Any]:
    half = dtype.type(0.5)

    def mean(a: Any, b: Any) -> Any:
        result = a * half + b * half  # also where a + b overflows
        return canonical_nan(result, result, result)

    return float16.jitable(mean)


def _both_halves(name: str, function: str) -> Loop:
    """As `_binary`, of 16-bit floats, each rounded once."""
    widen, narrow = float16.CONVERSIONS[name]
    combined = _combined_as_float32(function)

    def by_ones(dest: int, first: int, second: int, n: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(first), n, np.uint16)
        b = carray(pointer(second), n, np.uint16)
        for i in range(n):
            y[i] = narrow(combined(widen(a[i]), widen(b[i])))

    ones = _inline(by_ones)
    if name not in float16.PAIRS:
        return ones
    low, high, narrow_pair = float16.PAIRS[name]

    def by_pairs(dest: int, first: int, second: int, n: int) -> None:
        for i in range(n // 2):
            a, b = load_half_pair(first, i), load_half_pair(second, i)
            lower, upper = combined(low(a), low(b)), combined(high(a), high(b))
            store_half_pair(dest, i, narrow_pair(lower, upper))
        done = n // 2 * 2
        ones(dest + 2 * done, first + 2 * done, second + 2 * done, n - done)

    return _inline(by_pairs)


def _combined_as_float32(function: str) -> Callable[..., Any]:
    exact = _WIDE_FUNCTIONS["add" if function == "mean" else function]
    half = np.float32(0.5)

    def mean(a: Any, b: Any) -> Any:
        return np.float32(exact(a, b) * half)

    return float16.jitable(mean) if function == "mean" else exact


def _combine_into(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays into a third."""
    return _binary(name, function)


def _accumulate(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays of one type, the first in place."""
    both = _binary(name, function)

    def add(dest: int, source: int, n: int, size: int) -> None:
        both(dest, dest, source, n)

    return add


def _accumulate_reversed(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays of one type, the second in place."""
    both = _binary(name, function)

    def behind(dest: int, source: int, n: int, size: int) -> None:
        both(dest, source, dest, n)

    return behind


def _start_half(half: str, function: str) -> Loop:
    """Return a loop that combines two arrays of 16-bit floats into float32."""
    widen, _ = float16.CONVERSIONS[half]
    combined = _WIDE_FUNCTIONS[function]

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
    combined = _WIDE_FUNCTIONS[function]

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
    "start": _combine_into,
    "add": _accumulate,
    "behind": _accumulate_reversed,
    "start_half": _start_half,
    "add_half": _add_half,
    "round": _round,
    "mean": _mean,
}
