"""Loops over 16-bit floats: widen, round and reduce at memory speed.

Numbers become float16 or bfloat16, and back, as `collectives.kernels.float16` says; a float64 is
rounded once, not twice. What is compiled here is kept on disk; the first call of all takes about a
second.

Importing this module loads numba, so import it inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import RULES, Op
from collectives.kernels import float16, numba_compiler
from collectives.kernels.combine import FUNCTIONS
from collectives.kernels.float16 import jitable, single

__all__ = ["narrow", "reduce", "widen"]

# Elements that are worked on at a time. Three tiles stay in the level 1 cache, and loops that write
# one tile are vectorised where a loop that writes two arrays, which might overlap, is not.
_TILE = 2048


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call."""
    # With Python's error model each division is checked, and no loop with one is vectorised.
    return numba_compiler.compiled(function, nogil=True, error_model="numpy")


class _Loops(NamedTuple):
    """The loops of one 16-bit type, which they see as uint16; `reduce` by the function of an op."""

    widen: Callable[..., None]
    narrow: Callable[..., None]
    carry: Callable[..., None]
    reduce: Mapping[str, Callable[..., None]]


def _loops(half: str) -> _Loops:
    widened, rounded = float16.CONVERSIONS[half]

    @jitable
    def settle(total: Any, out: Any, residual: Any) -> None:
        """Round a tile whose residual is in it, and keep the error, unless it is not a number."""
        for i in range(out.size):
            out[i] = rounded(single(total[i]))
        for i in range(out.size):
            error = total[i] - widened(out[i])
            residual[i] = error if error - error == 0 else residual[i]

    @_compile
    def widen(source: Any, out: Any) -> None:
        for i in range(out.size):
            out[i] = widened(source[i])

    @_compile
    def narrow(source: Any, out: Any, divisor: Any) -> None:
        if divisor == 1:
            for i in range(out.size):
                out[i] = rounded(single(source[i]))
        else:
            for i in range(out.size):
                out[i] = rounded(single(source[i] / divisor))

    @_compile
    def carry(source: Any, out: Any, divisor: Any, residual: Any) -> None:
        total = np.empty(_TILE, source.dtype)
        for start in range(0, out.size, _TILE):
            end = min(start + _TILE, out.size)
            theirs, left = source[start:end], residual[start:end]
            for i in range(end - start):
                total[i] = theirs[i] / divisor + left[i]
            settle(total, out[start:end], left)

    reduce = {name: _reduce(half, settle, combined) for name, combined in FUNCTIONS.items()}
    return _Loops(widen, narrow, carry, reduce)


def _reduce(half: str, settle: Callable[..., Any], combined: Any) -> Callable[..., None]:
    """Return a loop that combines the parts of all ranks, and rounds or settles the result."""
    widened, rounded = float16.CONVERSIONS[half]

    @_compile
    def reduce(parts: Any, own: Any, rank: Any, divisor: Any, residual: Any) -> None:
        totals = np.empty(_TILE, np.float32)
        terms = np.empty(_TILE, np.float32)
        for start in range(0, own.size, _TILE):
            end = min(start + _TILE, own.size)
            total, term, mine = totals[: end - start], terms[: end - start], own[start:end]
            for p in range(len(parts) + 1):
                part = mine
                if p != rank:
                    part = parts[p if p < rank else p - 1][start:end]
                into = term if p else total
                for i in range(end - start):
                    into[i] = widened(part[i])
                if divisor != 1:
                    for i in range(end - start):
                        into[i] /= divisor
                if p:
                    for i in range(end - start):
                        total[i] = combined(total[i], term[i])
            if residual.size:
                left = residual[start:end]
                for i in range(end - start):
                    total[i] += left[i]
                settle(total, mine, left)
            else:
                for i in range(end - start):
                    mine[i] = rounded(total[i])

    return reduce


_LOOPS = {np.dtype(getattr(ml_dtypes, half, half)): _loops(half) for half in float16.CONVERSIONS}
_WIDE = (np.dtype(np.float32), np.dtype(np.float64))
_NOTHING = np.empty(0, np.float32)


def widen(source: Array, out: Array) -> None:
    """Fill `out` with the numbers of `source`, exactly.

    Args:
        source: shape (n,), float16 or bfloat16, contiguous.
        out: shape (n,), float32 or float64, contiguous, of memory that is not the source's.

    Raises:
        TypeError, ValueError: a dtype, length or layout is another.
    """
    loops = _check("widen", half=source, wide=out, length=source.size)
    loops.widen(source.view(np.uint16), out)


def narrow(source: Array, out: Array, *, divisor: int = 1, residual: Array | None = None) -> None:
    """Fill `out` with the numbers of `source`, divided and then rounded to 16 bits.

    With a residual, what it holds is added before the rounding, and the error of the rounding is
    kept in it; where the result is not finite, the residual stays as it was.

    Args:
        source: shape (n,), float32 or float64, contiguous.
        out: shape (n,), float16 or bfloat16, contiguous, of memory that is not the source's.
        divisor: the quotient is rounded to the source's dtype first.
        residual: shape (n,), of the source's dtype, contiguous; changed in place.

    Raises:
        TypeError, ValueError: a dtype, length or layout is another.
    """
    loops = _check("narrow", half=out, wide=source, length=out.size)
    by = source.dtype.type(divisor)
    if residual is None:
        loops.narrow(source, out.view(np.uint16), by)
        return
    _check("narrow", half=out, wide=residual, length=out.size)
    if residual.dtype != source.dtype:
        raise TypeError(
            f"narrow: the residual has the wrong dtype, expected {source.dtype}, "
            f"got {residual.dtype}"
        )
    loops.carry(source, out.view(np.uint16), by, residual)


def reduce(
    parts: Array,
    own: Array,
    *,
    rank: int,
    op: Op,
    divisor: int = 1,
    residual: Array | None = None,
) -> None:
    """Replace one rank's 16-bit part by the reduction of all ranks', rounded once.

    Every part is widened, divided and combined in float32, in rank order.

    Args:
        parts: shape (P - 1, m), float16 or bfloat16, C-contiguous: the parts of the other ranks in
            rank order, of which the first n elements count.
        own: shape (n,), n <= m, of the same dtype, contiguous: this rank's part, and the result.
        rank: the place of `own` among the parts.
        op: how to combine.
        divisor: what every part is divided by.
        residual: shape (n,), float32: added before the rounding, whose error it keeps, as in
            `narrow`.

    Raises:
        TypeError, ValueError: a dtype, length or layout is another.
    """
    left = _NOTHING if residual is None else residual
    length = 0 if residual is None else own.size
    loops = _check("reduce", half=own, wide=left, length=length)
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
    loop = loops.reduce[RULES[op].function]
    loop(parts.view(np.uint16), own.view(np.uint16), rank, np.float32(divisor), left)


def _check(operation: str, *, half: Array, wide: Array, length: int) -> _Loops:
    """Refuse what the loops, which check nothing, must not see; return those of the dtype."""
    loops = _LOOPS.get(half.dtype)
    if loops is None or wide.dtype not in _WIDE:
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
    return loops
