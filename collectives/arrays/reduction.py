"""The operations that combine arrays of several ranks: SUM MEAN MIN MAX PRODUCT.

| dtype | SUM PRODUCT | MEAN | MIN MAX |
| --- | --- | --- | --- |
| float16, bfloat16 | computed in float32, rounded once at the end | as SUM | yes |
| float32, float64 | in their own precision | yes | yes, a NaN wins |
| complex64, complex128 | in their own precision | yes | error: complex numbers have no order |
| integers | modulo 2^bits, as in NumPy | error: it would have to truncate | yes |
| bool | error: it would wrap to 0 or 1 | error | yes: MIN is "all", MAX is "any" |

MEAN divides by the number of ranks *before* the sum, so that the sum of values near the largest
number of the dtype does not overflow where their mean fits.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from collectives.arrays.device import DeviceBuffer
from collectives.arrays.host import Array, is_float

__all__ = [
    "MAX",
    "MEAN",
    "MIN",
    "PRODUCT",
    "SUM",
    "Op",
    "check",
    "combine",
    "prepare",
    "quiet",
    "work_dtype",
]


class Op(Enum):
    """A reduction; the value is its name in messages."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"


SUM, MEAN, MIN, MAX, PRODUCT = Op.SUM, Op.MEAN, Op.MIN, Op.MAX, Op.PRODUCT

_UFUNCS: dict[Op, Callable[..., Array]] = {
    SUM: np.add,
    MEAN: np.add,
    MIN: np.minimum,
    MAX: np.maximum,
    PRODUCT: np.multiply,
}


def check(op: Op, dtype: np.dtype[Any], *, operation: str) -> None:
    """Refuse a pair of op and dtype that has no meaning.

    Raises:
        TypeError: see the table of this module.
    """
    if not isinstance(op, Op):
        names = " ".join(o.value for o in Op)
        raise TypeError(f"{operation}: op is no reduction, expected one of {names}, got {op!r}")
    why = None
    if dtype.kind in "iu" and op is MEAN:
        why = "the mean of integers would be truncated; use SUM, or cast to a float dtype"
    elif dtype.kind == "b" and op not in (MIN, MAX):
        why = "bool has no sum; use MIN for 'all', MAX for 'any', or cast to an integer dtype"
    elif dtype.kind == "c" and op in (MIN, MAX):
        why = "complex numbers have no order; reduce the real or the absolute value"
    if why is not None:
        raise TypeError(f"{operation}: {op.value} of {dtype} is not defined: {why}")


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a reduction of `dtype` is computed and sent."""
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize == 2 else dtype


def quiet() -> np.errstate:
    """Let an overflow or a NaN be a result, whatever the program has told NumPy.

    A loss scaler waits for it and needs no warning; and an error on the one rank that meets it
    would leave the others waiting.
    """
    return np.errstate(all="ignore")


def prepare(buffer: Array, op: Op, size: int) -> None:
    """Do, in place, what has to happen to every rank's contribution before it is combined."""
    if op is MEAN and size > 1:
        with quiet():
            np.divide(buffer, size, out=buffer)


def combine(op: Op) -> Callable[[Array, Array], None]:
    """Return `f(accumulator, contribution)`, which changes the accumulator in place."""
    ufunc = _UFUNCS[op]

    def into(accumulator: Array, contribution: Array) -> None:
        if isinstance(accumulator, DeviceBuffer):
            accumulator.combine(op.value, contribution)
            return
        with quiet():
            ufunc(accumulator, contribution, out=accumulator)

    return into
