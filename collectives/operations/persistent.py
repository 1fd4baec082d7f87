"""Persistent operations, planned once and run every step: `plan_allreduce` and others.

Steps 2 to 5 of `docs/how-a-call-goes.md` happen once, and each run only exchanges data. Arrays must
be contiguous and writable host memory: NumPy arrays or PyTorch tensors on the CPU. In-place
reductions are fastest with arrays of `shared_empty`.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array
from collectives.arrays.lowering import Lowering
from collectives.arrays.reduction import LOCATING, MEAN, Op
from collectives.calls import counts as row_counts
from collectives.calls import plan_buffers
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Splits
from collectives.operations import gather_moves, minloc
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.message_calls import MessageCall
from collectives.plans.planner import CompositePlan, Plan
from collectives.plans.prepared_calls import NodeCall, PreparedCall

__all__ = ["plan_allgather", "plan_allreduce", "plan_broadcast", "plan_reduce_scatter"]


def plan_allreduce(
    group: Group,
    x: A,
    *,
    op: Op = MEAN,
    algorithm: str = "auto",
    prescale: float = 1,
    postscale: float = 1,
    timeout: float | None = None,
) -> Plan[A]:
    """Plan an in-place all-reduce once, for a call that repeats in every step.

    *Collective*: all ranks, as `allreduce`. Arguments and errors as `allreduce(x, out=x)`.

    Args:
        x: shape (...), contiguous, writable; fastest from `shared_empty`. With MINLOC and MAXLOC a
            pair of such arrays.
        op: reduction operation.
        algorithm: as for `allreduce`; not "nccl".
        prescale: as for `allreduce`; with a scale, every call works on a copy.
        postscale: as for `allreduce`; with a scale, every call works on a copy.
        timeout: seconds of every later call; None uses UNISONO_TIMEOUT.

    Returns:
        A function without arguments that reduces `x` in place and returns it.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> gradient = comm.shared_empty(4, "float32")
        >>> average = comm.plan_allreduce(gradient)
        >>> gradient[:] = comm.rank
        >>> average().tolist() == [(comm.size - 1) / 2] * 4
        True
    """
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.plan_allreduce(group, plan_allreduce, x, asked)
    with begin_call(group, "plan_allreduce", timeout) as call:  # step 2
        array = plan_buffers.pin(call, x)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        way = lowering.lower(
            op, array.dtype, group.size, scales, operation=call.operation, algorithm=algorithm
        )
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, **scales, algorithm=algorithm
        )
        call.agree()
        name, flat = _make_plan(call, "allreduce"), array.reshape(-1)
        if way is None:
            plan = plans.allreduce(call, flat, flat, ReduceSpec(op, algorithm))  # step 5
            return Plan(x, flat, flat, plan, name, timeout)
        own = np.empty(flat.shape, way.dtype)
        plan = plans.allreduce(call, own, own, ReduceSpec(way.op, algorithm))
        return Plan(x, flat, flat, _with_lowering(way, plan, own, own), name, timeout)


def plan_broadcast(
    group: Group, x: A, root: int = 0, *, algorithm: str = "auto", timeout: float | None = None
) -> Plan[A]:
    """Plan an in-place broadcast once, for a call that repeats in every step.

    *Collective*: all ranks, as `broadcast`. Arguments and errors as `broadcast(x, root, out=x)`.

    Args:
        x: shape (...), contiguous, writable.
        root: rank whose elements are copied.
        algorithm: as for `broadcast`; not "nccl".
        timeout: seconds of every later call; None uses UNISONO_TIMEOUT.

    Returns:
        A function without arguments that fills `x` with the root's elements, and returns `x`.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> weights = comm.shared_empty(4, "float32")
        >>> weights[:] = comm.rank
        >>> comm.plan_broadcast(weights)().tolist()
        [0.0, 0.0, 0.0, 0.0]
    """
    with begin_call(group, "plan_broadcast", timeout) as call:  # step 2
        array = plan_buffers.pin(call, x)
        call.check_root(root)
        call.describe(  # step 4
            dtype=array.dtype, shape=array.shape, root=root, algorithm=algorithm
        )
        call.agree()
        name, flat = _make_plan(call, "broadcast"), array.reshape(-1)
        plan = plans.broadcast(call, flat, root, algorithm)  # step 5
        return Plan(x, flat, flat, plan, name, timeout)


def plan_allgather(
    group: Group, x: A, *, out: Any = None, algorithm: str = "auto", timeout: float | None = None
) -> Plan[A]:
    """Plan an all-gather of arrays with fixed lengths once, for a call that repeats in every step.

    *Collective*: all ranks, as `allgather`. Arguments and errors as `allgather(x, out=out)`.

    Args:
        x: shape (n, ...), contiguous, writable; n may differ between ranks; a scalar counts as
            shape (1,).
        out: contiguous array for the result of every call. `x` may be this rank's part of `out`,
            but may not overlap another part. None creates an array of the kind of `x`.
        algorithm: as for `allgather`.
        timeout: seconds of every later call; None uses UNISONO_TIMEOUT.

    Returns:
        A function without arguments that fills `out` with the current rows of all ranks' `x`, and
        returns `out`: the same array each time.
    """
    with begin_call(group, "plan_allgather", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation=call.operation)
        array = np.atleast_1d(plan_buffers.pin(call, x))
        row, dtype = array.shape[1:], array.dtype
        to = host_arrays.check_out_rows(out, row, dtype, loan, operation=call.operation)
        plan_buffers.check_out(call, out, to.target)
        call.describe(dtype=dtype, row=row, algorithm=algorithm)  # step 4
        rows, given = call.exchange_integers(len(array), to.number).T.tolist()
        if error := row_counts.output_mismatch(
            group, call.operation, row, given, [sum(rows)] * group.size
        ):
            raise call.announce(error)
        call.next_chunk()
        width = math.prod(row)
        bounds = [width * n for n in itertools.accumulate(rows, initial=0)]
        before = bounds[group.rank] * dtype.itemsize
        send, shape = array.reshape(-1), (sum(rows), *row)
        result, flat = plan_buffers.output(call, to.target, shape, dtype, send, before)
        call.agree()  # plans are created only after every rank has passed its checks
        name = _make_plan(call, "allgather", rows=tuple(rows))
        move = partial(gather_moves.allgather_known, bounds, algorithm)
        plan: NodeCall | MessageCall = MessageCall(call, move)
        if engine := call.engine_for(algorithm):  # step 5
            ends = [n * dtype.itemsize for n in bounds]
            parts = enumerate(itertools.pairwise(ends))
            table = [
                (rank, 0, stop - start, start) for rank, (start, stop) in parts if start < stop
            ]
            longest = max(rows) * width * dtype.itemsize
            plan = NodeCall(call, engine.plan_publish(send.nbytes, table, call.digest, longest))
    return Plan(to.restore(result), send, flat, plan, name, timeout)


def plan_reduce_scatter(
    group: Group,
    x: A,
    *,
    op: Op = MEAN,
    out: Any = None,
    counts: Splits | None = None,
    algorithm: str = "auto",
    prescale: float = 1,
    postscale: float = 1,
    timeout: float | None = None,
) -> Plan[A]:
    """Plan a reduce-scatter once, for a call that repeats in every step.

    *Collective*: all ranks, as `reduce_scatter`. Arguments and errors as
    `reduce_scatter(x, op=op, out=out, counts=counts)`.

    Args:
        x: shape (n, ...), contiguous, writable, the same shape on all ranks; not modified. With
            MINLOC and MAXLOC `x` and `out` are pairs.
        op: reduction operation.
        out: contiguous array for this rank's rows in every call; may be this rank's rows of `x`.
            None creates an array of the kind of `x`.
        counts: rows for every rank; None shares evenly.
        algorithm: as for `reduce_scatter`.
        prescale: as for `allreduce`; with a scale, every call works on a copy.
        postscale: as for `allreduce`; with a scale, every call works on a copy.
        timeout: seconds of every later call; None uses UNISONO_TIMEOUT.

    Returns:
        A function without arguments that reduces the current contents of all ranks' `x`, writes
        this rank's rows to `out`, and returns `out`: the same array each time.
    """
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        both = plan_allreduce, plan_reduce_scatter
        return minloc.plan_reduce_scatter(group, both, x, out, counts, asked)
    with begin_call(group, "plan_reduce_scatter", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation=call.operation)
        array = plan_buffers.pin(call, x)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        way = lowering.lower(
            op, array.dtype, group.size, scales, operation=call.operation, algorithm=algorithm
        )
        shares = row_counts.split_counts(call, array, counts)
        shape, target, give_back = (shares[group.rank], *array.shape[1:]), None, loan.restore
        if out is not None:
            target, give_back = host_arrays.check_out(
                out, shape, array.dtype, operation=call.operation
            )
        plan_buffers.check_out(call, out, target)
        width = math.prod(array.shape[1:])
        bounds = [width * n for n in itertools.accumulate(shares, initial=0)]
        send, before = array.reshape(-1), bounds[group.rank] * array.itemsize
        result, flat = plan_buffers.output(call, target, shape, array.dtype, send, -before)
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, counts=tuple(shares), **scales,
            algorithm=algorithm,
        )  # fmt: skip
        call.agree()
        name = _make_plan(call, "reduce_scatter")
        plan: PreparedCall
        if way is None:
            plan = plans.reduce_scatter(call, send, bounds, ReduceSpec(op, algorithm), shape)  # 5
        else:
            own, taken = np.empty(send.shape, way.dtype), np.empty(flat.shape, way.dtype)
            by = ReduceSpec(way.op, algorithm)
            plan = _with_lowering(
                way, plans.reduce_scatter(call, own, bounds, by, shape), own, taken
            )
    return Plan(give_back(result), send, flat, plan, name, timeout)


def _with_lowering(way: Lowering, plan: PreparedCall, own: Array, taken: Array) -> CompositePlan:
    """Plan a call that converts its data, runs another plan, and converts the result back.

    Args:
        way: the conversions.
        plan: plan of the inner call.
        own: input of the inner call.
        taken: result of the inner call.
    """

    def run(send: Array, out: Array | None, timeout: float | None, frame: FrameType) -> None:
        assert out is not None
        way.put(send, own)
        plan.run(own, taken, timeout, frame)
        out[...] = way.back(taken)

    return CompositePlan(plan.group, run)


def _make_plan(call: Call, operation: str, **fields: object) -> str:
    """Add the plan's fields to the description, and return the name of its calls in records."""
    name = f"planned {operation}"
    call.add(operation=name, **fields)
    return name
