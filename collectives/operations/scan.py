"""Prefix reductions: `scan` and `exscan`.

Comments name the steps of `docs/how-a-call-goes.md`. "node": the ranks of one node publish their
arrays in slices, and each rank combines the slices of the lower ranks in rank order. "prefix":
messages (`collectives.algorithms.scan`). "native": the function of MPI.
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
from collectives.calls.overloads import A, CommonOptions, Numbers, Tensor, Unpack
from collectives.node.engine import Engine

__all__ = ["ScanOptions", "exscan", "scan"]

# Bytes of each rank's array that are published at a time. A rank buffers the slices of all lower
# ranks, which should fit into a cache.
_SLICE_BYTES = 1 << 18


class ScanOptions(CommonOptions, total=False):
    """Options of a prefix reduction."""

    op: Op


@overload
def scan(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[ScanOptions]
) -> Array: ...
@overload
def scan(group: Group, x: Tensor[A], *, out: None = None, **options: Unpack[ScanOptions]) -> A: ...
@overload
def scan(group: Group, x: A, *, out: None = None, **options: Unpack[ScanOptions]) -> A: ...
@overload
def scan(group: Group, x: object, *, out: A, **options: Unpack[ScanOptions]) -> A: ...
def scan(
    group: Group,
    x: Any,
    *,
    op: Op = SUM,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of ranks 0 to r on rank r, including its own.

    As if rank r had gathered the arrays of ranks 0 to r and combined them.

    Args:
        x: as for `allreduce`.
        op: reduction operation; SUM by default, unlike other reductions. MEAN divides by r + 1.
        out: as for `allreduce`.
        algorithm: "auto", "node", "prefix" or "native".
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out`, or a new array of the kind, shape and dtype of `x`.

    Raises:
        As `allreduce`.

    Cost: on one node r S bytes read by rank r, scratch 256 KiB per lower rank, and S for MEAN;
        otherwise ceil(log2 P) messages of S bytes, scratch 3 S.
    Order: on one node rank order, otherwise fixed by P and r; reproducible. 16-bit floats are added
        in float32 and rounded once.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> comm.scan(2).item() == 2 * (comm.rank + 1)
        True
    """
    return _scan(group, "scan", x, op, out, algorithm, timeout)


@overload
def exscan(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[ScanOptions]
) -> Array | None: ...
@overload
def exscan(
    group: Group, x: Tensor[A], *, out: None = None, **options: Unpack[ScanOptions]
) -> A | None: ...
@overload
def exscan(group: Group, x: A, *, out: None = None, **options: Unpack[ScanOptions]) -> A | None: ...
@overload
def exscan(group: Group, x: object, *, out: A, **options: Unpack[ScanOptions]) -> A | None: ...
def exscan(
    group: Group,
    x: Any,
    *,
    op: Op = SUM,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of ranks 0 to r - 1 on rank r.

    Arguments, cost, order and errors as `scan`; `out` is unused on rank 0.

    Returns:
        As `scan`; on rank 0 None, or the identity of an op of `collectives.operation` that has one.

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
        # None also for a wrong op, which `check` reports.
        own = reduction.RULES[op].own if reduction.is_on_host(op) else None
        identity = None if own is None else own.identity
        has_result = inclusive or group.rank > 0 or identity is not None
        # Without a result of `exscan`, `out` of rank 0 may be of any kind.
        loan = host_arrays.host_view(x, out if has_result else None, operation=operation)  # step 3
        array = loan.host
        reduction.check(op, array.dtype, operation=operation, algorithm=algorithm)
        call.describe(
            op=op.value, dtype=array.dtype, shape=array.shape, algorithm=algorithm
        )  # step 4
        flat, work = host_arrays.flat(array), reduction.work_dtype(array.dtype)
        if engine := call.engine_for(algorithm):  # step 6
            total = _in_memory(call, engine, flat, work, op)
        else:
            # By messages `exclusive` does not compare calls, so they are compared here.
            call.agree()
            before = selection.SCANS["prefix" if algorithm == "auto" else algorithm]
            # A private copy, which the rounds may change; 16-bit floats are widened once.
            total = before(
                group.transport, _term(flat.astype(work), op, group.size), op, call.deadline
            )
        if not has_result:
            return None
        count = group.rank + inclusive
        # Rank 0 of a `scan`: its own array is the result.
        if total is None and not inclusive:
            total = np.full(flat.size, identity, work)
        elif total is None:
            total = flat.astype(work)
        else:
            if inclusive:
                # The own array is last, so that the order of the sum is the order of ranks.
                reduction.combine(op)(total, _term(flat, op, group.size))
            # After the sum, because each rank divides by another number.
            if op is MEAN:
                with reduction.ignore_float_errors():
                    device.divide(total, count / reduction.mean_scale(group.size))
        result = np.empty_like(array) if loan.target is None else loan.target
    return loan.restore(host_arrays.copy_to(total, result))


def _term(array: Array, op: Op, size: int) -> Array:
    """Return an array in the dtype of sums, for MEAN scaled so that no sum overflows."""
    if op is not MEAN:
        return array.astype(reduction.work_dtype(array.dtype), copy=False)
    term = array.astype(reduction.work_dtype(array.dtype))
    reduction.prescale(term, op, reduction.mean_scale(size))
    return term


def _in_memory(call: Call, engine: Engine, own: Array, work: np.dtype[Any], op: Op) -> Array | None:
    """Combine the arrays of the lower ranks in rank order; None on rank 0."""
    rank, combine = call.group.rank, reduction.combine(op)
    step = _SLICE_BYTES // own.itemsize
    total = np.empty(own.size, work)
    # The slices of all lower ranks at once, reused for each slice of the array.
    shown = np.empty((rank, min(step, own.size)), own.dtype)
    for at in range(0, max(own.size, 1), step):  # at least once, because it compares the calls
        part = own[at : at + step]
        wanted = [(other, 0, shown[other, : part.size]) for other in range(rank)]
        # Each slice is one synchronization, also of ranks that need no data.
        call.checked(engine.publish(part, wanted, call.digest, call.deadline, part.nbytes))
        for other, _, theirs in wanted:
            if other == 0:
                total[at : at + step] = _term(theirs, op, call.group.size)
            else:
                combine(total[at : at + step], _term(theirs, op, call.group.size))
    return total if rank > 0 else None
