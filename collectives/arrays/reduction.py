"""Reduction operations: how arrays of several ranks are combined.

| dtype | SUM PRODUCT | MEAN | MIN MAX | BITWISE_... |
| --- | --- | --- | --- | --- |
| float16, bfloat16 | computed in float32, rounded once at the end | as SUM | yes | error |
| float32, float64 | in their own precision | yes | yes, a NaN wins | error |
| complex64, complex128 | in their own precision | yes | error: they have no order | error |
| integers | modulo 2^bits, as in NumPy | error: it would have to truncate | yes | yes |
| bool | error: it would wrap to 0 or 1 | error | yes: MIN is "all", MAX is "any" | yes |
| all others | error | error | error | error |

MEAN divides by the number of ranks *before* the sum. So a sum of values near the largest number of
the dtype does not overflow if the mean fits.

LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR (all rows but the last) and INTEGER_MEAN (integers) use one of
these reductions (`collectives.arrays.lowering`); MINLOC and MAXLOC use two
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
    "mean_scale",
    "work_dtype",
]


class Op(Enum):
    """A reduction operation; the value is its name in messages."""

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

    # By identity: Enum's `__hash__` is Python code and costs 0.1 us in every lookup of a plan.
    __hash__ = object.__hash__


SUM, MEAN, MIN, MAX, PRODUCT = Op.SUM, Op.MEAN, Op.MIN, Op.MAX, Op.PRODUCT
BITWISE_AND, BITWISE_OR, BITWISE_XOR = Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR
LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR = Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR
INTEGER_MEAN, MINLOC, MAXLOC = Op.INTEGER_MEAN, Op.MINLOC, Op.MAXLOC

# Ops computed through another op, and ops that return locations; few operations support them.
LOWERED = (LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR, INTEGER_MEAN)
LOCATING = (MINLOC, MAXLOC)


class OpSpec(NamedTuple):
    """Functions of an op, and the dtypes that it rejects.

    Attributes:
        function: name of the function in NumPy, CuPy and `kernels.combine`; "" for a lowered op.
        mpi: name of the MPI op, or "".
        undefined: kind of dtype -> reason why the op is undefined.
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
    MEAN: OpSpec("add", "SUM", {**_NO_SUM, "i": _NO_MEAN, "u": _NO_MEAN}),  # see `prescale`
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
    """Check that an op is defined for a dtype.

    Args:
        op: the caller's argument.
        dtype: dtype of the array.
        operation: name of the operation, for errors.
        by_way: whether the operation supports lowered ops.

    Raises:
        TypeError: see the table of this module.
    """
    if not isinstance(op, Op):
        names = " ".join(o.value for o in Op)
        raise TypeError(
            f"{operation}: op is not a reduction, expected one of {names} "
            f"from the module collectives, got {op!r}"
        )
    # Ops that need two reductions or a conversion exist for few operations.
    if op in LOCATING or (op in LOWERED and not by_way):
        others = "allreduce, reduce and reduce_scatter"
        where = others if op in LOCATING else f"{others}, alone or grouped"
        raise TypeError(f"{operation}: {op.value} is not supported, only by {where}")
    if dtype not in NUMBERS:
        raise TypeError(
            f"{operation}: {op.value} is not defined for this dtype, expected {NUMBER_NAMES}, got "
            f"{dtype}; arrays of other dtypes can only be moved"
        )
    # bfloat16 has the kind "V" in NumPy, and is a float here.
    kind = "f" if is_half(dtype) else dtype.kind
    why = RULES[op].undefined.get(kind)
    if why is not None:
        raise TypeError(f"{operation}: {op.value} of {dtype} is not defined: {why}")


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a reduction of `dtype` is computed and sent."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def ignore_float_errors() -> np.errstate:
    """Return a context manager that silences float errors, whatever NumPy's settings are.

    A loss scaler expects overflows without a warning, and an exception on one rank would leave the
    other ranks waiting.
    """
    return np.errstate(all="ignore")


def prescale(buffer: Array, op: Op, size: int) -> None:
    """Scale a rank's contribution in place, as the op requires before the reduction."""
    # Before the sum, so that a sum near the largest number does not overflow.
    if op is MEAN and size > 1:
        with ignore_float_errors():
            device.divide(buffer, size)


def mean_scale(size: int) -> int:
    """Return the divisor for `prescale` if ranks divide the sum of up to `size` arrays by a count.

    A power of two, which changes no bit of the mean, except of subnormal numbers. Divide the sum of
    the scaled arrays by the count over the scale.
    """
    return 1 << (size - 1).bit_length()


def combine(op: Op) -> Callable[[Array, Array], None]:
    """Return `f(accumulator, contribution)`, which updates the accumulator in place."""
    function = RULES[op].function

    def into(accumulator: Array, contribution: Array) -> None:
        # Per call, because NumPy's error state belongs to the thread.
        with ignore_float_errors():
            device.combine(function, accumulator, contribution)

    return into
