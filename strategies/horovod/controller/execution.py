"""Execution of requests that are ready on all ranks.

All-reduces with the same op run together, as one grouped call; those by Adasum, which combines
whole arrays, run alone. A rank that has joined (`hvd.join`) contributes data that changes no
result: zeros for a sum or Adasum, the largest number for a minimum, no rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies.core import array_ops
from strategies.horovod.adasum import Adasum, adasum
from strategies.horovod.controller.pending_requests import PendingRequest
from strategies.horovod.controller.request_signature import RequestSignature

__all__ = ["WITHOUT_JOINED", "Response", "execute"]

OPS: dict[str, Any] = {op.value: op for op in (cc.MEAN, cc.SUM, cc.MIN, cc.MAX, cc.PRODUCT)}

WITHOUT_JOINED = ("alltoall", "reducescatter")
"""Operations that are impossible after a rank has joined, because its rows would be lost."""


class Response(NamedTuple):
    """A call that is ready on all ranks.

    Attributes:
        description: description of the call.
        pending: this rank's request; None if it has joined.
        comm: the ranks.
        absent: number of ranks that have joined.
    """

    description: RequestSignature
    pending: PendingRequest | None
    comm: cc.Communicator
    absent: int

    def arrays(self) -> Sequence[Any]:
        """Return this rank's arrays."""
        if self.pending is not None:
            return self.pending.arrays
        # A joined rank makes neutral arrays from the description.
        what = self.description
        if what.operation == "allreduce":
            return [_identity_element(dtype, shape, what.op) for dtype, shape in what.arrays]
        # No rows, but the row's shape, which all ranks must have.
        if what.operation == "allgather":
            return [np.empty((0, *row), np.dtype(dtype)) for dtype, row in what.arrays]
        return [np.empty(shape, np.dtype(dtype)) for dtype, shape in what.arrays]


def execute(works: Sequence[Response]) -> None:
    """Execute calls, all-reduces first; *collective*, the same calls on all ranks.

    Raises:
        CollectiveError: except `MismatchError`: the ranks are no longer in step.
    """
    # In the order of their numbers, equal on all ranks, so that all form the same groups.
    together: dict[Any, list[Response]] = {}
    alone = []
    for work in works:
        if _kind(work.description) == "allreduce":
            together.setdefault(_op(work.description), []).append(work)
        else:
            alone.append(work)
    for op, group in together.items():
        # Bound by defaults: a lambda would otherwise see the last loop variables.
        _attempt(group, lambda group=group, op=op: _reduce(group, op))
    for work in alone:
        _attempt([work], lambda work=work: [_ALONE[_kind(work.description)](work)])


def _kind(description: RequestSignature) -> str:
    """Return how a call is executed: the operation, or Adasum's name."""
    return Adasum.value if description.op == Adasum.value else description.operation


def _attempt(works: Sequence[Response], run: Any) -> None:
    """Pass the results of calls, or the error that all ranks raise, to their requests."""
    try:
        results = run()
        for work, own in zip(works, results, strict=True):
            if work.pending is not None:
                work.pending.succeed(own)
    except (cc.MismatchError, TypeError, ValueError) as error:
        # Errors that all ranks raise together; others leave the ranks out of step.
        for work in works:
            if work.pending is not None and not work.pending.done:
                work.pending.fail(error)


def _reduce(works: Sequence[Response], op: Any) -> list[list[Any]]:
    """Run all-reduces of one op together."""
    comm = works[0].comm
    brought = [[_summable(x, work.description) for x in work.arrays()] for work in works]
    flat = [x for arrays in brought for x in arrays]
    out = _targets(works, brought)
    if len(flat) == 1:
        # A single array saves the packing of a group.
        made = [comm.allreduce(flat[0], op=op, out=out and out[0])]
    else:
        made = comm.grouped_allreduce(flat, op=op, out=out)
    results, given = [], iter(made)
    for work in works:
        own = [next(given) for _ in work.description.arrays]
        results.append([_mean(x, work, i) for i, x in enumerate(own)])
    return results


def _targets(works: Sequence[Response], brought: Sequence[Sequence[Any]]) -> list[Any] | None:
    """Return the output arrays if all results have existing ones, otherwise None."""
    targets: list[Any] = []
    for work, own in zip(works, brought, strict=True):
        pending = work.pending
        if (
            pending is None
            or pending.targets is None
            # A widened integer is a copy, so its target is not the reduced array.
            or any(map(operator.is_not, own, pending.arrays))
        ):
            return None
        targets += pending.targets
    return targets


def _reducescatter(work: Response) -> list[Any]:
    op = _op(work.description)
    return [
        _mean(work.comm.reduce_scatter(_summable(x, work.description), op=op), work, i)
        for i, x in enumerate(work.arrays())
    ]


def _broadcast(work: Response) -> list[Any]:
    targets = None if work.pending is None else work.pending.targets
    return [
        work.comm.broadcast(x, work.description.root, out=None if targets is None else targets[i])
        for i, x in enumerate(work.arrays())
    ]


def _alltoall(work: Response) -> list[Any]:
    assert work.pending is not None
    assert work.pending.splits is not None
    splits = np.array(work.pending.splits, np.int64)
    # The receivers learn the numbers of rows, which are part of the result.
    received = work.comm.alltoall(splits)
    return [work.comm.alltoall(work.arrays()[0], counts=work.pending.splits), received]


def _barrier(work: Response) -> list[Any]:
    work.comm.barrier()
    return []


_ALONE: dict[str, Any] = {
    Adasum.value: lambda work: adasum(work.comm, work.arrays()),
    "allgather": lambda work: [work.comm.allgather(x) for x in work.arrays()],
    "alltoall": _alltoall,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "reducescatter": _reducescatter,
}


def _op(description: RequestSignature) -> Any:
    """Return the reduction of the arrays; a mean of integers is summed here and divided later."""
    whole = any(_is_integer(dtype) for dtype, _ in description.arrays)
    return cc.SUM if whole and description.op == "MEAN" else OPS[description.op]


def _is_integer(dtype: str) -> bool:
    return "int" in dtype


def _summable(x: Any, description: RequestSignature) -> Any:
    """Widen integers for a mean, so that their sum fits."""
    if description.op != "MEAN" or not _is_integer(array_ops.dtype_name(x)):
        return x
    host = array_ops.host(x)
    whole = np.asarray(x.cpu() if host is None else host)
    # 64-bit integers have no wider dtype.
    return whole if whole.dtype.itemsize == 8 else whole.astype(np.int64)


def _mean(result: Any, work: Response, index: int) -> Any:
    """Turn a reduction into the mean over the ranks that have not joined, if the op is a mean."""
    if work.description.op != "MEAN":
        return result
    dtype = work.description.arrays[index][0]
    present = work.comm.size - work.absent
    if _is_integer(dtype):
        # Toward zero, as Horovod; `//` alone rounds toward minus infinity.
        rounded = np.sign(result) * (np.abs(result) // present)  # toward zero
        own = work.arrays()[index]
        return array_ops.on_same_device(own, np.asarray(rounded, dtype))
    # The reduction divided by all ranks, but only some contributed.
    return result if not work.absent else result * (work.comm.size / present)


def _identity_element(dtype: str, shape: tuple[int, ...], op: str) -> Any:
    """Return an array that does not change a reduction."""
    kind = np.dtype(dtype)
    if op in ("MEAN", "SUM", Adasum.value):
        return np.zeros(shape, kind)
    if op == "PRODUCT":
        return np.ones(shape, kind)
    if kind.kind == "b":
        return np.full(shape, op == "MIN", kind)
    if _is_integer(dtype):
        # The limits of the dtype, since infinity is not an integer.
        limits = np.iinfo(kind)
        return np.full(shape, limits.max if op == "MIN" else limits.min, kind)
    return np.full(shape, np.inf if op == "MIN" else -np.inf).astype(kind)
