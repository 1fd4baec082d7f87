"""Element-wise loops per dtype and operation, compiled at first use.

The rounds of the node engine (`collectives.node.reduce_kernels`) call them by address, tile by
tile. A loop is `f(dest, source, n, size)`: addresses of two arrays of `n` elements that do not
overlap, and the number of ranks, by which MEAN divides; or, to begin a sum, `f(dest, a, b, n)`.
Arrays that overlap in no element make each loop simple enough to be vectorised.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.device import is_half
from collectives.arrays.reduction import RULES, Op
from collectives.kernels import machine_code

__all__ = ["Loops", "reversed_loop", "reversed_name", "loops", "names"]


class Loops(NamedTuple):
    """Addresses of the loops of one dtype and op; 0 stands for a plain copy.

    `fill` copies a contribution to where others read it, `start` combines two in the working type,
    `add` goes on with a third and so on, `save` writes the result back in the type of the arrays.
    """

    fill: int
    start: int
    add: int
    save: int


@functools.cache
def loops(dtype: np.dtype[Any], op: str, *, of_two: bool = False) -> Loops:
    """Return the loops for arrays of a dtype.

    16-bit floats are added as 32-bit ones and rounded once, at the end; MEAN divides them there,
    and others before the sum, so that it does not overflow where the mean fits.

    Args:
        dtype: of the arrays.
        op: the name of one that needs no detour, such as "SUM", defined for the dtype.
        of_two: whether no more than two arrays are combined: `start` and `add` then do all of
            that at once, with the same bits, and nothing is left to `fill` and `save`.
    """
    found = names(dtype, op, of_two=of_two)
    machine_code.ensure([name for name in found if name is not None])
    return Loops(*(0 if name is None else machine_code.load(*name) for name in found))


def names(
    dtype: np.dtype[Any], op: str, *, of_two: bool = False
) -> tuple[tuple[str, ...] | None, ...]:
    """Return what `machine_code` knows the loops by, in the order of `Loops`; None for a copy."""
    if of_two:
        return None, _loop("start", *_binary(dtype, op)), _loop("add", *_binary(dtype, op)), None
    function = RULES[Op(op)].function
    mean = op == "MEAN"
    if is_half(dtype):
        half = dtype.name
        save = _loop("mean" if mean else "round", half)
        return None, _loop("start_half", half, function), _loop("add_half", half, function), save
    storage = _storage(dtype)
    fill = _loop("divide", storage) if mean else None
    return fill, _loop("start", storage, function), _loop("add", storage, function), None


def reversed_loop(dtype: np.dtype[Any], op: str) -> int:
    """Return the loop of two arrays that puts the other one before its own.

    As `add`, with operands exchanged; arguments as `loops`.
    """
    return machine_code.load(*reversed_name(dtype, op))


def reversed_name(dtype: np.dtype[Any], op: str) -> tuple[str, ...]:
    """Return what `machine_code` knows it by."""
    return _loop("behind", *_binary(dtype, op))


def _binary(dtype: np.dtype[Any], op: str) -> tuple[str, str]:
    """Return how two arrays are combined at once, as `collectives.kernels.elementwise` knows it."""
    return _storage(dtype), "mean" if op == "MEAN" else RULES[Op(op)].function


def _storage(dtype: np.dtype[Any]) -> str:
    return "uint8" if dtype.kind == "b" else dtype.name


def _loop(kind: str, *words: str) -> tuple[str, ...]:
    return ("collectives.kernels.elementwise", kind, *words)
