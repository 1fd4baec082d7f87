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
(`collectives.operations.minloc`). Operations of the user (`collectives.operations.own_operations`)
exist for all rows but bool; 16-bit floats are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    "OPS",
    "OWN_FUNCTIONS",
    "PRODUCT",
    "RULES",
    "SUM",
    "Op",
    "OpSpec",
    "OwnSpec",
    "check",
    "combine",
    "prescale",
    "ignore_float_errors",
    "is_on_host",
    "mean_scale",
    "work_dtype",
]


class Op:
    """A reduction operation: one of this module, or one that `collectives.operation` returned.

    Args:
        value: name of the operation in messages.
    """

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<Op {self.value}>"

    def __reduce__(self) -> str:
        """Copy and pickle an op as its name in this module: ops are compared by identity."""
        return self.value


SUM, MEAN, MIN, MAX, PRODUCT = map(Op, ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"))
BITWISE_AND, BITWISE_OR, BITWISE_XOR = map(Op, ("BITWISE_AND", "BITWISE_OR", "BITWISE_XOR"))
LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR = map(Op, ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_XOR"))
INTEGER_MEAN, MINLOC, MAXLOC = map(Op, ("INTEGER_MEAN", "MINLOC", "MAXLOC"))

# Ops computed through another op, and ops that return locations; few operations support them.
LOWERED = (LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR, INTEGER_MEAN)
LOCATING = (MINLOC, MAXLOC)


class OwnSpec(NamedTuple):
    """Checks and functions of an operation of the user, beside its compiled loops.

    Attributes:
        check: compiles the loops for a dtype and checks them, for the operation of that name.
        combine: combines two arrays in place; the flag makes the second one the left operand.
        commutative: whether the order of the operands is free.
        identity: result of `exscan` on rank 0; None for no result.
    """

    check: Callable[[np.dtype[Any], str], None]
    combine: Callable[[Array, Array, bool], None]
    commutative: bool
    identity: complex | None


class OpSpec(NamedTuple):
    """Functions of an op, and the dtypes that it rejects.

    Attributes:
        function: name of the function in NumPy, CuPy and `kernels.combine`; "" for a lowered op.
        mpi: name of the MPI op, or "".
        undefined: kind of dtype -> reason why the op is undefined.
        own: the rest of an operation of the user, whose `function` is a key of `OWN_FUNCTIONS`;
            None for the ops of this module.
    """

    function: str
    mpi: str
    undefined: Mapping[str, str]
    own: OwnSpec | None = None


_NO_SUM = {"b": "bool has no sum; use MIN for 'all', MAX for 'any', or cast to an integer dtype"}
_NO_MEAN = (
    "the mean of integers would be truncated; use SUM, cast to a float dtype, or say INTEGER_MEAN"
)
_NO_ORDER = {"c": "complex numbers have no order; reduce the real or the absolute value"}

_NO_BITS = dict.fromkeys("fc", "only integers and bool are numbers of bits")
_NO_TRUNCATION = {**dict.fromkeys("fc", "only integers need it; use MEAN"), **_NO_SUM}

# Operations of the user are added.
RULES: dict[Op, OpSpec] = {
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

# Functions of the user by the name in `RULES`, which compiled loops call.
OWN_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {}

# The ops of this module, in the order of `RULES`.
OPS = (*RULES, *LOCATING)


def check(
    op: Op,
    dtype: np.dtype[Any],
    *,
    operation: str,
    by_way: bool = False,
    algorithm: str = "auto",
) -> None:
    """Check that an op is defined for a dtype.

    Args:
        op: the caller's argument.
        dtype: dtype of the array.
        operation: name of the operation, for errors.
        by_way: whether the operation supports lowered ops.
        algorithm: the caller's argument, which limits operations of the user.

    Raises:
        TypeError: see the table of this module.
        ValueError: an operation of the user is not associative, or the algorithm lacks it.
    """
    if not isinstance(op, Op):
        names = " ".join(o.value for o in OPS)
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
    own = RULES[op].own
    if own is None:
        return
    if algorithm == "native" or not (own.commutative or algorithm in ("auto", "node")):
        known = "another algorithm" if own.commutative else "auto or node"
        why = "is not an operation of MPI" if own.commutative else "is not commutative"
        raise ValueError(f"{operation}: {op.value} {why}, expected {known}, got {algorithm!r}")
    own.check(dtype, operation)


def is_on_host(op: Op) -> bool:
    """Whether an op, possibly a wrong argument, is computed in host memory only."""
    return isinstance(op, Op) and (op in LOWERED or (op in RULES and RULES[op].own is not None))


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


def combine(op: Op, *, before: bool = False) -> Callable[[Array, Array], None]:
    """Return `f(accumulator, contribution)`, which updates the accumulator in place.

    Args:
        op: the reduction.
        before: whether contributions are from lower ranks than the accumulator, which matters to
            operations of the user.
    """
    function, _, _, own = RULES[op]

    def into(accumulator: Array, contribution: Array) -> None:
        # Per call, because NumPy's error state belongs to the thread.
        with ignore_float_errors():
            device.combine(function, accumulator, contribution)

    def own_into(accumulator: Array, contribution: Array) -> None:
        assert own is not None
        own.combine(accumulator, contribution, before)

    return into if own is None else own_into
