"""Compilation of optimizer rules into loops over host arrays.

The rules of this package become object files. A rule of the user is compiled by numba at its first
call, in less than a second, and cached on disk.

Importing this module loads numba.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

# First, because it says how to install numba.
from collectives.kernels import numba_compiler  # isort: skip
import numba
import numpy as np
from numba import carray, types
from numba.extending import overload, register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

from collectives.kernels.numba_compiler import pointer
from strategies.optimizers import rules

__all__ = ["all_words", "compile_rule", "make"]


# Compiled rules call `math.sqrt` where devices call the array function. numba needs an outer
# function, which returns the implementation for these types.
@overload(rules.square_root)
def _square_root(x: Any) -> Callable[[Any], Any]:
    def root(x: Any) -> Any:
        return math.sqrt(x)

    return root


@overload(rules.larger)
def _larger(x: Any, y: Any) -> Callable[[Any, Any], Any]:
    def choice(x: Any, y: Any) -> Any:
        # `x != x` is true for NaN, which must win as in NumPy's `maximum`.
        return x if x > y or x != x else y

    return choice


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.load`."""
    loop, arguments = (_squares, 3) if kind == "squares" else (_rule_loop, 7)
    signature = types.void(*[types.int64] * arguments)
    return numba_compiler.object_code(loop(*words), signature, symbol)


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all loops."""
    for dtype in ("float32", "float64"):
        yield "squares", dtype
        yield from (("rule", name, dtype) for name in rules.COUNTS)


def _rule_loop(name: str, dtype_name: str) -> Callable[..., None]:
    """Return a loop over a variable, a gradient and up to three slots, given by addresses."""
    slots, numbers = rules.COUNTS[name]
    dtype = np.dtype(dtype_name)
    looped = register_jitable(rules.loop(_with_one_nan(getattr(rules, name)), slots))
    # A tuple's length is part of its type, so it must be a constant.
    count, tuple_of = numbers, to_fixed_tuple

    def none(value: int, gradient: int, a: int, b: int, c: int, given: int, n: int) -> None:
        x, g = carray(pointer(value), n, dtype), carray(pointer(gradient), n, dtype)
        looped(x, g, tuple_of(carray(pointer(given), count, dtype), count))

    def one(value: int, gradient: int, a: int, b: int, c: int, given: int, n: int) -> None:
        x, g = carray(pointer(value), n, dtype), carray(pointer(gradient), n, dtype)
        first = carray(pointer(a), n, dtype)
        looped(x, g, first, tuple_of(carray(pointer(given), count, dtype), count))

    def two(value: int, gradient: int, a: int, b: int, c: int, given: int, n: int) -> None:
        x, g = carray(pointer(value), n, dtype), carray(pointer(gradient), n, dtype)
        first, second = carray(pointer(a), n, dtype), carray(pointer(b), n, dtype)
        looped(x, g, first, second, tuple_of(carray(pointer(given), count, dtype), count))

    def three(value: int, gradient: int, a: int, b: int, c: int, given: int, n: int) -> None:
        x, g = carray(pointer(value), n, dtype), carray(pointer(gradient), n, dtype)
        first, second = carray(pointer(a), n, dtype), carray(pointer(b), n, dtype)
        third = carray(pointer(c), n, dtype)
        looped(x, g, first, second, third, tuple_of(carray(pointer(given), count, dtype), count))

    return (none, one, two, three)[slots]


@functools.cache
def compile_rule(
    rule: rules.Rule, dtype: np.dtype[Any], slots: int, numbers: int
) -> Callable[..., None]:
    """Compile a user's rule for arrays `(value, gradient, *slots, numbers)`, or load it."""
    number: Any = numba.from_dtype(dtype)
    # The gradient is read only, so callers may pass a read-only array.
    changed, read = (types.Array(number, 1, "C", readonly=only) for only in (False, True))
    parameters = types.UniTuple(number, numbers)  # type: ignore[no-untyped-call]
    signature = types.void(changed, read, *[changed] * slots, parameters)
    loop = rules.loop(_with_one_nan(rule), slots)
    # Python's error model checks each division, which prevents vectorization.
    return numba_compiler.compiled(
        loop, signature, includes=[__file__], nogil=True, error_model="numpy"
    )


@functools.cache
def _with_one_nan(rule: rules.Rule) -> rules.Rule:
    """Return a rule whose NaNs all have the bits of `numpy.nan`, callable from loops.

    `collectives.kernels.combine` gives the reason.
    """
    formula = register_jitable(rule)
    canonical = numba_compiler.canonical_nans

    def with_one_nan(*inputs: Any) -> Any:
        return canonical(formula(*inputs))

    jitted: rules.Rule = register_jitable(with_one_nan)
    return jitted


def _squares(dtype_name: str) -> Callable[..., None]:
    """Return a loop that adds the squares of `n` elements to `rules.LANES` sums in float64."""
    dtype, lanes = np.dtype(dtype_name), rules.LANES

    def squares(array: int, n: int, sums: int) -> None:
        x, total = carray(pointer(array), n, dtype), carray(pointer(sums), lanes, np.float64)
        # Whole rounds of lanes first, so that the inner loop has a fixed length.
        whole = n // lanes * lanes
        for i in range(0, whole, lanes):
            for lane in range(lanes):
                number = np.float64(x[i + lane])
                total[lane] += number * number
        for i in range(whole, n):
            number = np.float64(x[i])
            total[i - whole] += number * number

    return squares
