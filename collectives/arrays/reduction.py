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

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import device
from collectives.arrays.device import is_half
from collectives.arrays.host import Array

__all__ = [
    "MAX",
    "MEAN",
    "MIN",
    "PRODUCT",
    "RULES",
    "SUM",
    "Op",
    "Rule",
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

    # By identity: Enum's own is Python code, 0.1 us of every call that looks for its plan.
    __hash__ = object.__hash__


SUM, MEAN, MIN, MAX, PRODUCT = Op.SUM, Op.MEAN, Op.MIN, Op.MAX, Op.PRODUCT


class Rule(NamedTuple):
    """How everybody who carries out an op calls it, and where it has no meaning.

    Attributes:
        function: combines two arrays in NumPy and CuPy, two numbers in `kernels.combine`.
        mpi: the name of MPI's op.
        undefined: kinds of dtypes for which it is not defined -> why.
    """

    function: str
    mpi: str
    undefined: Mapping[str, str]


_NO_SUM = {"b": "bool has no sum; use MIN for 'all', MAX for 'any', or cast to an integer dtype"}
_NO_MEAN = "the mean of integers would be truncated; use SUM, or cast to a float dtype"
_NO_ORDER = {"c": "complex numbers have no order; reduce the real or the absolute value"}

RULES = {
    SUM: Rule("add", "SUM", _NO_SUM),
    MEAN: Rule("add", "SUM", {**_NO_SUM, "i": _NO_MEAN, "u": _NO_MEAN}),  # divided before
    MIN: Rule("minimum", "MIN", _NO_ORDER),
    MAX: Rule("maximum", "MAX", _NO_ORDER),
    PRODUCT: Rule("multiply", "PROD", _NO_SUM),
}


def check(op: Op, dtype: np.dtype[Any], *, operation: str) -> None:
    """Refuse a pair of op and dtype that has no meaning.

    Raises:
        TypeError: see the table of this module.
    """
    if not isinstance(op, Op):
        names = " ".join(o.value for o in Op)
        raise TypeError(f"{operation}: op is not a reduction, expected one of {names}, got {op!r}")
    why = RULES[op].undefined.get(dtype.kind)
    if why is not None:
        raise TypeError(f"{operation}: {op.value} of {dtype} is not defined: {why}")


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a reduction of `dtype` is computed and sent."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


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
            device.divide(buffer, size)


def combine(op: Op) -> Callable[[Array, Array], None]:
    """Return `f(accumulator, contribution)`, which changes the accumulator in place."""
    function = RULES[op].function

    def into(accumulator: Array, contribution: Array) -> None:
        with quiet():
            device.combine(function, accumulator, contribution)

    return into
