"""Element-wise loops per dtype and operation, compiled at first use.

The kernels of the node engine (`collectives.node.reduce_kernels`) call the loops by address, tile
by tile. A loop is `f(dest, source, n, size)`: addresses of two arrays of `n` elements, and the
number of ranks, by which MEAN divides. Loops that begin a sum are `f(dest, a, b, n)`. The arrays
must not overlap, which keeps the loops simple enough to be vectorised.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.device import is_half
from collectives.arrays.reduction import MEAN, RULES, Op
from collectives.kernels import machine_code

__all__ = ["Loops", "reversed_loop", "reversed_name", "loops", "names"]


class Loops(NamedTuple):
    """Addresses of the loops of one dtype and op; 0 means a plain copy.

    `fill` copies a contribution to a slot. `start` combines two contributions in the working dtype,
    and `add` each further one. `save` converts the result back to the dtype of the arrays.
    """

    fill: int
    start: int
    add: int
    save: int


@functools.cache
def loops(dtype: np.dtype[Any], op: Op, *, of_two: bool = False) -> Loops:
    """Return the loops for arrays of a dtype.

    16-bit floats are added in float32, for MEAN with a small scale, and rounded once, at the end,
    where MEAN divides. Other dtypes divide before the sum. So no sum overflows if the mean fits.

    Args:
        dtype: dtype of the arrays.
        op: reduction that is defined for the dtype.
        of_two: whether at most two arrays are combined. `start` and `add` then do everything in one
            pass, with the same bits, and `fill` and `save` are 0.
    """
    found = names(dtype, op, of_two=of_two)
    # Together, so that several ranks compile one each.
    machine_code.ensure([name for name in found if name is not None])
    return Loops(*(0 if name is None else machine_code.load(*name) for name in found))


def names(
    dtype: np.dtype[Any], op: Op, *, of_two: bool = False
) -> tuple[tuple[str, ...] | None, ...]:
    """Return the loops' names for `machine_code`, in the order of `Loops`; None for a copy."""
    if of_two:
        # One pass with the operands of both ranks: nothing is left for `fill` and `save`.
        return None, _loop("start", *_binary(dtype, op)), _loop("add", *_binary(dtype, op)), None
    function = RULES[op].function
    mean = op is MEAN
    if is_half(dtype):
        half = dtype.name
        # MEAN of 16-bit floats divides the float32 total, which is rounded once.
        function = "mean" if mean else function
        save = _loop("mean" if mean else "round", half)
        return None, _loop("start_half", half, function), _loop("add_half", half, function), save
    storage = _storage(dtype)
    # Other dtypes divide each contribution, so that the sum cannot overflow.
    fill = _loop("divide", storage) if mean else None
    return fill, _loop("start", storage, function), _loop("add", storage, function), None


def reversed_loop(dtype: np.dtype[Any], op: Op) -> int:
    """Return `add` with the operands exchanged; arguments as `loops`."""
    return machine_code.load(*reversed_name(dtype, op))


def reversed_name(dtype: np.dtype[Any], op: Op) -> tuple[str, ...]:
    """Return the name of `reversed_loop` for `machine_code`."""
    return _loop("behind", *_binary(dtype, op))


def _binary(dtype: np.dtype[Any], op: Op) -> tuple[str, str]:
    """Return dtype and function of a two-array loop of `collectives.kernels.elementwise`."""
    return _storage(dtype), "mean" if op is MEAN else RULES[op].function


def _storage(dtype: np.dtype[Any]) -> str:
    # MIN and MAX of bools are those of bytes.
    return "uint8" if dtype.kind == "b" else dtype.name


def _loop(kind: str, *words: str) -> tuple[str, ...]:
    return ("collectives.kernels.elementwise", kind, *words)
