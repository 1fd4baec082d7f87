"""Operations that join and share rows of arrays, as methods of `Communicator`."""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from collectives import topology
from collectives.arrays import host
from collectives.arrays.host import Array
from collectives.operations import objects, ways
from collectives.operations.call import Call
from collectives.operations.repeats import NEW
from collectives.signatures import A, Detachable, Numbers, Splits, Splitting, Waiting

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from collectives.communicator import Communicator

__all__ = ["allgather", "alltoall", "gather", "scatter"]


@overload
def gather(
    self: Communicator, x: Numbers, root: int = 0, **options: Unpack[Waiting]
) -> Array | None: ...
@overload
def gather(
    self: Communicator, x: Detachable[A], root: int = 0, **options: Unpack[Waiting]
) -> A | None: ...
@overload
def gather(self: Communicator, x: A, root: int = 0, **options: Unpack[Waiting]) -> A | None: ...
def gather(
    self: Communicator,
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
    with self._calls.enter("gather", timeout) as call:
        loan = host.borrow(x, operation="gather")
        array = np.atleast_1d(loan.host)
        self._check_root(call, root)
        row = array.shape[1:]
        self._describe(call, algorithm, dtype=array.dtype, row=row, root=root)
        rows = call.agree_on_rows(array.shape[0])
        counts = [n * math.prod(row) for n in rows]
        result = ways.gather(self._transport, call, host.flat(array), counts, root, algorithm)
    return None if result is None else loan.give_back(result.reshape(sum(rows), *row))


@overload
def allgather(self: Communicator, x: Numbers, **options: Unpack[Waiting]) -> Array: ...
@overload
def allgather(self: Communicator, x: Detachable[A], **options: Unpack[Waiting]) -> A: ...
@overload
def allgather(self: Communicator, x: A, **options: Unpack[Waiting]) -> A: ...
def allgather(
    self: Communicator, x: Any, *, algorithm: str = "auto", timeout: float | None = None
) -> Any:
    """Join the arrays of all ranks along their first axis on every rank.

    Arguments and errors as `gather`, without a root; algorithms are "auto", "node", "ring",
    "halving" and "native".

    Returns:
        A new array of shape (sum of n, ...) in the order of the ranks, on all ranks.

    Cost: "ring" P - 1 messages per rank, (P - 1)/P of the result's bytes.
    """
    done = self._repeats.allgather(x, algorithm, timeout)
    if done is not NEW:
        return done
    with self._calls.enter("allgather", timeout) as call:
        loan = host.borrow(x, operation="allgather")
        array = np.atleast_1d(loan.host)
        row = array.shape[1:]
        self._describe(call, algorithm, dtype=array.dtype, row=row)
        rows = call.agree_on_rows(array.shape[0])
        counts = [n * math.prod(row) for n in rows]
        result = ways.allgather(self._transport, call, host.flat(array), counts, algorithm)
        self._repeats.note_allgather(call, x, algorithm)
    return loan.give_back(result.reshape(sum(rows), *row))


@overload
def scatter(
    self: Communicator,
    x: Numbers | Array | None,
    root: int = 0,
    **options: Unpack[Splitting],
) -> Array: ...
@overload
def scatter(
    self: Communicator, x: Detachable[A], root: int = 0, **options: Unpack[Splitting]
) -> A | Array: ...
@overload
def scatter(self: Communicator, x: A, root: int = 0, **options: Unpack[Splitting]) -> A | Array: ...
def scatter(
    self: Communicator,
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
    with self._calls.enter("scatter", timeout) as call:
        self._check_root(call, root)
        loan = host.borrow(x, operation="scatter") if self.rank == root else None
        rows = [] if loan is None else _splits(self, call, loan.host, splits)
        self._describe(call, algorithm, root=root)
        # What only the root knows goes ahead: dtype, shape of a row, rows of every rank.
        facts = None if loan is None else (loan.host.dtype.name, loan.host.shape[1:], rows)
        dtype, row, rows = objects.from_root(self, call, facts, root)
        counts = [n * math.prod(row) for n in rows]
        result = np.empty((rows[self.rank], *row), np.dtype(dtype))
        send = None if loan is None else host.flat(loan.host)
        out = result.reshape(-1)
        ways.scatter(self._transport, call, send, counts, root, out, algorithm)
    return result if loan is None else loan.give_back(result)


@overload
def alltoall(self: Communicator, x: Numbers, **options: Unpack[Splitting]) -> Array: ...
@overload
def alltoall(self: Communicator, x: Detachable[A], **options: Unpack[Splitting]) -> A: ...
@overload
def alltoall(self: Communicator, x: A, **options: Unpack[Splitting]) -> A: ...
def alltoall(
    self: Communicator,
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
    with self._calls.enter("alltoall", timeout) as call:
        loan = host.borrow(x, operation="alltoall")
        rows = _splits(self, call, loan.host, splits)
        row = loan.host.shape[1:]
        self._describe(call, algorithm, dtype=loan.host.dtype, row=row)
        joined, received = ways.alltoall(
            self._transport, call, host.flat(loan.host), rows, math.prod(row), algorithm
        )
    return loan.give_back(joined.reshape(received, *row))


def _splits(self: Communicator, call: Call, array: Array, splits: Splits | None) -> list[int]:
    """Return the rows of an array for every rank."""
    if array.ndim == 0:
        raise ValueError(f"{call.operation}: a scalar has no rows, expected shape (n, ...)")
    if splits is None:
        bounds = topology.chunk_bounds(array.shape[0], self.size)
        return [stop - start for start, stop in itertools.pairwise(bounds)]
    rows = [operator.index(n) for n in splits]
    if len(rows) != self.size or min(rows) < 0 or sum(rows) != array.shape[0]:
        raise ValueError(
            f"{call.operation}: splits do not fit, expected {self.size} numbers >= 0 that add "
            f"up to {array.shape[0]} rows, got {rows}"
        )
    return rows
