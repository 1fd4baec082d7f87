"""Compilation of the loops in `collectives.kernels.loops`, one per dtype and operation.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import register_jitable

from collectives.arrays.device import is_half
from collectives.arrays.dtypes import NUMBERS
from collectives.arrays.reduction import OWN_FUNCTIONS, RULES
from collectives.kernels import float16, loops, numba_compiler
from collectives.kernels.combine import BITWISE, FUNCTIONS
from collectives.kernels.intrinsics import (
    canonical_nan,
    load_half_pair,
    multiply_add,
    pointer,
    store_half_pair,
)

__all__ = ["all_words", "loop", "make"]

_FUNCTIONS = FUNCTIONS | BITWISE


@float16.jitable
def _add_wide(a: Any, b: Any) -> Any:
    return a + b


@float16.jitable
def _multiply_wide(a: Any, b: Any) -> Any:
    return a * b


# Functions for 16-bit floats widened to float32. Sums and products need not return NumPy's NaN,
# because rounding does: 64 KiB of float16 take 4.8 us, and 5.6 us if both do.
_WIDE_FUNCTIONS = FUNCTIONS | {"add": _add_wide, "multiply": _multiply_wide}

# MEAN adds 16-bit floats times 2^-16: the float32 sum of bfloat16 may overflow, and a scaled sum
# does not, for up to 65,536 ranks. Other means keep their bits: the smallest bfloat16, 2^-133,
# becomes the smallest float32, and sums of numbers that small are exact. Time of the loops, as a
# multiple of the time without scaling: 1.00 to 1.01 (Xeon, AVX-512).
_SCALE = np.float32(2.0**-16)

Loop = Callable[[int, int, int, int], None]


def _inline(function: Loop) -> Loop:
    """Inline a loop into its caller, so that LLVM vectorises it for the caller's addresses.

    A called loop is not vectorised if two addresses are equal: adding 64 KiB of float32 in place
    then takes 9 us instead of 2.
    """
    inlined: Loop = register_jitable(inline="always")(function)
    return inlined


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.load`."""
    return numba_compiler.object_code(loop(kind, *words), types.void(*[types.int64] * 4), symbol)


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all loops that `collectives.kernels.loops` may ask for."""
    pairs = [(dtype, op) for dtype in NUMBERS for op, rule in RULES.items() if rule.function]
    found: set[tuple[str, ...]] = set()
    for dtype, op in pairs:
        if ("f" if is_half(dtype) else dtype.kind) not in RULES[op].undefined:
            names = (
                *loops.names(dtype, op),
                *loops.names(dtype, op, of_two=True),
                loops.reversed_name(dtype, op),
            )
            found.update(name[1:] for name in names if name is not None)
    yield from sorted(found)


def loop(kind: str, *words: str) -> Loop:
    """Return a loop that numba can compile; `collectives.kernels.loops` lists the words."""
    return _KINDS[kind](*words)


def _divide(name: str) -> Loop:
    """Return a loop that copies and divides by the number of ranks."""
    dtype = np.dtype(name)
    # MEAN of complex numbers divides both parts.
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
    # numba has no 16-bit floats.
    if name in float16.CONVERSIONS:
        return _both_halves(name, function)
    dtype, parts = np.dtype(name), 1
    # Products and operations of the user mix the parts of complex numbers.
    if dtype.kind == "c" and function in ("add", "mean"):  # real and imaginary parts alike
        dtype, parts = np.empty(0, name).real.dtype, 2
    # `mean` exists for two ranks only.
    combined = _mean_of_two(dtype) if function == "mean" else _scalar(function, dtype)

    def both(dest: int, first: int, second: int, n: int) -> None:
        y = carray(pointer(dest), parts * n, dtype)
        a = carray(pointer(first), parts * n, dtype)
        b = carray(pointer(second), parts * n, dtype)
        for i in range(parts * n):
            y[i] = combined(a[i], b[i])

    return _inline(both)


def _scalar(function: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return the function of two numbers of a dtype that a loop calls."""
    return _FUNCTIONS.get(function) or _own(function, dtype.type)


def _wide(function: str) -> Callable[..., Any]:
    return _WIDE_FUNCTIONS.get(function) or _own(function, np.float32)


def _own(function: str, number: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation of the user, whose result is converted to a dtype."""
    own = float16.jitable(OWN_FUNCTIONS[function])

    def combined(a: Any, b: Any) -> Any:
        # numba computes integers in 64 bits, and floats with a constant in float64.
        result = number(own(a, b))
        return canonical_nan(result, result, result)

    return float16.jitable(combined)


def _mean_of_two(dtype: np.dtype[Any]) -> Callable[..., Any]:
    half = dtype.type(0.5)

    def mean(a: Any, b: Any) -> Any:
        result = a * half + b * half  # does not overflow where a + b does
        return canonical_nan(result, result, result)

    return float16.jitable(mean)


def _both_halves(name: str, function: str) -> Loop:
    """Return `_binary` for 16-bit floats, each result rounded once."""
    widen, narrow = float16.CONVERSIONS[name]
    # MEAN of two ranks adds halves, because a sum of two bfloat16 may overflow; rounded once.
    combined = _sum_of_scaled(0.5) if function == "mean" else _wide(function)

    def by_ones(dest: int, first: int, second: int, n: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(first), n, np.uint16)
        b = carray(pointer(second), n, np.uint16)
        for i in range(n):
            y[i] = narrow(combined(widen(a[i]), widen(b[i])))

    ones = _inline(by_ones)
    # Pairs are faster for bfloat16 only.
    if name not in float16.PAIRS:
        return ones
    low, high, narrow_pair = float16.PAIRS[name]

    def by_pairs(dest: int, first: int, second: int, n: int) -> None:
        for i in range(n // 2):
            a, b = load_half_pair(first, i), load_half_pair(second, i)
            lower, upper = combined(low(a), low(b)), combined(high(a), high(b))
            store_half_pair(dest, i, narrow_pair(lower, upper))
        # An odd number of elements leaves one.
        done = n // 2 * 2
        ones(dest + 2 * done, first + 2 * done, second + 2 * done, n - done)

    return _inline(by_pairs)


def _sum_of_scaled(factor: float) -> Callable[..., Any]:
    """Return a function that adds two float32 times a power of two, which is exact."""
    scale = np.float32(factor)

    def add(a: Any, b: Any) -> Any:
        return multiply_add(a, scale, np.float32(b * scale))

    return float16.jitable(add)


def _accumulate(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays of one type, the first in place."""
    both = _binary(name, function)

    # `size` is unused: all loops share one signature.
    def add(dest: int, source: int, n: int, size: int) -> None:
        both(dest, dest, source, n)

    return add


def _accumulate_reversed(name: str, function: str) -> Loop:
    """Return a loop that combines two arrays of one type, the second in place."""
    both = _binary(name, function)

    def behind(dest: int, source: int, n: int, size: int) -> None:
        # The left operand is the other rank's, so the order is that of ranks.
        both(dest, source, dest, n)

    return behind


def _start_half(half: str, function: str) -> Loop:
    """Return a loop that combines two arrays of 16-bit floats into float32."""
    widen, _ = float16.CONVERSIONS[half]
    combined = _sum_of_scaled(_SCALE) if function == "mean" else _wide(function)

    def start(dest: int, first: int, second: int, n: int) -> None:
        # float32 totals: rounded once, by `save`.
        y = carray(pointer(dest), n, np.float32)
        a = carray(pointer(first), n, np.uint16)
        b = carray(pointer(second), n, np.uint16)
        for i in range(n):
            y[i] = combined(widen(a[i]), widen(b[i]))

    return start


@float16.jitable
def _add_scaled(total: Any, x: Any) -> Any:
    return multiply_add(x, _SCALE, total)


def _add_half(half: str, function: str) -> Loop:
    """Return a loop that combines float32 with 16-bit floats."""
    widen, _ = float16.CONVERSIONS[half]
    combined = _add_scaled if function == "mean" else _wide(function)

    def add(dest: int, source: int, n: int, size: int) -> None:
        a = carray(pointer(dest), n, np.float32)
        x = carray(pointer(source), n, np.uint16)
        for i in range(n):
            a[i] = combined(a[i], widen(x[i]))

    return add


def _round(half: str) -> Loop:
    _, narrow = float16.CONVERSIONS[half]

    def save(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(source), n, np.float32)
        for i in range(n):
            y[i] = narrow(a[i])

    return save


def _mean(half: str) -> Loop:
    """Return a loop that divides a sum of scaled floats by the number of ranks, and rounds it."""
    _, narrow = float16.CONVERSIONS[half]

    def save(dest: int, source: int, n: int, size: int) -> None:
        y = carray(pointer(dest), n, np.uint16)
        a = carray(pointer(source), n, np.float32)
        # Divided in float32, before the rounding; without the scale of the sum.
        divisor = np.float32(np.float32(size) * _SCALE)
        for i in range(n):
            y[i] = narrow(np.float32(a[i] / divisor))

    return save


_KINDS: dict[str, Callable[..., Loop]] = {
    "divide": _divide,
    "start": _binary,
    "add": _accumulate,
    "behind": _accumulate_reversed,
    "start_half": _start_half,
    "add_half": _add_half,
    "round": _round,
    "mean": _mean,
}
