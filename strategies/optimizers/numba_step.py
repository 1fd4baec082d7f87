"""Optimizer steps on host arrays, in one compiled loop.

What is compiled is kept on disk; a rule takes less than a second when it is first used at all, and
a few milliseconds in later processes.

Importing this module loads numba, so import it inside the function that needs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload, register_jitable

import collectives as cc
from collectives.kernels import numba_compiler
from strategies.optimizers import rules

__all__ = ["apply", "sum_of_squares"]

Array = npt.NDArray[Any]

# 16-bit floats are widened, changed and rounded so many at a time: three or four float32 arrays of
# this length stay in the level 2 cache.
_TILE = 16384
_CODECS = {
    codec.dtype: codec
    for compression in (cc.FP16, cc.BF16)
    if (codec := compression.codec(np.dtype(np.float32), cc.SUM, network=False))
}
# Sums that do not wait for each other. 25 M float32: 13 ms with 16, 5.1 with 64, 2.8 with 256; the
# dot product of a BLAS library takes 2.6.
_LANES = 256


@overload(rules.square_root)
def _square_root(x: Any) -> Callable[[Any], Any]:
    def root(x: Any) -> Any:
        return math.sqrt(x)

    return root


@overload(rules.larger)
def _larger(x: Any, y: Any) -> Callable[[Any, Any], Any]:
    def choice(x: Any, y: Any) -> Any:
        return x if x > y or x != x else y

    return choice


def apply(
    rule: rules.Rule,
    value: Array,
    gradient: Array,
    slots: Sequence[Array],
    numbers: Sequence[float],
) -> None:
    """Change a variable and its slots in place.

    Args:
        rule: from `rules`.
        value: any shape, float16, bfloat16, float32 or float64.
        gradient: of the same shape, and the same dtype or the one of the arithmetic.
        slots: of the same shape, in the dtype of the arithmetic.
        numbers: what the rule takes.

    Cost: memory of two tiles for 16-bit floats; a copy of each array that is not contiguous.
    """
    arrays = [_flat(array) for array in (value, gradient, *slots)]
    if value.dtype.itemsize > 2:
        _run(rule, arrays, numbers)
    else:
        for start in range(0, value.size, _TILE):
            tiles = [array[start : start + _TILE] for array in arrays]
            part, *others = [_widen(tile) for tile in tiles]
            _run(rule, [part, *others], numbers)
            tiles[0][...] = _CODECS[value.dtype].pack(part)
    for array, flat in zip((value, *slots), (arrays[0], *arrays[2:]), strict=True):
        if flat.flags.owndata:  # a copy
            array[...] = flat.reshape(array.shape)


def sum_of_squares(array: Array) -> float:
    """Return the sum of the squares of all elements in float64, in an order of its own.

    The order depends on the number of elements alone. Squares of float64 numbers may overflow.

    Args:
        array: any shape, float16, bfloat16, float32 or float64.
    """
    flat = _flat(array)
    total = np.zeros(_LANES)
    step = max(flat.size, 1) if flat.dtype.itemsize > 2 else _TILE
    for start in range(0, flat.size, step):
        tile = _widen(flat[start : start + step])
        _squares(tile.dtype)(tile, total)
    return float(sum(total.tolist()))


def _flat(array: Array) -> Array:
    """View an array as one dimension, or copy it."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flatten()
    return flat if flat.flags.aligned else flat.copy()


def _widen(tile: Array) -> Array:
    codec = _CODECS.get(tile.dtype)
    if codec is None:
        return tile
    wide = np.empty(tile.size, np.float32)
    codec.unpack(tile, wide)
    return wide


def _run(rule: rules.Rule, arrays: Sequence[Array], numbers: Sequence[float]) -> None:
    dtype = arrays[0].dtype
    compiled = _compile_rule(rule, dtype, len(arrays) - 2, len(numbers))
    compiled(*arrays, _types_of(tuple(numbers), dtype))


@functools.lru_cache(maxsize=16)  # mostly the same for all variables of a step
def _types_of(numbers: tuple[float, ...], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    return tuple(dtype.type(number) for number in numbers)


@functools.cache
def _compile_rule(
    rule: rules.Rule, dtype: np.dtype[Any], slots: int, numbers: int
) -> Callable[..., None]:
    number: Any = numba.from_dtype(dtype)
    changed, read = (types.Array(number, 1, "C", readonly=only) for only in (False, True))
    parameters = types.UniTuple(number, numbers)  # type: ignore[no-untyped-call]
    arguments = (changed, read, *[changed] * slots, parameters)
    return _compile(rules.loop(_with_one_nan(rule), slots), arguments)


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


@functools.cache
def _squares(dtype: np.dtype[Any]) -> Callable[..., None]:
    def add(array: Any, total: Any) -> None:
        whole = array.size // _LANES * _LANES
        for i in range(0, whole, _LANES):
            for lane in range(_LANES):
                x = np.float64(array[i + lane])
                total[lane] += x * x
        for i in range(whole, array.size):
            x = np.float64(array[i])
            total[i - whole] += x * x

    read = types.Array(numba.from_dtype(dtype), 1, "C", readonly=True)
    return _compile(add, (read, types.Array(types.float64, 1, "C")))


def _compile(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[..., None]:
    """Compile for these arguments, unless a file holds the result already."""
    # With Python's error model each division is checked, and no loop with one is vectorised.
    options = {"nogil": True, "error_model": "numpy"}
    return numba_compiler.compiled(function, types.void(*arguments), includes=[__file__], **options)
