"""Compilation of the loops in `collectives.kernels.half_loops`.

Loops take addresses, counts and integer divisors. Sums are made in tiles on the stack. Nothing else
points to them, so LLVM vectorises all loops.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from collectives.kernels import float16, numba_compiler
from collectives.kernels.combine import FUNCTIONS
from collectives.kernels.float16 import jitable, single
from collectives.kernels.intrinsics import on_stack, pointer

__all__ = ["all_words", "make"]

# Elements per tile. Three tiles stay in the level 1 cache.
_TILE = 2048


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.load`."""
    function, arguments = _KINDS[kind]
    signature = types.void(*[types.int64] * arguments)
    return numba_compiler.object_code(function(*words), signature, symbol)


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all loops."""
    for half in float16.CONVERSIONS:
        for wide in ("float32", "float64"):
            yield from ((kind, half, wide) for kind in ("widen", "narrow", "carry"))
        yield from (("reduce", half, function) for function in FUNCTIONS)


def _widen(half: str, wide: str) -> Callable[..., None]:
    widened, dtype = float16.CONVERSIONS[half][0], np.dtype(wide)

    def widen(source: int, out: int, n: int) -> None:
        x, y = carray(pointer(source), n, np.uint16), carray(pointer(out), n, dtype)
        for i in range(n):
            y[i] = widened(x[i])

    return widen


def _narrow(half: str, wide: str) -> Callable[..., None]:
    rounded, dtype = float16.CONVERSIONS[half][1], np.dtype(wide)
    number = dtype.type

    def narrow(source: int, out: int, n: int, divisor: int) -> None:
        x, y = carray(pointer(source), n, dtype), carray(pointer(out), n, np.uint16)
        # A division by 1 would cost time and change nothing.
        if divisor == 1:
            for i in range(n):
                y[i] = rounded(single(x[i]))
        else:
            by = number(divisor)
            for i in range(n):
                y[i] = rounded(single(number(x[i] / by)))

    return narrow


def _carry(half: str, wide: str) -> Callable[..., None]:
    """Return `narrow` with a residual."""
    dtype, settle = np.dtype(wide), _settle(half)
    number, stack = dtype.type, on_stack(from_dtype(dtype), _TILE)

    def carry(source: int, out: int, n: int, divisor: int, residual: int) -> None:
        x, y = carray(pointer(source), n, dtype), carray(pointer(out), n, np.uint16)
        left, total = carray(pointer(residual), n, dtype), carray(stack(), _TILE, dtype)
        by = number(divisor)
        for start in range(0, n, _TILE):
            m = min(_TILE, n - start)
            for i in range(m):
                total[i] = number(x[start + i] / by) + left[start + i]
            settle(total, y, left, start, m)

    return carry


def _settle(half: str) -> Callable[..., Any]:
    widened, rounded = float16.CONVERSIONS[half]

    @jitable
    def settle(total: Any, out: Any, residual: Any, start: int, m: int) -> None:
        """Round a tile, and store the errors in its residual, except where they are not finite."""
        # Two loops, because each one alone is vectorised.
        for i in range(m):
            out[start + i] = rounded(single(total[i]))
        for i in range(m):
            error = total[i] - widened(out[start + i])
            # Not finite: `error - error` is NaN, and the residual keeps its element.
            residual[start + i] = error if error - error == 0 else residual[start + i]

    return settle


def _reduce(half: str, function: str) -> Callable[..., None]:
    """Return a loop that combines the parts of all ranks, and rounds the result."""
    widened, rounded = float16.CONVERSIONS[half]
    combined, settle = FUNCTIONS[function], _settle(half)
    first_stack, second_stack = (on_stack(types.float32, _TILE) for _ in range(2))

    def reduce(
        parts: int, width: int, count: int, own: int, n: int, rank: int, divisor: int, residual: int
    ) -> None:
        mine, by = carray(pointer(own), n, np.uint16), np.float32(divisor)
        left = carray(pointer(residual), n, np.float32)
        total = carray(first_stack(), _TILE, np.float32)
        term = carray(second_stack(), _TILE, np.float32)
        for start in range(0, n, _TILE):
            m = min(_TILE, n - start)
            # Rank order, with the own part at its place.
            for p in range(count + 1):
                at = own
                if p != rank:
                    at = parts + 2 * width * (p if p < rank else p - 1)
                part = carray(pointer(at + 2 * start), m, np.uint16)
                # The first part begins the total, which saves a pass.
                into = term if p else total
                for i in range(m):
                    into[i] = widened(part[i])
                if divisor != 1:
                    for i in range(m):
                        into[i] = np.float32(into[i] / by)
                if p:
                    for i in range(m):
                        total[i] = combined(total[i], term[i])
            if residual:
                for i in range(m):
                    total[i] += left[start + i]
                settle(total, mine, left, start, m)
            else:
                for i in range(m):
                    mine[start + i] = rounded(total[i])

    return reduce


# Kind -> (function that makes the loop, number of arguments).
_KINDS: dict[str, tuple[Callable[..., Callable[..., None]], int]] = {
    "widen": (_widen, 3),
    "narrow": (_narrow, 4),
    "carry": (_carry, 5),
    "reduce": (_reduce, 8),
}
