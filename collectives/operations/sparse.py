"""`sparse_allreduce`: sums of a few rows of a large array."""

from __future__ import annotations

import math
from typing import Any, TypedDict, overload

import numpy as np

from collectives.arrays import device, host_arrays, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Detachable, Numbers, Unpack
from collectives.operations.gather_scatter import allgather
from collectives.operations.reduce import allreduce

__all__ = ["SparseOptions", "sparse_allreduce"]

_ALGORITHMS = ("auto", "rows", "dense")


class SparseOptions(TypedDict, total=False):
    """Options of `sparse_allreduce`, for type checkers."""

    num_rows: int | None
    op: Op
    algorithm: str
    timeout: float | None


@overload
def sparse_allreduce(
    group: Group, indices: Any, values: Numbers, **options: Unpack[SparseOptions]
) -> tuple[Array, Array]: ...
@overload
def sparse_allreduce(
    group: Group, indices: Any, values: Detachable[A], **options: Unpack[SparseOptions]
) -> tuple[Array, A]: ...
@overload
def sparse_allreduce(
    group: Group, indices: Any, values: A, **options: Unpack[SparseOptions]
) -> tuple[Array, A]: ...
def sparse_allreduce(
    group: Group,
    indices: Any,
    values: Any,
    *,
    num_rows: int | None = None,
    op: Op = MEAN,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> tuple[Array, Any]:
    """Reduce rows of a large array of which each rank has only a few.

    As if every rank put its rows into an array of zeros, rows of one index added up, and these
    arrays were reduced; of the result, the rows that any rank named are returned.

    Args:
        indices: shape (k,), integers >= 0; k may differ between ranks, an index may be repeated.
        values: shape (k, ...), the rows, float or complex for MEAN.
        num_rows: rows of the large array. If given, it is reduced as a whole where that moves fewer
            bytes.
        op: SUM or MEAN, which divides by the number of ranks.
        algorithm: "rows" joins the rows of all ranks, "dense" reduces the large array; "auto" does
            what moves fewer bytes.
        timeout: seconds.

    Returns:
        (indices, rows): the sorted indices without repetition, int64, and the rows, of the kind of
        `values`; the same on all ranks.

    Raises:
        ValueError: shapes do not fit, an index is out of range, or the algorithm is unknown, or
            "dense" without `num_rows`; on all ranks.
        TypeError: the indices are not integers, or the op is another.

    Cost: the rows of all ranks on each rank, or 2 (P - 1)/P bytes of the large array.
    """
    with begin_call(
        group, "sparse_allreduce", timeout
    ) as call:  # step 2 of docs/how-a-call-goes.md
        loan = host_arrays.host_view(values, operation=call.operation)  # step 3
        rows = loan.host
        where = host_arrays.host_view(indices, operation=call.operation).host
        _check(where, rows, op, num_rows, algorithm)
        call.describe(op=op.value, dtype=rows.dtype, row=rows.shape[1:], num_rows=num_rows)
        call.add(algorithm=algorithm)
        total = int(call.exchange_integers(len(where)).sum())  # step 6, of the comparison
    where = where.astype(np.int64)
    if num_rows is not None and _is_dense(algorithm, total, num_rows, rows):
        found, summed = _dense(group, where, rows, num_rows, op, timeout)
    else:
        found, summed = _allgather_rows(group, where, rows, op, timeout)
    with reduction.ignore_float_errors():
        return found, loan.restore(summed.astype(rows.dtype, copy=False))


def _check(where: Array, rows: Array, op: Op, num_rows: int | None, algorithm: str) -> None:
    """Check the arguments.

    Raises:
        TypeError, ValueError: as `sparse_allreduce`.
    """
    if op not in (SUM, MEAN):
        raise TypeError(f"sparse_allreduce: expected SUM or MEAN, got {op}")
    reduction.check(op, rows.dtype, operation="sparse_allreduce")
    if where.dtype.kind not in "iu" and where.size:
        raise TypeError(f"sparse_allreduce: indices are not integers, got {where.dtype}")
    if where.ndim != 1 or rows.ndim < 1 or len(where) != len(rows):
        raise ValueError(
            f"sparse_allreduce: expected an index for every row, got shapes {where.shape} and "
            f"{rows.shape}"
        )
    last = np.iinfo(np.int64).max if num_rows is None else num_rows - 1
    if where.size and (where.min() < 0 or where.max() > last):
        raise ValueError(
            f"sparse_allreduce: an index is out of range, expected 0 .. {last}, got "
            f"{where.min()} .. {where.max()}"
        )
    if algorithm not in _ALGORITHMS:
        raise ValueError(
            f"sparse_allreduce: unknown algorithm, expected one of {' '.join(_ALGORITHMS)}, "
            f"got {algorithm!r}"
        )
    if algorithm == "dense" and num_rows is None:
        raise ValueError("sparse_allreduce: algorithm 'dense' needs num_rows, got None")


def _is_dense(algorithm: str, total: int, num_rows: int, rows: Array) -> bool:
    """Tell whether the large array is reduced: as asked for, or where that moves fewer bytes."""
    if algorithm != "auto":
        return algorithm == "dense"
    row_bytes = rows.dtype.itemsize * max(1, math.prod(rows.shape[1:]))
    return total * (row_bytes + 8) > 2 * num_rows * row_bytes


def _dense(
    group: Group, where: Array, rows: Array, num_rows: int, op: Op, timeout: float | None
) -> tuple[Array, Array]:
    """Reduce the large array; returns what any rank has named, and these rows."""
    named = np.zeros(num_rows, bool)
    named[where] = True
    large = np.zeros((num_rows, *rows.shape[1:]), reduction.work_dtype(rows.dtype))
    with reduction.ignore_float_errors():
        np.add.at(large, where, rows)
    named = allreduce(group, named, op=reduction.MAX, timeout=timeout)
    large = allreduce(group, large, op=op, out=large, timeout=timeout)
    found = np.flatnonzero(named)
    return found, large[found]


def _allgather_rows(
    group: Group, where: Array, rows: Array, op: Op, timeout: float | None
) -> tuple[Array, Array]:
    """Join the rows of all ranks, and add up those of one index."""
    all_indices = allgather(group, where, timeout=timeout)
    all_rows = allgather(group, np.ascontiguousarray(rows), timeout=timeout)
    found, place = np.unique(all_indices, return_inverse=True)
    summed = np.zeros((len(found), *rows.shape[1:]), reduction.work_dtype(rows.dtype))
    with reduction.ignore_float_errors():
        np.add.at(summed, place, all_rows)  # in the order of the ranks
        device.canonical_nans(summed)
        if op is MEAN:
            summed /= group.size
    return found, summed
