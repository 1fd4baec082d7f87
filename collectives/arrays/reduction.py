"""Reduction operations: how arrays of several ranks are combined.

| dtype | SUM PRODUCT | MEAN | MIN MAX | BITWISE_... |
| --- | --- | --- | --- | --- |
| float16, bfloat16 | computed in float32, rounded once at the end | as SUM | yes | error |
| float32, float64 | in their own precision | yes | yes, a NaN wins | error |
| complex64, complex128 | in their own precision | yes | error: they have no order | error |
| integers | modulo 2^bits, as in NumPy | error: it would have to truncate | yes | yes |
| bool | error: it would wrap to 0 or 1 | error | yes: MIN is "all", MAX is "any" | yes |
| all others | error | error | error | error |

MEAN divides by the number of ranks *before* the sum, so that the sum of values near the largest
number of the dtype does not overflow where their mean fits.

LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR (all rows but the last) and INTEGER_MEAN (integers) use one of
these reductions (`collectives.arrays.lowering`), MINLOC and MAXLOC two
(`collectives.operations.minloc`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import device
from collectives.arrays.device import is_half
from collectives.arrays.dtypes import NUMBER_NAMES, NUMBERS
from collectives.arrays.host_arrays import Array

__all__ = [
    "BITWISE_AND",
    "BITWISE_OR",
    "BITWISE_XOR",
    "LOWERED",
    "INTEGER_MEAN",
    "LOCATING",
    "LOGICAL_AND",
    "LOGICAL_OR",
    "LOGICAL_XOR",
    "MAX",
    "MAXLOC",
    "MEAN",
    "MIN",
    "MINLOC",
    "PRODUCT",
    "RULES",
    "SUM",
    "Op",
    "OpSpec",
    "check",
    "combine",
    "prescale",
    "ignore_float_errors",
    "work_dtype",
]


class Op(Enum):
    """A reduction; the value is its name in messages."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"
    BITWISE_AND = "BITWISE_AND"
    BITWISE_OR = "BITWISE_OR"
    BITWISE_XOR = "BITWISE_XOR"
    LOGICAL_AND = "LOGICAL_AND"
    LOGICAL_OR = "LOGICAL_OR"
    LOGICAL_XOR = "LOGICAL_XOR"
    INTEGER_MEAN = "INTEGER_MEAN"
    MINLOC = "MINLOC"
    MAXLOC = "MAXLOC"

    # By identity: Enum's own is Python code, 0.1 us of every call that looks for its plan.
    __hash__ = object.__hash__


SUM, MEAN, MIN, MAX, PRODUCT = Op.SUM, Op.MEAN, Op.MIN, Op.MAX, Op.PRODUCT
BITWISE_AND, BITWISE_OR, BITWISE_XOR = Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR
LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR = Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR
INTEGER_MEAN, MINLOC, MAXLOC = Op.INTEGER_MEAN, Op.MINLOC, Op.MAXLOC

# What only operations know that call another one; and what finds out where a number is.
LOWERED = (LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR, INTEGER_MEAN)
LOCATING = (MINLOC, MAXLOC)


class OpSpec(NamedTuple):
    """How everybody who carries out an op calls it, and where it has no meaning.

    Attributes:
        function: combines two arrays in NumPy and CuPy, two numbers in `kernels.combine`; "" where
            it goes by way of another op.
        mpi: the name of MPI's op, or "".
        undefined: kinds of dtypes for which it is not defined -> why.
    """

    function: str
    mpi: str
    undefined: Mapping[str, str]


_NO_SUM = {"b": "bool has no sum; use MIN for 'all', MAX for 'any', or cast to an integer dtype"}
_NO_MEAN = (
    "the mean of integers would be truncated; use SUM, cast to a float dtype, or say INTEGER_MEAN"
)
_NO_ORDER = {"c": "complex numbers have no order; reduce the real or the absolute value"}

_NO_BITS = dict.fromkeys("fc", "only integers and bool are numbers of bits")
_NO_TRUNCATION = {**dict.fromkeys("fc", "only integers need it; use MEAN"), **_NO_SUM}

RULES = {
    SUM: OpSpec("add", "SUM", _NO_SUM),
    MEAN: OpSpec("add", "SUM", {**_NO_SUM, "i": _NO_MEAN, "u": _NO_MEAN}),  # divided before
    MIN: OpSpec("minimum", "MIN", _NO_ORDER),
    MAX: OpSpec("maximum", "MAX", _NO_ORDER),
    PRODUCT: OpSpec("multiply", "PROD", _NO_SUM),
    BITWISE_AND: OpSpec("bitwise_and", "BAND", _NO_BITS),
    BITWISE_OR: OpSpec("bitwise_or", "BOR", _NO_BITS),
    BITWISE_XOR: OpSpec("bitwise_xor", "BXOR", _NO_BITS),
    LOGICAL_AND: OpSpec("", "", {}),
    LOGICAL_OR: OpSpec("", "", {}),
    LOGICAL_XOR: OpSpec("", "", {}),
    INTEGER_MEAN: OpSpec("", "", _NO_TRUNCATION),
}


def check(op: Op, dtype: np.dtype[Any], *, operation: str, by_way: bool = False) -> None:
    """Refuse a pair of op and dtype that has no meaning.

    Args:
        op: what a caller gives.
        dtype: of the array.
        operation: the caller's name.
        by_way: whether the operation knows the ops that go by way of others.

    Raises:
        TypeError: see the table of this module.
    """
    if not isinstance(op, Op):
        names = " ".join(o.value for o in Op)
        raise TypeError(
            f"{operation}: op is not a reduction, expected one of {names} "
            f"from the module collectives, got {op!r}"
        )
    if op in LOCATING or (op in LOWERED and not by_way):
        others = "allreduce, reduce and reduce_scatter"
        where = others if op in LOCATING else f"{others}, alone or grouped"
        raise TypeError(f"{operation}: there is no {op.value} here, but in {where}")
    if dtype not in NUMBERS:
        raise TypeError(
            f"{operation}: {op.value} is not defined for this dtype, expected {NUMBER_NAMES}, got "
            f"{dtype}; arrays of other dtypes can only be moved"
        )
    kind = "f" if is_half(dtype) else dtype.kind
    why = RULES[op].undefined.get(kind)
    if why is not None:
        raise TypeError(f"{operation}: {op.value} of {dtype} is not defined: {why}")


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a reduction of `dtype` is computed and sent."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def ignore_float_errors() -> np.errstate:
    """Let an overflow or a NaN be a result, whatever the program has told NumPy.

    A loss scaler waits for it and needs no warning; and an error on the one rank that meets it
    would leave the others waiting.
    """
    return np.errstate(all="ignore")


def prescale(buffer: Array, op: Op, size: int) -> None:
    """Do, in place, what has to happen to every rank's contribution before it is combined."""
    if op is MEAN and size > 1:
        with ignore_float_errors():
            device.divide(buffer, size)


def combine(op: Op) -> Callable[[Array, Array], None]:
    """Return `f(accumulator, contribution)`, which changes the accumulator in place."""
    function = RULES[op].function

    def into(accumulator: Array, contribution: Array) -> None:
        with ignore_float_errors():
            device.combine(function, accumulator, contribution)

    return into
