"""Compilation of the loops in `collectives.kernels.int8`.

A loop gets addresses and counts. Each works on one block at a time, whose numbers lie on the stack
meanwhile: nothing else points there, so that all of it is vectorised.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, from_dtype, types
from numba.extending import register_jitable

from collectives.kernels import numba_compiler
from collectives.kernels.combine import FUNCTIONS
from collectives.kernels.float16 import bits_of, float_of, widen_bfloat16
from collectives.kernels.int8 import BLOCK, MOST, NUMBERS
from collectives.kernels.intrinsics import on_stack, pointer

__all__ = ["make"]

_I = np.int32
_U = np.uint32
_F = np.float32
_BYTES = BLOCK.itemsize

# Bits of float32 numbers:
_MAGNITUDE = _U(0x7FFFFFFF)  # all but the sign
_INFINITY = _I(0x7F800000)
_USUAL = _I(0x7F700000)  # 3.2e38, and 126 steps of a block with no larger number are one, too
_LARGEST = _F(np.finfo(np.float32).max)

# In the bits of a step, which is positive: some codes stand for no multiple of it.
_MARK = _U(0x8000)

# 1.5 2^23, to which a small number is added: its last bit is 1, so that the sum is a whole number,
# the nearest, a tie to the even one; and its last 8 bits are those of that number as an int8.
_WHOLE = _F(12582912)

# Codes that stand for no multiple of the step.
_NAN, _MINUS_INFINITY, _PLUS_INFINITY = _I(-128), _I(-127), _I(127)

# Too long for LLVM to inline them unasked.
inlined = register_jitable(forceinline=True)


def make(symbol: str, kind: str, *words: str) -> bytes:
    """Return an object file with a loop; arguments as `machine_code.load`."""
    function, arguments = _KINDS[kind]
    signature = types.void(*[types.int64] * arguments)
    return numba_compiler.object_code(function(*words), signature, symbol)


@inlined
def _magnitude(x: Any) -> Any:
    """Return the bits of a float32 without its sign, whose order is that of the numbers."""
    return _I(bits_of(x) & _MAGNITUDE)


@inlined
def _codes(block: Any) -> Any:
    return carray(pointer(block + 2), NUMBERS, np.int8)


@inlined
def _store_scale(block: Any, largest: Any, mark: Any) -> Any:
    """Store the step for the bits of the largest number, and return it."""
    # Rounded up, so that no code is larger than MOST.
    half = _U(_U(bits_of(_F(float_of(_U(largest)) / _F(MOST))) + _U(0xFFFF)) >> _U(16))
    carray(pointer(block), 1, np.uint16)[0] = half | mark
    return widen_bfloat16(half)


@inlined
def _nearest(x: Any, step: Any) -> Any:
    return _I(bits_of(_F(_F(x / step) + _WHOLE)))


@inlined
def _pack(total: Any, block: Any) -> Any:
    """Turn the numbers of a tile into a block; returns its step."""
    # Each integer keeps its 32 bits: numba's own choice is 64, by which LLVM vectorises less.
    largest = _I(0)
    for i in range(NUMBERS):
        largest = _I(max(largest, _magnitude(_F(total[i]))))
    if largest > _USUAL:
        return _pack_nonfinite(total, block)
    step = _store_scale(block, largest, _U(0))
    divisor = step if step > _F(0) else _F(1)
    codes = _codes(block)
    for i in range(NUMBERS):
        codes[i] = np.int8(_nearest(_F(total[i]), divisor))
    return step


@inlined
def _pack_nonfinite(total: Any, block: Any) -> Any:
    """As `_pack`, where numbers are infinite, or none, or so large that MOST steps would be."""
    largest = _I(0)
    for i in range(NUMBERS):
        magnitude = _magnitude(_F(total[i]))
        largest = _I(max(largest, magnitude if magnitude < _INFINITY else _I(0)))
    step = _store_scale(block, largest, _MARK)
    divisor = step if step > _F(0) else _F(1)
    most = _I(min(_F(MOST), _F(_LARGEST / divisor)))
    codes = _codes(block)
    for i in range(NUMBERS):
        x = _F(total[i])
        code = _I(max(-most, min(most, np.int8(_nearest(x, divisor)))))
        beyond = _PLUS_INFINITY if x > _F(0) else _MINUS_INFINITY
        code = code if _magnitude(x) < _INFINITY else beyond
        codes[i] = np.int8(code if _magnitude(x) <= _INFINITY else _NAN)
    return step


@inlined
def _bits_of_step(block: Any) -> Any:
    return _U(carray(pointer(block), 1, np.uint16)[0])


@inlined
def _number(code: Any, step: Any) -> Any:
    """Return the number that a code of a marked block stands for."""
    number = _F(_F(code) * step)
    number = _F(np.inf) if code == _PLUS_INFINITY else number
    number = _F(-np.inf) if code == _MINUS_INFINITY else number
    return _F(np.nan) if code == _NAN else number


def _narrow(name: str) -> Callable[..., None]:
    """Return a loop that packs `n` numbers, divided; with a residual unless its address is 0."""
    dtype = np.dtype(name)
    number = dtype.type
    size = dtype.itemsize
    stack = on_stack(from_dtype(dtype), NUMBERS)

    def narrow(source: int, out: int, n: int, divisor: int, residual: int) -> None:
        total = carray(stack(), NUMBERS)
        by = number(divisor)
        for start in range(0, n, NUMBERS):
            m = min(NUMBERS, n - start)
            x = carray(pointer(source + start * size), NUMBERS, dtype)
            block = out + start // NUMBERS * _BYTES
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
            left = carray(pointer(residual + start * size), NUMBERS, dtype)
            for i in range(m):
                total[i] += left[i]
            step, codes = _pack(total, block), _codes(block)
            for i in range(m):
                error = total[i] - number(_F(_F(codes[i]) * step))
                # What is no number lacks nothing.
                left[i] = error if error - error == 0 else left[i]

    return narrow


def _widen(name: str) -> Callable[..., None]:
    """Return a loop that unpacks `n` numbers."""
    dtype = np.dtype(name)
    number = dtype.type
    size = dtype.itemsize

    def widen(source: int, out: int, n: int) -> None:
        for start in range(0, n, NUMBERS):
            m = min(NUMBERS, n - start)
            block = source + start // NUMBERS * _BYTES
            half, codes = _bits_of_step(block), _codes(block)
            step = widen_bfloat16(half & ~_MARK)
            y = carray(pointer(out + start * size), NUMBERS, dtype)
            if half & _MARK:
                for i in range(m):
                    y[i] = number(_number(codes[i], step))
            else:
                for i in range(m):
                    y[i] = number(_F(_F(codes[i]) * step))

    return widen


def _reduce(function: str) -> Callable[..., None]:
    """Return a loop that combines the blocks of all ranks in rank order, and packs the result.

    `parts` has a row of `width` blocks for every other rank. Arguments as `int8.reduce`.
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
                row = p if p < rank else p - 1
                block = mine if p == rank else parts + (row * width + k) * _BYTES
                half, codes = _bits_of_step(block), _codes(block)
                step = widen_bfloat16(half & ~_MARK)
                if half & _MARK:
                    for i in range(NUMBERS):
                        x = _number(codes[i], step)
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


# How a kind is made, and how many arguments it has.
_KINDS: dict[str, tuple[Callable[..., Callable[..., None]], int]] = {
    "narrow": (_narrow, 5),
    "widen": (_widen, 3),
    "reduce": (_reduce, 7),
}
