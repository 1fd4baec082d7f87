"""Loops over 16-bit floats: widen, round and reduce at memory speed.

`collectives.kernels.float16` defines the conversions to and from float16 and bfloat16; a float64 is
rounded once, not twice. `collectives.kernels.half_loops_kernel` has the loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from collectives.arrays.device import is_half
from collectives.arrays.host_arrays import Array, address
from collectives.arrays.reduction import RULES, Op
from collectives.kernels import machine_code

__all__ = ["narrow", "reduce", "widen"]

_WIDE = (np.dtype(np.float32), np.dtype(np.float64))
_NOTHING = np.empty(0, np.float32)


def widen(source: Array, out: Array) -> None:
    """Convert `source` to `out`, exactly.

    Args:
        source: shape (n,), float16 or bfloat16, contiguous.
        out: shape (n,), float32 or float64, contiguous; must not overlap `source`.

    Raises:
        TypeError, ValueError: a dtype, length or layout is wrong.
    """
    _check("widen", half=source, wide=out, length=source.size)
    _loop("widen", source.dtype, out.dtype.name)(address(source), address(out), out.size)


def narrow(source: Array, out: Array, *, divisor: int = 1, residual: Array | None = None) -> None:
    """Divide `source`, round it to 16 bits, and store it in `out`.

    A residual is added before the rounding, and then holds the rounding error; its elements stay
    unchanged where the result is not finite.

    Args:
        source: shape (n,), float32 or float64, contiguous.
        out: shape (n,), float16 or bfloat16, contiguous; must not overlap `source`.
        divisor: the quotient is rounded to the source's dtype first.
        residual: shape (n,), dtype of the source, contiguous; changed in place.

    Raises:
        TypeError, ValueError: a dtype, length or layout is wrong.
    """
    _check("narrow", half=out, wide=source, length=out.size)
    where = address(source), address(out), out.size, divisor
    if residual is None:
        _loop("narrow", out.dtype, source.dtype.name)(*where)
        return
    _check("narrow", half=out, wide=residual, length=out.size)
    if residual.dtype != source.dtype:
        raise TypeError(
            f"narrow: the residual has the wrong dtype, expected {source.dtype}, "
            f"got {residual.dtype}"
        )
    _loop("carry", out.dtype, source.dtype.name)(*where, address(residual))


def reduce(
    parts: Array,
    own: Array,
    *,
    rank: int,
    op: Op,
    divisor: int = 1,
    residual: Array | None = None,
) -> None:
    """Replace one rank's 16-bit part by the reduction of all ranks' parts, rounded once.

    Every part is widened, divided and combined in float32, in rank order.

    Args:
        parts: shape (P - 1, m), float16 or bfloat16, C-contiguous: the parts of the other ranks in
            rank order; the first n elements are used.
        own: shape (n,), n <= m, same dtype, contiguous: this rank's part, and the result.
        rank: position of `own` among the parts.
        op: the reduction.
        divisor: divides every part.
        residual: shape (n,), float32: added before the rounding, then holds its error, as in
            `narrow`.

    Raises:
        TypeError, ValueError: a dtype, length or layout is wrong.
    """
    left = _NOTHING if residual is None else residual
    length = 0 if residual is None else own.size
    _check("reduce", half=own, wide=left, length=length)
    if parts.dtype != own.dtype or left.dtype != np.float32:
        raise TypeError(
            f"reduce: the arrays do not belong together, expected two of the same 16-bit float and "
            f"a float32 residual, got {parts.dtype}, {own.dtype} and {left.dtype}"
        )
    if parts.ndim != 2 or parts.shape[1] < own.size or not parts.flags.c_contiguous:
        raise ValueError(
            f"reduce: parts do not fit, expected C-contiguous rows of at least {own.size} "
            f"elements, got shape {parts.shape}"
        )
    if not 0 <= rank <= len(parts):
        raise ValueError(f"reduce: no such rank, expected 0 .. {len(parts)}, got {rank}")
    loop = _loop("reduce", own.dtype, RULES[op].function)
    carried = 0 if residual is None else address(residual)
    loop(address(parts), parts.shape[1], len(parts), address(own), own.size, rank, divisor, carried)


@functools.cache
def _loop(kind: str, half: np.dtype[np.generic], word: str) -> Callable[..., None]:
    arguments = {"widen": 3, "narrow": 4, "carry": 5, "reduce": 8}[kind]
    return machine_code.procedure(
        "collectives.kernels.half_loops_kernel", kind, half.name, word, arguments=arguments
    )


def _check(operation: str, *, half: Array, wide: Array, length: int) -> None:
    """Check arguments, because the loops do not."""
    if not is_half(half.dtype) or wide.dtype not in _WIDE:
        raise TypeError(
            f"{operation}: wrong dtypes, expected float16 or bfloat16, and float32 or float64, "
            f"got {half.dtype} and {wide.dtype}"
        )
    flat = half.ndim == wide.ndim == 1 and half.flags.c_contiguous and wide.flags.c_contiguous
    if not flat or wide.size != length:
        raise ValueError(
            f"{operation}: arrays do not fit, expected one dimension, contiguous, equal lengths, "
            f"got shapes {half.shape} and {wide.shape}"
        )
