"""Rows of arrays, joined and shared: `gather`, `allgather`, `scatter`, `alltoall`.

The steps are those of `docs/how-a-call-goes.md`.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any, overload

import numpy as np

from collectives import topology
from collectives.arrays import host
from collectives.arrays.host import Array
from collectives.operations import joins, objects
from collectives.operations import plan as plans
from collectives.operations.call import Call, enter
from collectives.operations.group import Group
from collectives.operations.signatures import (
    A,
    Detachable,
    Numbers,
    Splits,
    Splitting,
    Unpack,
    Waiting,
)

__all__ = ["allgather", "alltoall", "gather", "scatter"]


@overload
def gather(group: Group, x: Numbers, root: int = 0, **options: Unpack[Waiting]) -> Array | None: ...
@overload
def gather(
    group: Group, x: Detachable[A], root: int = 0, **options: Unpack[Waiting]
) -> A | None: ...
@overload
def gather(group: Group, x: A, root: int = 0, **options: Unpack[Waiting]) -> A | None: ...
def gather(
    group: Group,
    x: Any,
    root: int = 0,
    *,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Join the arrays of all ranks along their first axis on one rank.

    Args:
        x: shape (n, ...); n may differ between ranks; a scalar counts as shape (1,).
        root: who gets the result.
        algorithm: "auto", "node", "tree" or "native".
        timeout: seconds.

    Returns:
        On the root a new array of shape (sum of n, ...), elsewhere None.

    Raises:
        ValueError: no such root.
        MismatchError: the ranks' arrays differ in dtype or in the other dimensions; on all
            ranks.
        CollectiveTimeout: as `allreduce`.
    """
    with enter(group, "gather", timeout) as call:  # step 2
        loan = host.borrow(x, operation="gather")  # step 3
        array = np.atleast_1d(loan.host)
        call.check_root(root)
        row = array.shape[1:]
        call.describe(dtype=array.dtype, row=row, root=root, algorithm=algorithm)  # step 4
        rows = call.agree_on_rows(array.shape[0])  # step 6
        counts = [n * math.prod(row) for n in rows]
        result = joins.gather(call, host.flat(array), counts, root, algorithm)
    return None if result is None else loan.give_back(result.reshape(sum(rows), *row))


@overload
def allgather(group: Group, x: Numbers, **options: Unpack[Waiting]) -> Array: ...
@overload
def allgather(group: Group, x: Detachable[A], **options: Unpack[Waiting]) -> A: ...
@overload
def allgather(group: Group, x: A, **options: Unpack[Waiting]) -> A: ...
def allgather(
    group: Group, x: Any, *, algorithm: str = "auto", timeout: float | None = None
) -> Any:
    """Join the arrays of all ranks along their first axis on every rank.

    Arguments and errors as `gather`, without a root; algorithms are "auto", "node", "ring",
    "halving" and "native".

    Returns:
        A new array of shape (sum of n, ...) in the order of the ranks, on all ranks.

    Cost: "ring" P - 1 messages per rank, (P - 1)/P of the result's bytes.
    """
    key = ("allgather", algorithm)
    if (known := plans.again(group, key, x, plans.LATER, timeout)) is not None:  # step 1
        return known
    with enter(group, "allgather", timeout) as call:  # step 2
        loan = host.borrow(x, operation="allgather")  # step 3
        array = np.atleast_1d(loan.host)
        call.describe(dtype=array.dtype, row=array.shape[1:], algorithm=algorithm)  # step 4
        joined, _, plan = joins.allgather(call, np.ascontiguousarray(array), algorithm)
        if plan is not None:
            plans.keep(group, key, x, None, plan)  # step 7
    return loan.give_back(joined)


@overload
def scatter(
    group: Group,
    x: Numbers | Array | None,
    root: int = 0,
    **options: Unpack[Splitting],
) -> Array: ...
@overload
def scatter(
    group: Group, x: Detachable[A], root: int = 0, **options: Unpack[Splitting]
) -> A | Array: ...
@overload
def scatter(group: Group, x: A, root: int = 0, **options: Unpack[Splitting]) -> A | Array: ...
def scatter(
    group: Group,
    x: Any,
    root: int = 0,
    *,
    splits: Splits | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Share the rows of one rank's array among all ranks.

    Args:
        x: on the root shape (n, ...); not looked at elsewhere.
        root: whose array.
        splits: on the root, the rows of every rank, which add up to n; even shares if None,
            the first `n % size` ranks getting one row more.
        algorithm: "auto", "node", "tree" or "native".
        timeout: seconds.

    Returns:
        A new array of shape (own rows, ...): of the kind of `x` on the root, a NumPy array
        elsewhere.

    Raises:
        ValueError: no such root; on the root, a scalar, or splits that do not add up.
        CollectiveTimeout: as `allreduce`.
    """
    with enter(group, "scatter", timeout) as call:  # step 2
        call.check_root(root)
        loan = host.borrow(x, operation="scatter") if group.rank == root else None
        rows = [] if loan is None else _splits(call, loan.host, splits)
        call.describe(root=root, algorithm=algorithm)  # step 4
        # What only the root knows goes ahead: dtype, shape of a row, rows of every rank.
        facts = None if loan is None else (loan.host.dtype.name, loan.host.shape[1:], rows)
        dtype, row, rows = objects.from_root(call, facts, root)
        counts = [n * math.prod(row) for n in rows]
        result = np.empty((rows[group.rank], *row), np.dtype(dtype))
        send = None if loan is None else host.flat(loan.host)
        out = result.reshape(-1)
        joins.scatter(call, send, counts, root, out, algorithm)  # step 6
    return result if loan is None else loan.give_back(result)


@overload
def alltoall(group: Group, x: Numbers, **options: Unpack[Splitting]) -> Array: ...
@overload
def alltoall(group: Group, x: Detachable[A], **options: Unpack[Splitting]) -> A: ...
@overload
def alltoall(group: Group, x: A, **options: Unpack[Splitting]) -> A: ...
def alltoall(
    group: Group,
    x: Any,
    *,
    splits: Splits | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Give every rank some rows of this rank's array, and join what all ranks give to this one.

    Args:
        x: shape (n, ...); n may differ between ranks. The first rows go to rank 0, and so on.
        splits: the rows for every rank, which add up to n; even shares if None.
        algorithm: "auto", "node", "rotation" or "native".
        timeout: seconds.

    Returns:
        A new array of shape (received rows, ...), of the kind of `x`, in the order of the
        ranks that they came from.

    Raises:
        ValueError: a scalar, or splits that do not add up.
        MismatchError: the ranks' arrays differ in dtype or in the other dimensions; on all
            ranks.
        CollectiveTimeout: as `allreduce`.

    Cost: P - 1 messages and (P - 1)/P S bytes sent per rank.
    """
    with enter(group, "alltoall", timeout) as call:  # step 2
        loan = host.borrow(x, operation="alltoall")  # step 3
        rows = _splits(call, loan.host, splits)
        row = loan.host.shape[1:]
        call.describe(dtype=loan.host.dtype, row=row, algorithm=algorithm)  # step 4
        send = host.flat(loan.host)
        joined, received = joins.alltoall(call, send, rows, math.prod(row), algorithm)
    return loan.give_back(joined.reshape(received, *row))


def _splits(call: Call, array: Array, splits: Splits | None) -> list[int]:
    """Return the rows of an array for every rank."""
    size = call.group.size
    if array.ndim == 0:
        raise ValueError(f"{call.operation}: a scalar has no rows, expected shape (n, ...)")
    if splits is None:
        bounds = topology.chunk_bounds(array.shape[0], size)
        return [stop - start for start, stop in itertools.pairwise(bounds)]
    rows = [operator.index(n) for n in splits]
    if len(rows) != size or min(rows) < 0 or sum(rows) != array.shape[0]:
        raise ValueError(
            f"{call.operation}: splits do not fit, expected {size} numbers >= 0 that add "
            f"up to {array.shape[0]} rows, got {rows}"
        )
    return rows
