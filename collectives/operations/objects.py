"""Operations made of others, as methods of `Communicator`: objects, sparse rows."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from collectives.arrays import host, reduction
from collectives.arrays.host import Array
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.operations import compare, ways
from collectives.operations.call import Call
from collectives.signatures import A, Detachable, Numbers

if TYPE_CHECKING:
    from collectives.communicator import Communicator

__all__ = [
    "allgather_object",
    "broadcast_object",
    "from_root",
    "sparse_allreduce",
]

T = TypeVar("T")

_HEAD_BYTES = compare.CARRIED_BYTES


def broadcast_object(
    self: Communicator, obj: T, root: int = 0, *, timeout: float | None = None
) -> T:
    """Give every rank a copy of the root's Python object, by pickle.

    Pickle runs code of its choice when it is read: use this among ranks of one job only, never for
    data that came from elsewhere.

    Returns:
        `obj` itself on the root, a copy elsewhere.
    """
    with self._calls.enter("broadcast_object", timeout) as call:
        self._check_root(call, root)
        call.describe(root=root)
        copy: T = from_root(self, call, obj, root)
    return copy


def allgather_object(self: Communicator, obj: T, *, timeout: float | None = None) -> list[T]:
    """Give every rank the Python objects of all ranks, in rank order, by pickle.

    See `broadcast_object` about pickle.
    """
    with self._calls.enter("allgather_object", timeout) as call:
        data = _pickled(obj)
        call.describe()
        lengths = call.agree_on_rows(data.size)
        joined = ways.allgather(self._transport, call, data, lengths, "auto")
    parts = zip(itertools.accumulate(lengths), lengths, strict=True)
    return [pickle.loads(joined[end - length : end].data) for end, length in parts]


@overload
def sparse_allreduce(
    self: Communicator,
    indices: Any,
    values: Numbers,
    *,
    num_rows: int | None = None,
    op: Op = MEAN,
    timeout: float | None = None,
) -> tuple[Array, Array]: ...
@overload
def sparse_allreduce(
    self: Communicator,
    indices: Any,
    values: Detachable[A],
    *,
    num_rows: int | None = None,
    op: Op = MEAN,
    timeout: float | None = None,
) -> tuple[Array, A]: ...
@overload
def sparse_allreduce(
    self: Communicator,
    indices: Any,
    values: A,
    *,
    num_rows: int | None = None,
    op: Op = MEAN,
    timeout: float | None = None,
) -> tuple[Array, A]: ...
def sparse_allreduce(
    self: Communicator,
    indices: Any,
    values: Any,
    *,
    num_rows: int | None = None,
    op: Op = MEAN,
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
        timeout: seconds.

    Returns:
        (indices, rows): the sorted indices without repetition, int64, and the rows, of the kind of
        `values`; the same on all ranks.

    Raises:
        ValueError: shapes do not fit, or an index is out of range; on all ranks.
        TypeError: indices are no integers, or the op is another.

    Cost: the rows of all ranks on each rank, or 2 (P - 1)/P bytes of the large array.
    """
    with self._calls.enter("sparse_allreduce", timeout) as call:
        loan = host.borrow(values, operation=call.operation)
        rows = loan.host
        where = host.as_array(indices, operation=call.operation)
        if op not in (SUM, MEAN):
            raise TypeError(f"sparse_allreduce: expected SUM or MEAN, got {op}")
        reduction.check(op, rows.dtype, operation=call.operation)
        if where.dtype.kind not in "iu" and where.size:
            raise TypeError(f"sparse_allreduce: indices are no integers, got {where.dtype}")
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
        call.describe(op=op.value, dtype=rows.dtype, row=rows.shape[1:], num_rows=num_rows)
        total = sum(call.agree_on_rows(len(where)))
    where = where.astype(np.int64)
    row_bytes = rows.dtype.itemsize * max(1, math.prod(rows.shape[1:]))
    if num_rows is not None and total * (row_bytes + 8) > 2 * num_rows * row_bytes:
        named = np.zeros(num_rows, bool)
        named[where] = True
        large = np.zeros((num_rows, *rows.shape[1:]), reduction.work_dtype(rows.dtype))
        with reduction.quiet():
            np.add.at(large, where, rows)
        named = self.allreduce(named, op=reduction.MAX, timeout=timeout)
        large = self.allreduce(large, op=op, out=large, timeout=timeout)
        found = np.flatnonzero(named)
        with reduction.quiet():
            return found, loan.give_back(large[found].astype(rows.dtype, copy=False))
    all_indices = self.allgather(where, timeout=timeout)
    all_rows = self.allgather(np.ascontiguousarray(rows), timeout=timeout)
    found, place = np.unique(all_indices, return_inverse=True)
    summed = np.zeros((len(found), *rows.shape[1:]), reduction.work_dtype(rows.dtype))
    with reduction.quiet():
        np.add.at(summed, place, all_rows)  # in the order of the ranks
        if op is MEAN:
            summed /= self.size
        return found, loan.give_back(summed.astype(rows.dtype))


def from_root(self: Communicator, call: Call, obj: Any, root: int) -> Any:
    """Return the root's object, by pickle; itself on the root. Part of a call that is described."""
    own = self.rank == root
    data = _pickled(obj) if own else np.empty(0, np.uint8)
    # The length, and as much of the object as travels with it.
    head = np.zeros(_HEAD_BYTES, np.uint8)
    length, begin = head[:8].view(np.int64), head[8:]
    if own:
        length[0] = data.size
        begin[: data.size] = data[: begin.size]
    ways.broadcast(self._transport, call, head, root, "auto")
    if length[0] <= begin.size:
        data = begin[: length[0]]
    else:
        if not own:
            data = np.empty(length[0], np.uint8)
        ways.broadcast_agreed(self._transport, call, data, root, "auto")
    return obj if own else pickle.loads(data.data)


def _pickled(obj: object) -> Array:
    return np.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), np.uint8)
