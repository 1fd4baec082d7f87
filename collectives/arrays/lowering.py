"""Reductions computed through another one, with a conversion before and after.

| asked for | before | combined by | after |
| --- | --- | --- | --- |
| LOGICAL_AND, _OR, _XOR | bool: is it not zero? a NaN is not | BITWISE_... | 0 or 1 of the dtype |
| INTEGER_MEAN | widened to 64 bits | SUM | divided by P, truncated towards zero |
| prescale, postscale | times `prescale` | the op | times `postscale` |

Numbers are scaled in the dtype in which they are added up: 16-bit floats are widened before all of
this, and rounded once, at the end. The sum of an INTEGER_MEAN is exact for integers of up to 32
bits; of 64 it has to fit 64 bits, as everywhere, or it wraps around.

All this is done to a copy, by each rank for itself, so that it is the same for all algorithms.

Cost: two passes over the array, and a copy of it; 16-bit floats travel as 32.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import host_arrays, reduction
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.arrays.reduction import (
    BITWISE_AND,
    BITWISE_OR,
    BITWISE_XOR,
    INTEGER_MEAN,
    LOGICAL_AND,
    LOGICAL_OR,
    LOGICAL_XOR,
    LOWERED,
    SUM,
    Op,
)

__all__ = ["Lowering", "lower", "validate_scales"]

_BITWISE = {LOGICAL_AND: BITWISE_AND, LOGICAL_OR: BITWISE_OR, LOGICAL_XOR: BITWISE_XOR}


class Lowering(NamedTuple):
    """How arrays of one dtype are reduced by way of another reduction.

    Attributes:
        op: of that one.
        dtype: in which it combines.
        original: the dtype of the arrays.
        size: the number of ranks.
        asked: what the caller has asked for.
        prescale: the number before it.
        postscale: the number after it.
    """

    op: Op
    dtype: np.dtype[Any]
    original: np.dtype[Any]
    size: int
    asked: Op
    prescale: float = 1
    postscale: float = 1

    def lend(self, loan: HostArgument) -> HostArgument:
        """Return what is to be reduced, in place, in place of a caller's array."""
        own = np.empty_like(loan.host, self.dtype)
        self.put(loan.host, own)

        def give_back(result: Array) -> Any:
            made = self.back(result)
            return loan.restore(
                made if loan.target is None else host_arrays.copy_to(made, loan.target)
            )

        return HostArgument(own, own, give_back)

    def put(self, array: Array, own: Array) -> None:
        """Write to `own`, of the same shape and of `dtype`, what is to be reduced."""
        if self.asked in _BITWISE:
            np.not_equal(array, 0, out=own)
            return
        own[...] = array
        if self.prescale != 1:
            with reduction.ignore_float_errors():
                own *= self.prescale

    def back(self, result: Array) -> Array:
        """Return what was asked for, perhaps in the memory of the result, which is overwritten."""
        with reduction.ignore_float_errors():
            if self.asked is INTEGER_MEAN:
                result = _truncate(result, self.size)
            elif self.postscale != 1:
                result *= self.postscale
            return np.asarray(result).astype(self.original, copy=False)


def validate_scales(prescale: Any, postscale: Any, *, operation: str) -> dict[str, float]:
    """Return the scales of a reduction by their words, nothing if both are 1.

    Raises:
        TypeError: a scale is not a number.
        ValueError: a scale is not finite.
    """
    given = {"prescale": prescale, "postscale": postscale}
    for word, scale in given.items():
        if not isinstance(scale, Real):
            raise TypeError(f"{operation}: {word} is not a real number, got {scale!r}")
        if not math.isfinite(scale):
            raise ValueError(f"{operation}: {word} is not finite, got {scale}")
    return {} if prescale == 1 == postscale else {word: float(n) for word, n in given.items()}


def lower(
    op: Op, dtype: np.dtype[Any], size: int, scales: dict[str, float], *, operation: str
) -> Lowering | None:
    """Check a reduction, and return how it goes by way of another one; None if it goes straight.

    Args:
        op: how to combine.
        dtype: of the arrays.
        size: the number of ranks.
        scales: as `validate_scales` has returned them.
        operation: the caller's name, for the errors.

    Raises:
        TypeError: the op is not defined for the dtype, or scaled numbers would have to be rounded.
    """
    reduction.check(op, dtype, operation=operation, by_way=True)
    if scales and (dtype.kind in "biu" or op in LOWERED):
        raise TypeError(
            f"{operation}: {op.value} of {dtype} cannot be scaled, since the result would have to "
            f"be rounded; cast to a float dtype (got {scales})"
        )
    work: np.dtype[Any]
    if op in _BITWISE:
        work, by = np.dtype(bool), _BITWISE[op]
    elif op is INTEGER_MEAN:
        work, by = np.dtype(np.uint64 if dtype == np.uint64 else np.int64), SUM
    elif scales:
        work, by = reduction.work_dtype(dtype), op
    else:
        return None
    return Lowering(by, work, dtype, size, op, **scales)


def _truncate(total: Array, size: int) -> Array:
    """Divide integers, and truncate towards zero."""
    quotient = total // size
    if total.dtype.kind == "i":
        quotient += (total < 0) & (quotient * size != total)
    return quotient
