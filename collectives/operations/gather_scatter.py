"""`gather`, `allgather`, `scatter` and `alltoall`.

Comments name the steps of `docs/how-a-call-goes.md`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from collectives.arrays import dtypes, host_arrays
from collectives.arrays.host_arrays import Array
from collectives.calls import counts as row_counts
from collectives.calls.call import begin_call
from collectives.calls.fast_path import Given
from collectives.calls.group import Group
from collectives.calls.overloads import (
    A,
    CommonOptions,
    Numbers,
    ScatterOptions,
    Splits,
    Tensor,
    Unpack,
)
from collectives.operations import gather_moves, objects, plan_cache
from collectives.tracing.call_sites import caller

__all__ = ["allgather", "alltoall", "gather", "scatter"]


@overload
def gather(
    group: Group, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
) -> Array | None: ...
@overload
def gather(
    group: Group, x: Tensor[A], root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
) -> A | None: ...
@overload
def gather(
    group: Group, x: A, root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
) -> A | None: ...
@overload
def gather(
    group: Group, x: object, root: int = 0, *, out: A, **options: Unpack[CommonOptions]
) -> A | None: ...
def gather(
    group: Group,
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Join the arrays of all ranks along their first axis on one rank.

    Args:
        x: shape (n, ...); n may differ between ranks; a scalar counts as shape (1,).
        root: rank that receives the result.
        out: on the root, array for the result, with its shape and the dtype of `x`, as for
            `allreduce`. `x` may be the root's own part of `out`.
        algorithm: "auto", "node", "tree" or "native".
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        On the root `out` or a new array of shape (sum of n, ...), elsewhere None.

    Raises:
        ValueError: the root is not a rank, or `out` does not fit; the other ranks raise
            `MismatchError`.
        MismatchError: the ranks' arrays differ in dtype or in the other dimensions; on all
            ranks.
        CollectiveTimeout: as `allreduce`.
    """
    # `out` counts on the root only; other ranks may pass any value there.
    key, here = ("gather", root, algorithm), group.rank == root
    try:  # step 1
        if here and out is not None:
            return plan_cache.run_cached_into(group, key, x, out, timeout, caller())
        return plan_cache.run_cached_send(group, key, x, timeout, caller())
    except plan_cache.NoPlan:
        pass
    with begin_call(group, "gather", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation="gather")  # step 3
        # A scalar counts as one row.
        array = np.atleast_1d(loan.host)
        call.check_root(root)
        row = array.shape[1:]
        wanted = out if here else None
        to = host_arrays.check_out_rows(wanted, row, array.dtype, loan, operation="gather")
        call.describe(dtype=array.dtype, row=row, root=root, algorithm=algorithm)  # step 4
        result, _, plan = gather_moves.gather(call, array, root, algorithm, to)
        # The engine's plan accepts other row counts later; by messages the counts are exchanged in
        # each call.
        if plan is not None:
            plan_cache.store(group, key, loan.host, None, plan)  # step 7
    return None if result is None else to.restore(result)


@overload
def allgather(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[CommonOptions]
) -> Array: ...
@overload
def allgather(
    group: Group, x: Tensor[A], *, out: None = None, **options: Unpack[CommonOptions]
) -> A: ...
@overload
def allgather(group: Group, x: A, *, out: None = None, **options: Unpack[CommonOptions]) -> A: ...
@overload
def allgather(group: Group, x: object, *, out: A, **options: Unpack[CommonOptions]) -> A: ...
def allgather(
    group: Group,
    x: Any,
    *,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Join the arrays of all ranks along their first axis on every rank.

    Arguments and errors as `gather`, without a root.

    Algorithms: "auto", "node", "ring", "halving" or "native".

    Returns:
        `out` or a new array of shape (sum of n, ...) in rank order, on all ranks.

    Cost: "ring" P - 1 messages per rank, (P - 1)/P of the result's bytes.
    """
    made = group.fast_path.repeat(x, out, caller(), timeout, "allgather", algorithm)
    if made is not None:
        return made
    key = ("allgather", algorithm)
    try:  # step 1
        if out is None:
            given = Given(x, None)
            return plan_cache.run_cached_send(group, key, x, timeout, caller(), given)
        return plan_cache.run_cached_into(group, key, x, out, timeout, caller())
    except plan_cache.NoPlan:
        pass
    with begin_call(group, "allgather", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation="allgather")  # step 3
        array = np.ascontiguousarray(np.atleast_1d(loan.host))
        row = array.shape[1:]
        to = host_arrays.check_out_rows(out, row, array.dtype, loan, operation="allgather")
        call.describe(dtype=array.dtype, row=row, algorithm=algorithm)  # step 4
        joined, _, plan = gather_moves.allgather(call, array, algorithm, to)
        if plan is not None:
            plan_cache.store(group, key, loan.host, None, plan)  # step 7
    return to.restore(joined)


@overload
def scatter(
    group: Group,
    x: Numbers | Array | None,
    root: int = 0,
    *,
    out: None = None,
    **options: Unpack[ScatterOptions],
) -> Array: ...
@overload
def scatter(
    group: Group,
    x: Tensor[A],
    root: int = 0,
    *,
    out: None = None,
    **options: Unpack[ScatterOptions],
) -> A | Array: ...
@overload
def scatter(
    group: Group, x: A, root: int = 0, *, out: None = None, **options: Unpack[ScatterOptions]
) -> A | Array: ...
@overload
def scatter(
    group: Group, x: object, root: int = 0, *, out: A, **options: Unpack[ScatterOptions]
) -> A: ...
def scatter(
    group: Group,
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    counts: Splits | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Distribute the rows of one rank's array among all ranks.

    Args:
        x: on the root, shape (n, ...); ignored elsewhere.
        root: rank whose array is distributed.
        out: array for this rank's rows, with their shape and the dtype of the root's `x`, as for
            `allreduce`. `out` may be the root's own part of `x`.
        counts: on the root, rows for every rank, which add up to n; None shares evenly, with one
            more row for each of the first `n % size` ranks.
        algorithm: "auto", "node", "tree" or "native".
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out`, or a new array of shape (own rows, ...): of the kind of `x` on the root, a NumPy
        array elsewhere.

    Raises:
        ValueError: the root is not a rank; on the root, a scalar, or counts that do not add up;
            `out` does not fit. The other ranks raise `MismatchError`.
        CollectiveTimeout: as `allreduce`.
    """
    with begin_call(group, "scatter", timeout) as call:  # step 2
        call.check_root(root)
        loan = host_arrays.host_view(x, operation="scatter") if group.rank == root else None
        # The kind of `x` and its rows concern the root only, so its errors become refusals.
        rows = [] if loan is None else row_counts.split_counts(call, loan.host, counts)
        call.describe(root=root, algorithm=algorithm)  # step 4
        # First broadcast the facts that only the root knows: dtype, shape of a row, rows of every
        # rank.
        facts = (
            None if loan is None else (dtypes.spelled(loan.host.dtype), loan.host.shape[1:], rows)
        )
        # By pickle, because other ranks cannot know the length of the facts.
        name, row, rows = objects.from_root(call, facts, root)
        # The ranks now know the shape of `out`, so each may refuse once more.
        call.next_chunk()
        dtype = dtypes.named(name)
        if out is None:
            to = (
                # The result of the root has the kind of `x`; other ranks have no `x`.
                host_arrays.ALLOCATE
                if loan is None
                else host_arrays.ALLOCATE._replace(restore=loan.restore)
            )
        else:
            shape = (rows[group.rank], *row)
            target, give_back = host_arrays.check_out(out, shape, dtype, operation="scatter")
            to = host_arrays.RowsOut(rows[group.rank], target, give_back)
        send = None if loan is None else host_arrays.flat(loan.host)
        result = gather_moves.scatter(call, send, rows, row, dtype, root, algorithm, to)  # step 6
    return to.restore(result)


class _AlltoallOptions(ScatterOptions, total=False):
    return_counts: Literal[False]


@overload
def alltoall(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[_AlltoallOptions]
) -> Array: ...
@overload
def alltoall(
    group: Group, x: Tensor[A], *, out: None = None, **options: Unpack[_AlltoallOptions]
) -> A: ...
@overload
def alltoall(group: Group, x: A, *, out: None = None, **options: Unpack[_AlltoallOptions]) -> A: ...
@overload
def alltoall(group: Group, x: object, *, out: A, **options: Unpack[_AlltoallOptions]) -> A: ...
@overload
def alltoall(
    group: Group,
    x: object,
    *,
    out: Any = None,
    return_counts: Literal[True],
    **options: Unpack[ScatterOptions],
) -> tuple[Any, Array]: ...
def alltoall(
    group: Group,
    x: Any,
    *,
    out: Any = None,
    counts: Splits | None = None,
    return_counts: bool = False,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Send each rank some rows of this rank's array, and join the rows that this rank receives.

    Args:
        x: shape (n, ...); n may differ between ranks. The first rows go to rank 0, the next rows to
            rank 1, and so on.
        out: array for the result, with its shape and the dtype of `x`, as for `allreduce`.
        counts: rows for every rank, which add up to n; None shares evenly.
        return_counts: whether to return also the number of rows from each rank.
        algorithm: "auto", "node", "rotation" or "native".
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out` or a new array of shape (received rows, ...), of the kind of `x`, in the order of the
        sending ranks. With `return_counts` also a NumPy array with the number of rows from each
        rank, shape (P,), int64: the `counts` that would send all rows back.

    Raises:
        ValueError: a scalar, counts that do not add up, or `out` does not fit; the other ranks
            raise `MismatchError`.
        MismatchError: the ranks' arrays differ in dtype or in the other dimensions; on all
            ranks.
        CollectiveTimeout: as `allreduce`.

    Cost: P - 1 messages and (P - 1)/P S bytes sent per rank, after an all-gather of 8 (P + 1) bytes
        per rank.
    """
    with begin_call(group, "alltoall", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation="alltoall")  # step 3
        array = loan.host
        # Before the description, because counts differ between ranks and cannot be compared.
        rows = row_counts.split_counts(call, array, counts)
        row = array.shape[1:]
        to = host_arrays.check_out_rows(out, row, array.dtype, loan, operation="alltoall")
        call.describe(dtype=array.dtype, row=row, algorithm=algorithm)  # step 4
        joined, came = gather_moves.alltoall(call, array, rows, algorithm, to)
    result = to.restore(joined)
    # These counts sent back with `counts=` return the rows to their senders.
    return (result, np.array(came)) if return_counts else result
