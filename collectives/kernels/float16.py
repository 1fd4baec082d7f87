"""Scalar conversions between float16 or bfloat16 and float32 in compiled code.

numba knows neither type, so that both are seen as their bits, uint16.

*Widening* is exact. *Rounding* goes to the nearest, a tie to the even one, as IEEE 754 asks for: a
number beyond the largest becomes an infinity, a small one a subnormal, an infinity and the sign of
a zero stay. Every NaN is rounded to the bits of `numpy.nan` (`kernels.combine` has the reason).
Widening keeps the sign and payload of a NaN, and sets the quiet bit of a float16.

The functions are called from loops that numba compiles; they are inlined and vectorised there.
`collectives.kernels.half_loops` has such loops over arrays.

Importing this module loads numba (about 0.3 s), so import it inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from collectives.kernels import intrinsics

__all__ = [
    "CONVERSIONS",
    "PAIRS",
    "bits_of",
    "float_of",
    "jitable",
    "round_bfloat16",
    "round_half",
    "single",
    "widen_bfloat16",
    "widen_half",
]

_U = np.uint32


def jitable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from compiled code.

    Not `njit`: a loop that holds such a function in its closure would be compiled anew in every
    process, since its key in numba's cache would contain the function's random number.
    """
    registered: Callable[..., Any] = register_jitable(function)
    return registered


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """Return the float32 that has these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _convert_from_half(typingctx: Any, half: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _convert_to_half(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@jitable
def _widen_half_by_instruction(half: Any) -> Any:
    return _convert_from_half(half)


@jitable
def _round_half_by_instruction(x: Any) -> Any:
    return types.uint16(0x7E00) if x != x else _convert_to_half(x)


# A float32 has 1 + 8 + 23 bits of sign, exponent (bias 127) and fraction, a float16 1 + 5 + 10
# (bias 15). `magnitude` is everything but the sign. The constants are bits of float32 numbers:
#   0x38000000  2^-15 = 112 << 23, the difference of the biases
#   0x38800000  2^-14, the smallest normal float16
#   0x477ff000  65520, from where on float16 rounds to infinity
#   0x7f800000  infinity


@jitable
def _widen_half_by_integers(half: Any) -> Any:
    bits = _U(half)
    magnitude = _U(_U(bits & _U(0x7FFF)) << _U(13))
    result = _U(magnitude + _U(0x38000000))
    if magnitude < _U(0x00800000):
        # Subnormal or zero: f 2^-24 is 2^-14 (1 + f 2^-10) - 2^-14, and both are normal here.
        result = bits_of(float_of(_U(magnitude + _U(0x38800000))) - np.float32(2.0**-14))
    if magnitude >= _U(0x0F800000):
        result = _U(magnitude + _U(0x70000000))  # infinity or NaN: the largest exponent
    if magnitude > _U(0x0F800000):
        result = _U(result | _U(0x00400000))
    return float_of(_U(result | _U(_U(bits & _U(0x8000)) << _U(16))))


@jitable
def _round_half_by_integers(x: Any) -> Any:
    bits = bits_of(x)
    magnitude = _U(bits & _U(0x7FFFFFFF))
    # The carry of the rounding may run into the exponent, which then is right, too.
    odd = _U(_U(magnitude >> _U(13)) & _U(1))
    result = _U(_U(magnitude - _U(0x38000000) + _U(0xFFF) + odd) >> _U(13))
    if magnitude < _U(0x38800000):
        # The last bit of a float32 in [0.5, 1) is 2^-24, that of a subnormal float16.
        result = _U(bits_of(float_of(magnitude) + np.float32(0.5)) - _U(0x3F000000))
    if magnitude >= _U(0x477FF000):
        result = _U(0x7C00)
    result = _U(result | _U(_U(bits >> _U(16)) & _U(0x8000)))
    if magnitude > _U(0x7F800000):
        result = _U(0x7E00)
    return types.uint16(result)


def _has_instruction() -> bool:
    """Tell whether the processor that numba compiles for converts float16 by itself.

    Otherwise LLVM calls a library function that no process can be relied on to have, and crashes.
    """
    triple, _, features = intrinsics.target_processor()
    if triple.startswith(("aarch64", "arm64")):
        return True
    return {"+f16c", "+avx"} <= set(features.split(","))


if _has_instruction():
    widen_half, round_half = _widen_half_by_instruction, _round_half_by_instruction
else:
    widen_half, round_half = _widen_half_by_integers, _round_half_by_integers


@jitable
def widen_bfloat16(half: Any) -> Any:
    """Return the float32 of a bfloat16, given as uint16."""
    return float_of(_U(_U(half) << _U(16)))


@jitable
def _rounded_bits(x: Any) -> Any:
    """Return a float32's bits with those of its bfloat16 in the upper half."""
    bits = bits_of(x)
    odd = _U(_U(bits >> _U(16)) & _U(1))
    result = _U(bits + _U(0x7FFF) + odd)
    if x != x:
        result = _U(0x7FC00000)
    return result


@jitable
def round_bfloat16(x: Any) -> Any:
    """Return the bfloat16 of a float32, as uint16."""
    return types.uint16(_U(_rounded_bits(x) >> _U(16)))


@jitable
def _low_bfloat16(pair: Any) -> Any:
    """Return the float32 of the lower one of two bfloat16 in a uint32."""
    return float_of(_U(pair << _U(16)))


@jitable
def _high_bfloat16(pair: Any) -> Any:
    """Return that of the upper one."""
    return float_of(_U(pair & _U(0xFFFF0000)))


@jitable
def _round_bfloat16_pair(low: Any, high: Any) -> Any:
    """Return two float32 as such a pair."""
    return _U(_U(_rounded_bits(high) & _U(0xFFFF0000)) | _U(_rounded_bits(low) >> _U(16)))


# Name of a dtype -> how it is widened, and rounded to.
CONVERSIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "float16": (widen_half, round_half),
    "bfloat16": (widen_bfloat16, round_bfloat16),
}

# How two of them in a uint32 are widened, and rounded to, where that is faster: no half is moved
# into a word of its own and back. Sums of 64 KiB in 1.4 us instead of 2.3 on an AMD EPYC.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "bfloat16": (_low_bfloat16, _high_bfloat16, _round_bfloat16_pair),
}


@jitable
def single(x: Any) -> Any:
    """Return a float32 that every 16-bit type rounds as it would round `x`, float32 or float64.

    Bits of a float64 that do not fit are cut off, and the last bit is set if any of them was not
    zero. What lies between two neighbours then stays between them, so that the next rounding, to at
    least two bits less, sees on which side of a tie it is. For a float32 all this is compiled away.

    Source: S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
    using rounding to odd", IEEE Trans. Comput. 57 (2008), section 3.
    """
    nearest = types.float32(x)
    rounded, exact = abs(types.float64(nearest)), abs(types.float64(x))
    bits = bits_of(nearest)
    if rounded > exact:
        bits = _U(_U(bits - _U(1)) | _U(1))
    if rounded < exact:
        bits = _U(bits | _U(1))
    return float_of(bits)
