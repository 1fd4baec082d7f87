"""Compilation of the loops in `collectives.kernels.int8`.

A loop takes addresses and counts. It works on one block at a time, with the numbers in a stack
array that nothing else points to, so LLVM vectorises all of it.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray, from_dtype, types
from numba.extending import register_jitable

from collectives.kernels import numba_compiler
from collectives.kernels.combine import FUNCTIONS
from collectives.kernels.float16 import bits_of, float_of, widen_bfloat16
from collectives.kernels.int8 import BLOCK, MOST, NUMBERS
from collectives.kernels.intrinsics import on_stack, pointer

__all__ = ["all_words", "make"]

_I = np.int32
_U = np.uint32
_F = np.float32
_BYTES = BLOCK.itemsize

# Bits of float32 numbers:
_MAGNITUDE = _U(0x7FFFFFFF)  # all but the sign
_INFINITY = _I(0x7F800000)
_USUAL = _I(0x7F700000)  # 3.2e38; 126 steps of a block up to this magnitude are still finite
_LARGEST = _F(np.finfo(np.float32).max)

# Set in the bits of a step, which is positive: some codes are not multiples of the step.
_MARK = _U(0x8000)

# 1.5 2^23. Adding a small number rounds it to the nearest integer, ties to even, because the last
# bit of the sum is 1; the last 8 bits of the sum are the integer as an int8.
_WHOLE = _F(12582912)

# Codes that are not multiples of the step.
_NAN, _MINUS_INFINITY, _PLUS_INFINITY = _I(-128), _I(-127), _I(127)

# LLVM does not inline functions of this length by default.
inlined = register_jitable(forceinline=True)


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.load`."""
    function, arguments = _KINDS[kind]
    signature = types.void(*[types.int64] * arguments)
    return numba_compiler.object_code(function(*words), signature, symbol)


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all loops."""
    for wide in ("float32", "float64"):
        yield "narrow", wide
        yield "widen", wide
    for function in FUNCTIONS:
        yield "reduce", function


@inlined
def _magnitude(x: Any) -> Any:
    """Return the bits of a float32 without its sign; they sort like the magnitudes."""
    return _I(bits_of(x) & _MAGNITUDE)


@inlined
def _codes(block: Any) -> Any:
    return carray(pointer(block + 2), NUMBERS, np.int8)


@inlined
def _store_scale(block: Any, largest: Any, mark: Any) -> Any:
    """Store the step for the bits of the largest magnitude, and return the step."""
    # Rounded up, so that no code is larger than MOST.
    half = _U(_U(bits_of(_F(float_of(_U(largest)) / _F(MOST))) + _U(0xFFFF)) >> _U(16))
    carray(pointer(block), 1, np.uint16)[0] = half | mark
    return widen_bfloat16(half)


@inlined
def _nearest(x: Any, step: Any) -> Any:
    return _I(bits_of(_F(_F(x / step) + _WHOLE)))


@inlined
def _pack(total: Any, block: Any) -> Any:
    """Pack the numbers of a tile into a block; return its step."""
    # Integers are kept at 32 bits: numba would use 64, and LLVM vectorise less.
    largest = _I(0)
    for i in range(NUMBERS):
        largest = _I(max(largest, _magnitude(_F(total[i]))))
    # Rare, so the usual path has no branches per number.
    if largest > _USUAL:
        return _pack_nonfinite(total, block)
    step = _store_scale(block, largest, _U(0))
    # A block of zeros has a step of 0.
    divisor = step if step > _F(0) else _F(1)
    codes = _codes(block)
    # A quotient of at most 126 is an exact integer in the last 8 bits.
    for i in range(NUMBERS):
        codes[i] = np.int8(_nearest(_F(total[i]), divisor))
    return step


@inlined
def _pack_nonfinite(total: Any, block: Any) -> Any:
    """Run `_pack` for infinities, NaNs, and numbers for which 126 steps would overflow."""
    largest = _I(0)
    for i in range(NUMBERS):
        magnitude = _magnitude(_F(total[i]))
        # Infinities and NaNs have codes of their own, and no part in the step.
        largest = _I(max(largest, magnitude if magnitude < _INFINITY else _I(0)))
    step = _store_scale(block, largest, _MARK)
    divisor = step if step > _F(0) else _F(1)
    # Fewer codes if 126 steps would overflow.
    most = _I(min(_F(MOST), _F(_LARGEST / divisor)))
    codes = _codes(block)
    for i in range(NUMBERS):
        x = _F(total[i])
        # Bounded by `most`, because a larger code times the step would overflow.
        code = _I(max(-most, min(most, np.int8(_nearest(x, divisor)))))
        beyond = _PLUS_INFINITY if x > _F(0) else _MINUS_INFINITY
        code = code if _magnitude(x) < _INFINITY else beyond
        # NaN has a larger magnitude than infinity.
        codes[i] = np.int8(code if _magnitude(x) <= _INFINITY else _NAN)
    return step


@inlined
def _bits_of_step(block: Any) -> Any:
    return _U(carray(pointer(block), 1, np.uint16)[0])


@inlined
def _number(code: Any, step: Any) -> Any:
    """Return the number of a code of a marked block."""
    number = _F(_F(code) * step)
    number = _F(np.inf) if code == _PLUS_INFINITY else number
    number = _F(-np.inf) if code == _MINUS_INFINITY else number
    # The NaN of NumPy, so that all ranks get the same bits.
    return _F(np.nan) if code == _NAN else number


def _narrow(name: str) -> Callable[..., None]:
    """Return a loop that divides and packs `n` numbers, with a residual unless its address is 0."""
    dtype = np.dtype(name)
    number = dtype.type
    size = dtype.itemsize
    stack = on_stack(from_dtype(dtype), NUMBERS)

    def narrow(source: int, out: int, n: int, divisor: int, residual: int) -> None:
        # On the stack, so that LLVM knows that nothing else points there.
        total = carray(stack(), NUMBERS)
        by = number(divisor)
        for start in range(0, n, NUMBERS):
            # The last block may be partly filled.
            m = min(NUMBERS, n - start)
            x = carray(pointer(source + start * size), NUMBERS, dtype)
            block = out + start // NUMBERS * _BYTES
            # Zeros do not change the largest magnitude.
            for i in range(m, NUMBERS):
                total[i] = number(0)
            if divisor == 1:
                for i in range(m):
                    total[i] = x[i]
            else:
                for i in range(m):
                    total[i] = x[i] / by
            if residual == 0:
                _pack(total, block)
                continue
            # The errors of this block, in the dtype of the source.
            left = carray(pointer(residual + start * size), NUMBERS, dtype)
            for i in range(m):
                total[i] += left[i]
            # The codes are read back: the error is that of the stored numbers.
            step, codes = _pack(total, block), _codes(block)
            for i in range(m):
                error = total[i] - number(_F(_F(codes[i]) * step))
                # Infinities and NaNs keep the old residual, because `error - error` is a NaN.
                left[i] = error if error - error == 0 else left[i]

    return narrow


def _widen(name: str) -> Callable[..., None]:
    dtype = np.dtype(name)
    number = dtype.type
    size = dtype.itemsize

    def widen(source: int, out: int, n: int) -> None:
        for start in range(0, n, NUMBERS):
            m = min(NUMBERS, n - start)
            block = source + start // NUMBERS * _BYTES
            half, codes = _bits_of_step(block), _codes(block)
            # Without the mark, the bits of a positive bfloat16.
            step = widen_bfloat16(half & ~_MARK)
            y = carray(pointer(out + start * size), NUMBERS, dtype)
            # Blocks with a mark are rare, and need a test per number.
            if half & _MARK:
                for i in range(m):
                    y[i] = number(_number(codes[i], step))
            else:
                for i in range(m):
                    y[i] = number(_F(_F(codes[i]) * step))

    return widen


def _reduce(function: str) -> Callable[..., None]:
    """Return a loop that combines the blocks of all ranks in rank order, and packs the result.

    `parts` has a row of `width` blocks per other rank. Further arguments as `int8.reduce`.
    """
    combined = FUNCTIONS[function]
    stack = on_stack(types.float32, NUMBERS)

    def reduce(
        parts: int, width: int, others: int, own: int, n: int, rank: int, residual: int
    ) -> None:
        total = carray(stack(), NUMBERS)
        for k in range(n):
            mine = own + k * _BYTES
            for p in range(others + 1):
                # The rows skip this rank.
                row = p if p < rank else p - 1
                block = mine if p == rank else parts + (row * width + k) * _BYTES
                half, codes = _bits_of_step(block), _codes(block)
                step = widen_bfloat16(half & ~_MARK)
                if half & _MARK:
                    for i in range(NUMBERS):
                        x = _number(codes[i], step)
                        # The first rank's numbers begin the total.
                        total[i] = combined(total[i], x) if p else x
                elif p:
                    for i in range(NUMBERS):
                        total[i] = combined(total[i], _F(_F(codes[i]) * step))
                else:
                    for i in range(NUMBERS):
                        total[i] = _F(_F(codes[i]) * step)
            if residual == 0:
                _pack(total, mine)
                continue
            left = carray(pointer(residual + 4 * k * NUMBERS), NUMBERS, np.float32)
            for i in range(NUMBERS):
                total[i] += left[i]
            step, codes = _pack(total, mine), _codes(mine)
            for i in range(NUMBERS):
                error = total[i] - _F(_F(codes[i]) * step)
                left[i] = error if error - error == 0 else left[i]

    return reduce


# Kind -> (function that makes the loop, number of arguments).
_KINDS: dict[str, tuple[Callable[..., Callable[..., None]], int]] = {
    "narrow": (_narrow, 5),
    "widen": (_widen, 3),
    "reduce": (_reduce, 7),
}
