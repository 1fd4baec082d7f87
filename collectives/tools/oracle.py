"""Reference results, computed slowly from the inputs of all ranks.

Every rank can compute every rank's input, so the correct result needs no messages. `check`, `bench`
and the tests compare results with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import (
    BITWISE_AND,
    BITWISE_OR,
    BITWISE_XOR,
    INTEGER_MEAN,
    LOGICAL_AND,
    LOGICAL_OR,
    LOGICAL_XOR,
    MAX,
    MEAN,
    MIN,
    PRODUCT,
    SUM,
    Op,
)
from collectives.core import topology

__all__ = [
    "DTYPES",
    "REDUCTIONS",
    "Expected",
    "contribution",
    "is_defined",
    "ops",
    "options",
    "reduced",
    "result",
    "rows_of",
    "mismatch",
]

DTYPES: dict[str, np.dtype[Any]] = {
    # NumPy lacks bfloat16.
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"),
    )
}

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
_ROOTED = ("reduce", "broadcast", "gather", "scatter")

# Period of the inputs, in elements, which makes large inputs cheap. It is a prime, so that a slice
# or chunk in a wrong place is detected.
_PERIOD = 4093


class Expected(NamedTuple):
    """The correct result in a wide dtype, and the allowed error of each element; of one shape."""

    values: Array
    allowed: Array


def is_defined(op: Op, dtype: np.dtype[Any]) -> bool:
    """Return whether an op is defined for a dtype."""
    try:
        reduction.check(op, dtype, operation="exact", by_way=True)
    except TypeError:
        return False
    return True


def ops(operation: str, dtype: np.dtype[Any]) -> list[Op | None]:
    """Return the ops to test an operation with; [None] if it reduces nothing."""
    if operation not in REDUCTIONS:
        return [None]
    return [op for op in reduction.OPS if is_defined(op, dtype)]


def options(operation: str, op: Op | None, root: int) -> dict[str, Any]:
    """Return the arguments of an operation besides its array."""
    own: dict[str, Any] = {} if op is None else {"op": op}
    return own | ({"root": root} if operation in _ROOTED else {})


def rows_of(operation: str, rank: int, count: int) -> int:
    """Return the number of elements of a rank: in joins every other rank has one more."""
    return count + rank % 2 if operation in ("gather", "allgather") else count


def contribution(rank: int, size: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return the input of a rank, shape (count,), different on every rank.

    Floats are near enough to 1 that products over `size` ranks fit 16 bits.
    """
    # Seeded by the rank, so that every rank can compute all inputs.
    random = np.random.default_rng(rank)
    n = min(count, _PERIOD)
    if dtype.kind == "b":
        values: Array = random.integers(0, 2, n).astype(bool)
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = random.integers(info.min, info.max, n, dtype, endpoint=True)
    else:
        values = 2.0 ** (random.uniform(-1, 1, n) * 4 / max(4, size)) * random.choice([-1, 1], n)
        if dtype.kind == "c":
            values = values * np.exp(1j * random.uniform(0, 6, n))
        values = values.astype(dtype)
    return np.resize(values, count)


def result(
    operation: str, op: Op | None, inputs: Sequence[Array], rank: int, root: int
) -> Expected | None:
    """Return the correct result of `rank`; None if the operation returns none there.

    Args:
        operation: a name such as "allreduce".
        op: op of a reduction, else None.
        inputs: flat inputs of all ranks; a broadcast or scatter uses only the root's.
        rank: rank of the result.
        root: root, for operations that have one.
    """
    if operation in ("reduce", "gather") and rank != root:
        return None
    if op is not None:
        # One period, because longer inputs repeat it.
        period = reduced([x[:_PERIOD] for x in inputs], op)
        whole = Expected(*(np.resize(part, inputs[0].size) for part in period))
        if operation != "reduce_scatter":
            return whole
        own = slice(*topology.chunk_bounds(inputs[0].size, len(inputs))[rank : rank + 2])
        return Expected(whole.values[own], whole.allowed[own])
    if operation == "broadcast":
        moved = inputs[root]
    elif operation in ("gather", "allgather"):
        moved = np.concatenate(inputs)
    elif operation == "scatter":
        moved = _share(inputs[root], len(inputs), rank)
    else:
        moved = np.concatenate([_share(x, len(inputs), rank) for x in inputs])
    return Expected(moved, np.zeros(moved.shape))


def mismatch(got: Any, exact: Expected | None) -> str | None:
    """Return what is wrong with a result, or None."""
    if exact is None or got is None:
        return None if exact is got else "a result on a rank that should get none, or the reverse"
    values, allowed = exact
    if got.shape != values.shape:
        return f"shape {got.shape} instead of {values.shape}"
    if got.dtype.kind in "biu":
        bad = got != values
    else:
        with np.errstate(all="ignore"):
            # Negated, so that a NaN counts as wrong.
            bad = ~(np.abs(got.astype(values.dtype) - values) <= allowed)
    if not bad.any():
        return None
    first = int(np.flatnonzero(bad)[0])
    return (
        f"{np.count_nonzero(bad)} of {got.size} elements wrong, the first is [{first}]: expected "
        f"{values.flat[first]} +- {allowed.flat[first]:.1g}, got {got.flat[first]}"
    )


def _share(array: Array, size: int, rank: int) -> Array:
    first, stop = topology.chunk_bounds(array.size, size)[rank : rank + 2]
    return array[first:stop]


def reduced(inputs: Sequence[Array], op: Op) -> Expected:
    """Reduce in float64; integers in their own arithmetic, which is exact modulo 2^bits.

    P - 1 additions and P divisions round, each by at most eps times the sum of the magnitudes; a
    product rounds P - 1 times (twice as much if complex, each product being two products and a
    sum), relative to itself. 16-bit types are computed in float32 and rounded once.
    """
    dtype, size = inputs[0].dtype, len(inputs)
    stack = np.stack(inputs)
    exact_kind = dtype.kind in "biu"
    if not exact_kind:
        stack = stack.astype(np.complex128 if dtype.kind == "c" else np.float64)
    with np.errstate(all="ignore"):
        values = np.asarray(_FUNCTIONS[op](stack))
    # These results are not rounded.
    if exact_kind or op in (MIN, MAX, LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR):
        return Expected(values.astype(stack.dtype), np.zeros(values.shape))
    work = reduction.work_dtype(dtype)
    magnitude = np.abs(stack).sum(axis=0) / (size if op is MEAN else 1)
    # The error of a product is relative to the product.
    if op is PRODUCT:
        magnitude = 4 * np.abs(values)
    error = 2 * size * np.finfo(work).eps * magnitude
    # 16-bit results are rounded once more.
    if work != dtype:
        eps = ml_dtypes.finfo(dtype).eps  # type: ignore[no-untyped-call]
        error = error + eps * (np.abs(values) + error)
    return Expected(values, np.asarray(error))


def _truncated_mean(stack: Array) -> Array:
    """Divide sums, modulo 2^64, as unbounded Python integers."""
    wide = np.uint64 if stack.dtype == np.uint64 else np.int64
    # The sum wraps at 64 bits; Python integers then divide exactly.
    total = stack.sum(axis=0, dtype=wide).astype(object)
    size = len(stack)
    # Toward zero, as in C; `//` alone rounds down.
    return np.asarray(np.where(total < 0, -(-total // size), total // size))


# Independent of the functions of the product, so that their errors are detected here.
_FUNCTIONS: dict[Op, Any] = {
    SUM: lambda stack: stack.sum(axis=0, dtype=stack.dtype),
    MEAN: lambda stack: stack.mean(axis=0),
    MIN: lambda stack: stack.min(axis=0),
    MAX: lambda stack: stack.max(axis=0),
    PRODUCT: lambda stack: stack.prod(axis=0, dtype=stack.dtype),
    BITWISE_AND: lambda stack: np.bitwise_and.reduce(stack, axis=0),
    BITWISE_OR: lambda stack: np.bitwise_or.reduce(stack, axis=0),
    BITWISE_XOR: lambda stack: np.bitwise_xor.reduce(stack, axis=0),
    LOGICAL_AND: lambda stack: stack.all(axis=0),
    LOGICAL_OR: lambda stack: stack.any(axis=0),
    LOGICAL_XOR: lambda stack: np.count_nonzero(stack, axis=0) % 2,
    INTEGER_MEAN: _truncated_mean,
}
