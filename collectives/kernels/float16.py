"""Scalar conversions between float16 or bfloat16 and float32 in compiled code.

numba supports neither type, so both are handled as their bits, in uint16.

*Widening* is exact. *Rounding* is to nearest, ties to even (IEEE 754): a number beyond the largest
becomes an infinity, a small one a subnormal; infinities and the sign of zero stay. Every NaN is
rounded to the bits of `numpy.nan` (`kernels.combine` has the reason). Widening keeps the sign and
payload of a NaN, and sets the quiet bit of a float16.

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
from numba.extending import register_jitable

from collectives.kernels import intrinsics
from collectives.kernels.intrinsics import emits

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

    Not `njit`: numba would recompile a loop with such a function in its closure in every process,
    because its cache key would contain the function's random number.
    """
    registered: Callable[..., Any] = register_jitable(function)
    return registered


@emits(types.uint32, types.float32)
def bits_of(builder: Any, x: Any) -> Any:
    """Return the bits of a float32 as uint32."""
    # A reinterpretation, not a conversion.
    return builder.bitcast(x, ir.IntType(32))


@emits(types.float32, types.uint32)
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@emits(types.float32, types.uint16)
def _widen_half_by_instruction(builder: Any, half: Any) -> Any:
    return builder.fpext(builder.bitcast(half, ir.HalfType()), ir.FloatType())


@emits(types.uint16, types.float32)
def _convert_to_half(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))


@jitable
def _round_half_by_instruction(x: Any) -> Any:
    # The instruction keeps payloads of NaNs, and all ranks must get the same bits.
    return types.uint16(0x7E00) if x != x else _convert_to_half(x)


# A float32 has 1 + 8 + 23 bits of sign, exponent (bias 127) and fraction, a float16 1 + 5 + 10
# (bias 15). `magnitude` is all bits but the sign. The constants are bits of float32 numbers:
#   0x38000000  2^-15 = 112 << 23, the difference of the biases
#   0x38800000  2^-14, the smallest normal float16
#   0x477ff000  65520, the smallest number that rounds to infinity
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
    # Quiet, as the instruction makes it.
    if magnitude > _U(0x0F800000):
        result = _U(result | _U(0x00400000))
    return float_of(_U(result | _U(_U(bits & _U(0x8000)) << _U(16))))


@jitable
def _round_half_by_integers(x: Any) -> Any:
    bits = bits_of(x)
    magnitude = _U(bits & _U(0x7FFFFFFF))
    # A carry of the rounding into the exponent gives the correct result.
    odd = _U(_U(magnitude >> _U(13)) & _U(1))
    result = _U(_U(magnitude - _U(0x38000000) + _U(0xFFF) + odd) >> _U(13))
    if magnitude < _U(0x38800000):
        # The last bit of a float32 in [0.5, 1) is 2^-24, as that of a subnormal float16.
        result = _U(bits_of(float_of(magnitude) + np.float32(0.5)) - _U(0x3F000000))
    # Also a carry out of the largest number.
    if magnitude >= _U(0x477FF000):
        result = _U(0x7C00)
    result = _U(result | _U(_U(bits >> _U(16)) & _U(0x8000)))
    if magnitude > _U(0x7F800000):
        result = _U(0x7E00)
    return types.uint16(result)


def _has_instruction() -> bool:
    """Return whether the target processor has float16 conversions.

    Without them LLVM calls a library function that may be missing in a process, which crashes.
    """
    # The processor that numba compiles for may differ from the host's (`NUMBA_CPU_FEATURES`).
    triple, _, features = intrinsics.target_processor()
    if triple.startswith(("aarch64", "arm64")):
        return True
    # The conversions are encoded as AVX instructions.
    return {"+f16c", "+avx"} <= set(features.split(","))


if _has_instruction():
    widen_half, round_half = _widen_half_by_instruction, _round_half_by_instruction
else:
    widen_half, round_half = _widen_half_by_integers, _round_half_by_integers


@jitable
def widen_bfloat16(half: Any) -> Any:
    """Return the float32 of a bfloat16, given as uint16."""
    # bfloat16 is the upper half of a float32.
    return float_of(_U(_U(half) << _U(16)))


@jitable
def _rounded_bits(x: Any) -> Any:
    """Return the bits of a float32, with its bfloat16 in the upper half."""
    bits = bits_of(x)
    odd = _U(_U(bits >> _U(16)) & _U(1))
    # As for float16; a carry gives infinity at the end of the range.
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
    """Return the float32 of the lower bfloat16 of a pair in a uint32."""
    return float_of(_U(pair << _U(16)))


@jitable
def _high_bfloat16(pair: Any) -> Any:
    """Return the float32 of the upper bfloat16 of a pair in a uint32."""
    return float_of(_U(pair & _U(0xFFFF0000)))


@jitable
def _round_bfloat16_pair(low: Any, high: Any) -> Any:
    """Return two float32 rounded to a pair of bfloat16 in a uint32."""
    return _U(_U(_rounded_bits(high) & _U(0xFFFF0000)) | _U(_rounded_bits(low) >> _U(16)))


# Name of a dtype -> (widen, round).
CONVERSIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "float16": (widen_half, round_half),
    "bfloat16": (widen_bfloat16, round_bfloat16),
}

# Name of a dtype -> (widen low, widen high, round) for pairs in a uint32, if pairs are faster,
# because halves need no words of their own. Sums of 64 KiB: 1.4 us instead of 2.3 on an AMD EPYC.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "bfloat16": (_low_bfloat16, _high_bfloat16, _round_bfloat16_pair),
}


@jitable
def single(x: Any) -> Any:
    """Return a float32 that every 16-bit type rounds as it would round `x`, float32 or float64.

    This is rounding to odd: excess bits of a float64 are cut off, and the last bit is set if any of
        them was nonzero. A number between two neighbours stays between them. So the next rounding,
        to at least two bits fewer, is on the correct side of a tie. For a float32 this compiles to
        nothing.

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
