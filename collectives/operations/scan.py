"""Prefix reductions: `scan` and `exscan`.

The steps are those of `docs/how-a-call-goes.md`. Ranks of one node show each other their arrays, a
slice at a time, and combine those before theirs in the order of the ranks ("node"); else
`collectives.algorithms.scan`, or what MPI has ("native").
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from collectives.algorithms import selection
from collectives.arrays import device, host_arrays, reduction
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import MEAN, SUM, Op
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Detachable, Numbers
from collectives.node.engine import Engine

__all__ = ["exscan", "scan"]

# Bytes of each rank's array that are shown at a time: those of all ranks before one wait in its
# memory to be combined, and should stay in a cache.
_SLICE_BYTES = 1 << 18


@overload
def scan(
    group: Group,
    x: Numbers,
    *,
    op: Op = SUM,
    out: None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Array: ...
@overload
def scan(
    group: Group,
    x: Detachable[A],
    *,
    op: Op = SUM,
    out: None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> A: ...
@overload
def scan(
    group: Group,
    x: A,
    *,
    op: Op = SUM,
    out: None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> A: ...
@overload
def scan(
    group: Group,
    x: object,
    *,
    op: Op = SUM,
    out: A,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> A: ...
def scan(
    group: Group,
    x: Any,
    *,
    op: Op = SUM,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of the ranks up to this one, its own included.

    As if rank r had gathered the arrays of the ranks 0 to r and combined them.

    Args:
        x: as for `allreduce`.
        op: how to combine; SUM where other reductions take the mean. MEAN is that of r + 1 arrays.
        out: as for `allreduce`.
        algorithm: "auto", "node", "prefix" or "native".
        timeout: seconds.

    Returns:
        `out`, or a new array of the kind, shape and dtype of `x`.

    Raises:
        As `allreduce`.

    Cost: on one node r S bytes read by rank r, scratch 256 KiB for each rank before it; else
        ceil(log2 P) messages of S bytes, scratch 3 S.
    Order: on one node that of the ranks, else fixed by P and r; reproducible. 16-bit floats add up
        in float32, and are rounded once.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> comm.scan(2).item() == 2 * (comm.rank + 1)
        True
    """
    return _scan(group, "scan", x, op, out, algorithm, timeout)


@overload
def exscan(
    group: Group,
    x: Numbers,
    *,
    op: Op = SUM,
    out: None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Array | None: ...
@overload
def exscan(
    group: Group,
    x: Detachable[A],
    *,
    op: Op = SUM,
    out: None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> A | None: ...
@overload
def exscan(
    group: Group,
    x: A,
    *,
    op: Op = SUM,
    out: None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> A | None: ...
@overload
def exscan(
    group: Group,
    x: object,
    *,
    op: Op = SUM,
    out: A,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> A | None: ...
def exscan(
    group: Group,
    x: Any,
    *,
    op: Op = SUM,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of the ranks before this one.

    Arguments, cost, order and errors as `scan`; `out` is not used on rank 0.

    Returns:
        As `scan`; None on rank 0, which has no rank before it.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> rows = 3 + comm.rank                     # where do mine begin among those of all?
        >>> before = comm.exscan(rows)
        >>> first = 0 if before is None else before.item()
        >>> first == sum(3 + rank for rank in range(comm.rank))
        True
    """
    return _scan(group, "exscan", x, op, out, algorithm, timeout)


def _scan(
    group: Group, operation: str, x: Any, op: Op, out: Any, algorithm: str, timeout: float | None
) -> Any:
    with begin_call(group, operation, timeout) as call:  # step 2
        inclusive = operation == "scan"
        has_result = inclusive or group.rank > 0
        loan = host_arrays.host_view(x, out if has_result else None, operation=operation)  # step 3
        array = loan.host
        reduction.check(op, array.dtype, operation=operation)
        call.describe(
            op=op.value, dtype=array.dtype, shape=array.shape, algorithm=algorithm
        )  # step 4
        own, work = host_arrays.flat(array), reduction.work_dtype(array.dtype)
        if engine := call.engine_for(algorithm):  # step 6
            total = _in_memory(call, engine, own, work, op)
        else:
            call.agree()
            before = selection.SCANS["prefix" if algorithm == "auto" else algorithm]
            total = before(group.transport, own.astype(work), op, call.deadline)
        if not has_result:
            return None
        count = group.rank + inclusive
        if total is None:
            total = own.astype(work)
        elif inclusive:
            reduction.combine(op)(total, own.astype(work, copy=False))
        if op is MEAN and count > 1:
            with reduction.ignore_float_errors():
                device.divide(total, count)
        result = np.empty_like(array) if loan.target is None else loan.target
    return loan.restore(host_arrays.copy_to(total, result))


def _in_memory(call: Call, engine: Engine, own: Array, work: np.dtype[Any], op: Op) -> Array | None:
    """Combine the arrays of the ranks before this one, in their order; None on rank 0."""
    rank, combine = call.group.rank, reduction.combine(op)
    step = _SLICE_BYTES // own.itemsize
    total = np.empty(own.size, work)
    shown = np.empty((rank, min(step, own.size)), own.dtype)
    for at in range(0, max(own.size, 1), step):  # once at least, which compares the calls
        part = own[at : at + step]
        wanted = [(other, 0, shown[other, : part.size]) for other in range(rank)]
        call.checked(engine.publish(part, wanted, call.digest, call.deadline, part.nbytes))
        for other, _, theirs in wanted:
            if other == 0:
                total[at : at + step] = theirs
            else:
                combine(total[at : at + step], theirs.astype(work, copy=False))
    return total if rank > 0 else None
