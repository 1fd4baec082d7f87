"""Reductions computed through another one, with a conversion before and after.

| op | before | reduced by | after |
| --- | --- | --- | --- |
| LOGICAL_AND, _OR, _XOR | bool: nonzero; a NaN is nonzero | BITWISE_... | 0 or 1 of the dtype |
| INTEGER_MEAN | widened to 64 bits | SUM | divided by P, truncated towards zero |
| prescale, postscale | times `prescale` | the op | times `postscale` |

Scaling uses the dtype of sums: 16-bit floats are widened first, and rounded once, at the end. The
sum of an INTEGER_MEAN is exact for integers of up to 32 bits. For 64-bit integers the sum must fit
into 64 bits, otherwise it wraps around, as in every other sum.

Each rank converts a private copy, so the result does not depend on the algorithm.

Cost: two passes over the array, and a copy of it; 16-bit floats travel as 32-bit floats.
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
    """Conversion of one reduction into another, for arrays of one dtype.

    Attributes:
        op: the reduction that is computed.
        dtype: dtype of that reduction.
        original: dtype of the arrays.
        size: number of ranks.
        asked: the caller's op.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
    """

    op: Op
    dtype: np.dtype[Any]
    original: np.dtype[Any]
    size: int
    asked: Op
    prescale: float = 1
    postscale: float = 1

    def lend(self, loan: HostArgument) -> HostArgument:
        """Return the converted input of the reduction, in place of the caller's array."""
        # The layout of the argument, so that its result has the same.
        own = np.empty_like(loan.host, self.dtype)
        self.put(loan.host, own)

        # In the caller's dtype first, then to the caller's memory.
        def give_back(result: Array) -> Any:
            made = self.back(result)
            return loan.restore(
                made if loan.target is None else host_arrays.copy_to(made, loan.target)
            )

        # The own copy is also the target, because no caller sees it.
        return HostArgument(own, own, give_back)

    def put(self, array: Array, own: Array) -> None:
        """Write the converted input to `own`, which has the shape of `array` and dtype `dtype`."""
        if self.asked in _BITWISE:
            # True also for NaN, which differs from 0.
            np.not_equal(array, 0, out=own)
            return
        own[...] = array
        if self.prescale != 1:
            with reduction.ignore_float_errors():
                # In the dtype of sums: rounding comes once, at the end.
                own *= self.prescale

    def back(self, result: Array) -> Array:
        """Return the caller's result; may overwrite and reuse the memory of `result`."""
        with reduction.ignore_float_errors():
            if self.asked is INTEGER_MEAN:
                result = _truncate(result, self.size)
            elif self.postscale != 1:
                result *= self.postscale
            # A view would show the widened elements.
            return np.asarray(result).astype(self.original, copy=False)


def validate_scales(prescale: Any, postscale: Any, *, operation: str) -> dict[str, float]:
    """Return the scales of a reduction by name, empty if both are 1.

    Raises:
        TypeError: a scale is not a number.
        ValueError: a scale is not finite.
    """
    given = {"prescale": prescale, "postscale": postscale}
    for word, scale in given.items():
        # `Real` also covers NumPy's numbers and fractions.
        if not isinstance(scale, Real):
            raise TypeError(f"{operation}: {word} is not a real number, got {scale!r}")
        if not math.isfinite(scale):
            raise ValueError(f"{operation}: {word} is not finite, got {scale}")
    # Floats, so that 2 and 2.0 give equal descriptions on all ranks.
    return {} if prescale == 1 == postscale else {word: float(n) for word, n in given.items()}


def lower(
    op: Op,
    dtype: np.dtype[Any],
    size: int,
    scales: dict[str, float],
    *,
    operation: str,
    algorithm: str = "auto",
) -> Lowering | None:
    """Check a reduction, and return its lowering; None if the op is computed directly.

    Args:
        op: reduction operation.
        dtype: dtype of the arrays.
        size: number of ranks.
        scales: return value of `validate_scales`.
        operation: name of the operation, for errors.
        algorithm: as for `reduction.check`.

    Raises:
        TypeError: the op is not defined for the dtype, or scaling would require rounding.
        ValueError: as `reduction.check`.
    """
    # First, so that an undefined op is reported as such.
    reduction.check(op, dtype, operation=operation, by_way=True, algorithm=algorithm)
    if scales and (dtype.kind in "biu" or op in LOWERED):
        raise TypeError(
            f"{operation}: {op.value} of {dtype} cannot be scaled, since the result would have to "
            f"be rounded; cast to a float dtype (got {scales})"
        )
    work: np.dtype[Any]
    if op in _BITWISE:
        work, by = np.dtype(bool), _BITWISE[op]
    elif op is INTEGER_MEAN:
        # uint64 sums do not fit into int64; all other integers do.
        work, by = np.dtype(np.uint64 if dtype == np.uint64 else np.int64), SUM
    elif scales:
        work, by = reduction.work_dtype(dtype), op
    else:
        return None
    return Lowering(by, work, dtype, size, op, **scales)


def _truncate(total: Array, size: int) -> Array:
    """Divide integers, and truncate towards zero."""
    # NumPy's `//` rounds down; a negative remainder moves the quotient up by one.
    quotient = total // size
    if total.dtype.kind == "i":
        quotient += (total < 0) & (quotient * size != total)
    return quotient
