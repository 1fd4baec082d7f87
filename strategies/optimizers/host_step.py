"""Optimizer steps on host arrays, in one compiled loop.

`strategies.optimizers.rule_loops` has the loops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from collectives.kernels import machine_code
from strategies.optimizers import rules

__all__ = ["apply", "sum_of_squares"]

Array = npt.NDArray[Any]

# Elements of 16-bit arrays that are widened, changed and rounded at a time: three or four float32
# arrays of this length fit in the level 2 cache.
_TILE = 16384
# The codecs of messages convert 16-bit floats at memory speed.
_CODECS = {
    codec.dtype: codec
    for compression in (cc.FP16, cc.BF16)
    if (codec := compression.codec(np.dtype(np.float32), cc.SUM, network=False))
}

_loop = functools.partial(machine_code.procedure, "strategies.optimizers.rule_loops")


def apply(
    rule: rules.Rule,
    value: Array,
    gradient: Array,
    slots: Sequence[Array],
    numbers: Sequence[float],
) -> None:
    """Change a variable and its slots in place.

    Args:
        rule: a function of `rules`.
        value: any shape, float16, bfloat16, float32 or float64.
        gradient: same shape; the value's dtype or its dtype of arithmetic.
        slots: same shape, in the dtype of arithmetic.
        numbers: numbers of the rule.

    Cost: memory of two tiles for 16-bit floats; a copy of each array that is not contiguous.
    """
    arrays = [_flat(array) for array in (value, gradient, *slots)]
    # float32 and float64 are changed in place, in one pass.
    if value.dtype.itemsize > 2:
        _run(rule, arrays, numbers)
    else:
        for start in range(0, value.size, _TILE):
            tiles = [array[start : start + _TILE] for array in arrays]
            part, *others = [_widen(tile) for tile in tiles]
            _run(rule, [part, *others], numbers)
            # Rounded once, after the whole formula.
            tiles[0][...] = _CODECS[value.dtype].pack(part)
    for array, flat in zip((value, *slots), (arrays[0], *arrays[2:]), strict=True):
        # Results of a copy go back to the array, such as one with strides.
        if flat.flags.owndata:  # `_flat` made a copy
            array[...] = flat.reshape(array.shape)


def sum_of_squares(array: Array) -> float:
    """Return the sum of the squares of all elements in float64, in a fixed order.

    The order depends only on the number of elements. Squares of float64 numbers may overflow.

    Args:
        array: any shape, float16, bfloat16, float32 or float64.
    """
    flat = _flat(array)
    total = np.zeros(rules.LANES)
    # One tile for wide floats: the loop itself streams through memory.
    step = max(flat.size, 1) if flat.dtype.itemsize > 2 else _TILE
    for start in range(0, flat.size, step):
        tile = _widen(flat[start : start + step])
        _loop("squares", tile.dtype.name, arguments=3)(
            tile.ctypes.data, tile.size, total.ctypes.data
        )
    # In the order of the lanes, so that the bits do not depend on the processor.
    return float(sum(total.tolist()))


def _flat(array: Array) -> Array:
    """Return an array as one dimension, as a view if possible."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flatten()
    # Compiled loops expect aligned arrays; a view into a file may not be aligned.
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
    given = _as_array(tuple(numbers), dtype)
    if getattr(rules, getattr(rule, "__name__", ""), None) is not rule:  # a rule of the user
        from strategies.optimizers import rule_loops

        # Without value and gradient, the rest are slots.
        compiled = rule_loops.compile_rule(rule, dtype, len(arrays) - 2, len(numbers))
        compiled(*arrays, tuple(given))
        return
    value, gradient, *slots = (array.ctypes.data for array in arrays)
    loop = _loop("rule", rule.__name__, dtype.name, arguments=7)
    loop(value, gradient, *slots, *[0] * (3 - len(slots)), given.ctypes.data, arrays[0].size)


@functools.lru_cache(maxsize=16)  # all variables of a step mostly share their numbers
def _as_array(numbers: tuple[float, ...], dtype: np.dtype[Any]) -> Array:
    # Typed numbers: a Python float would make a float64 formula for float32 arrays.
    return np.array(numbers, dtype)
