"""`sparse_allreduce`: reduction of a few rows of a large array."""

from __future__ import annotations

import math
from typing import Any, TypedDict, overload

import numpy as np

from collectives.arrays import device, host_arrays, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Numbers, Tensor, Unpack
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
    group: Group, indices: Any, values: Tensor[A], **options: Unpack[SparseOptions]
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
    """Reduce a large array in which each rank has only a few rows.

    As if every rank added its rows into an array of zeros, and these arrays were all-reduced. The
    result contains the rows that any rank passed.

    Args:
        indices: shape (k,), integers >= 0; k may differ between ranks, and indices may repeat.
        values: shape (k, ...), the rows; float or complex for MEAN.
        num_rows: rows of the large array. If given, "auto" may reduce the large array.
        op: SUM or MEAN; MEAN divides by the number of ranks.
        algorithm: "rows" gathers the rows of all ranks, "dense" reduces the large array; "auto"
            picks the algorithm that moves fewer bytes.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        (indices, rows): the sorted unique indices, int64, and the rows, of the kind of `values`;
        the same on all ranks.

    Raises:
        ValueError: the shapes do not fit, an index is out of range, the algorithm is unknown, or
            "dense" lacks `num_rows`; on all ranks.
        TypeError: the indices are not integers, or the op is not SUM or MEAN.

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
        # Also compares the calls. The total decides between two algorithms, equally on all ranks.
        total = int(call.exchange_integers(len(where)).sum())  # step 6, of the comparison
    # int64 on all ranks, which may have passed other integers.
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
    # Without `num_rows` no rank knows the size of the large array.
    if algorithm == "dense" and num_rows is None:
        raise ValueError("sparse_allreduce: algorithm 'dense' needs num_rows, got None")


def _is_dense(algorithm: str, total: int, num_rows: int, rows: Array) -> bool:
    """Return whether to reduce the large array: on request, or if that moves fewer bytes."""
    if algorithm != "auto":
        return algorithm == "dense"
    # A scalar row counts as one element.
    row_bytes = rows.dtype.itemsize * max(1, math.prod(rows.shape[1:]))
    # Each row costs its index, 8 bytes; a dense all-reduce moves the large array twice.
    return total * (row_bytes + 8) > 2 * num_rows * row_bytes


def _dense(
    group: Group, where: Array, rows: Array, num_rows: int, op: Op, timeout: float | None
) -> tuple[Array, Array]:
    """Reduce the large array; return the indices that any rank passed, and their rows."""
    # The rows that any rank named, because a sum of zero does not show whether a row was passed.
    named = np.zeros(num_rows, bool)
    named[where] = True
    # In the dtype of sums, so that repeated indices are rounded once.
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
    """Gather the rows of all ranks, and add the rows of equal indices."""
    all_indices = allgather(group, where, timeout=timeout)
    all_rows = allgather(group, np.ascontiguousarray(rows), timeout=timeout)
    found, place = np.unique(all_indices, return_inverse=True)
    summed = np.zeros((len(found), *rows.shape[1:]), reduction.work_dtype(rows.dtype))
    with reduction.ignore_float_errors():
        all_rows = all_rows.astype(summed.dtype, copy=False)
        # Not the number of ranks, whose quotients would be rounded row by row.
        scale = reduction.mean_scale(group.size)
        reduction.prescale(all_rows, op, scale)
        np.add.at(summed, place, all_rows)  # in rank order, so the sums are reproducible
        # Each rank sums alone: all must get the same NaN.
        device.canonical_nans(summed)
        if op is MEAN:
            summed /= group.size / scale
    return found, summed
