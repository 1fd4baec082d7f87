"""`allreduce`, `reduce` and `reduce_scatter`.

Each finds the plan of an earlier call like this one and runs it; or it looks at its arguments,
describes itself, makes a plan, runs it, and keeps it. `docs/how-a-call-goes.md` has the steps.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, overload

import numpy as np

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.arrays.reduction import LOCATING, LOWERED, MEAN, Op
from collectives.calls import counts as row_counts
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import (
    A,
    CompressionOptions,
    Detachable,
    Numbers,
    ReduceOptions,
    ReduceScatterOptions,
    Splits,
    Unpack,
)
from collectives.devices.staged import DeviceArgument, DeviceOperations
from collectives.kernels.compression import NONE, Compression, resolve
from collectives.operations import minloc, plan_cache
from collectives.plans import by_messages
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.prepared_calls import MessageCall, NodeCall
from collectives.tracing.call_sites import caller

__all__ = ["allreduce", "reduce", "reduce_scatter"]


@overload
def allreduce(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[CompressionOptions]
) -> Array: ...
@overload
def allreduce(
    group: Group, x: Detachable[A], *, out: None = None, **options: Unpack[CompressionOptions]
) -> A: ...
@overload
def allreduce(
    group: Group, x: A, *, out: None = None, **options: Unpack[CompressionOptions]
) -> A: ...
@overload
def allreduce(group: Group, x: object, *, out: A, **options: Unpack[CompressionOptions]) -> A: ...
def allreduce(
    group: Group,
    x: Any,
    *,
    op: Op = MEAN,
    out: Any = None,
    algorithm: str = "auto",
    compression: Compression | None = NONE,
    name: str | None = None,
    prescale: float = 1,
    postscale: float = 1,
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of all ranks, and give every rank the result.

    As if all arrays were gathered and combined in a fixed order of ranks.

    Args:
        x: shape (...), any dtype of the table in `collectives.arrays.reduction`; any strides. A
            NumPy, PyTorch, JAX or CuPy array, a number or a nested list of numbers.
        op: how to combine; the default divides by the number of ranks. LOGICAL_AND, LOGICAL_OR and
            LOGICAL_XOR ask whether numbers are not zero; INTEGER_MEAN is truncated towards zero.
        out: where to put the result, may be `x` itself; an array of the shape and dtype of `x`
            that can be written, of NumPy, PyTorch, CuPy or another library with DLPack.
        algorithm: "auto", "node", "ring", "tree", "double_tree", "doubling", "halving",
            "hierarchical" or "native"; "nccl" for arrays on CUDA devices.
        compression: `FP16`, `BF16` or `INT8` let float32 and float64 arrays travel as 16 or 8 bits
            wherever they travel as messages: rounded once, summed in float32, and the result
            rounded once, however many ranks there are. `on("network")` is for those between nodes.
            None is `NONE`.
        name: of the array, for compression with feedback.
        prescale: by what every rank's array is multiplied before it is combined; not for integers.
        postscale: by what the result is multiplied; likewise. Both by one number of all ranks, and
            16-bit floats as 32-bit ones, which are rounded once, at the end.
        timeout: seconds.

    Returns:
        `out`, or a new array of the kind, shape and dtype of `x`, on its device; on the host also
        with the memory order of `x` (`channels_last`, Fortran). The same bits on all ranks (with
        "native" and "nccl" as far as that library does so). With MINLOC and MAXLOC `x`, `out` and
        the result are pairs (see `collectives.operations.minloc`).

    Raises:
        TypeError: the op is not defined for the dtype, or this is not a compression.
        ValueError: unknown algorithm, or `out` does not fit.
        MismatchError: ranks differ in operation, op, dtype, shape or options; on all ranks. Or
            another rank's arguments are wrong.
        CollectiveTimeout: some rank did not come in time, on the ranks that waited.
        PeerFailure: a rank has died, on the ranks that waited for it.

    Cost: "ring" 2 (P - 1) messages and 2 (P - 1)/P S bytes sent per rank; "tree" at most
        2 ceil(log2 P) messages of S bytes.
    Order: fixed by algorithm, P and size; reproducible.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> comm.allreduce([1.0, 2.0], op=cc.SUM).tolist() == [comm.size, 2.0 * comm.size]
        True
    """
    key = ("allreduce", op, algorithm, None if compression is NONE else compression, prescale,
           postscale)  # fmt: skip
    known = plan_cache.run_cached(group, key, x, out, timeout, caller())  # step 1
    if known is not None:
        return known
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.allreduce(group, allreduce, x, out, asked)
    with begin_call(group, "allreduce", timeout) as call:  # step 2
        compression = resolve(compression, call.operation)
        on_devices = group.state_of(DeviceOperations)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        loan: HostArgument | DeviceArgument | None = None
        if not scales and op not in LOWERED:
            loan = on_devices.borrow(call.operation, x, out, algorithm)
        loan = loan or host_arrays.host_view(x, out, operation=call.operation)  # step 3
        array = loan.host if isinstance(loan, HostArgument) else loan
        way = lowering.lower(op, array.dtype, group.size, scales, operation=call.operation)
        codec = None
        if way is None or way.dtype == array.dtype:
            codec = compression.codec(array.dtype, op, network=group.num_nodes > 1, name=name)
        if codec is not None:
            codec.acquire(math.prod(array.shape), array.dtype)
        if not isinstance(loan, HostArgument):
            algorithm = on_devices.algorithm_for(algorithm, loan, op, codec, call.operation)
        memory = {} if isinstance(loan, HostArgument) else {"memory": "device"}
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, compression=compression, **memory,
            **scales, algorithm=algorithm,
        )  # fmt: skip
        if not isinstance(loan, HostArgument):
            planned = on_devices.allreduce(call, loan, ReduceSpec(op, algorithm, codec))
            if planned is not None:
                window, in_window = planned
                plan_cache.store(group, key, window, window, in_window)  # step 7
            return loan.finish()
        if way is not None:
            loan, op = way.lend(loan), way.op
        how = ReduceSpec(op, algorithm, codec)
        send, flat, result = _memory(loan)
        plan = plans.allreduce(call, send, flat, how)  # step 5
        plan.first(call, send, flat)  # step 6
        # Not what every call looks at once more: a name, or numbers before they are combined.
        if way is None and (codec is None or codec.residuals is None):
            plan_cache.store(group, key, loan.host, result, plan)  # step 7
    return loan.restore(host_arrays.copy_to(flat, result))


@overload
def reduce(
    group: Group, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[ReduceOptions]
) -> Array | None: ...
@overload
def reduce(
    group: Group,
    x: Detachable[A],
    root: int = 0,
    *,
    out: None = None,
    **options: Unpack[ReduceOptions],
) -> A | None: ...
@overload
def reduce(
    group: Group, x: A, root: int = 0, *, out: None = None, **options: Unpack[ReduceOptions]
) -> A | None: ...
@overload
def reduce(
    group: Group, x: object, root: int = 0, *, out: A, **options: Unpack[ReduceOptions]
) -> A | None: ...
def reduce(
    group: Group,
    x: Any,
    root: int = 0,
    *,
    op: Op = MEAN,
    out: Any = None,
    algorithm: str = "auto",
    prescale: float = 1,
    postscale: float = 1,
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of all ranks, and give the result to one.

    Arguments and errors as `allreduce`; `out` is used on the root only.

    Algorithms: "auto", "node", "tree", "double_tree" or "native".

    Returns:
        On the root `out` or a new array of the shape and dtype of `x`, elsewhere None.

    Cost: by tree one message of S bytes per rank, ceil(log2 P) received by the root; by double_tree
    S bytes received by every rank, in slices.
    """
    own = group.rank == root
    key = ("reduce", op, algorithm, root, prescale, postscale)
    # An array of NumPy stands for no result at less cost than `DEFERRED_OUT`.
    to = out if own else (x if type(x) is np.ndarray else plan_cache.DEFERRED_OUT)
    known = plan_cache.run_cached(group, key, x, to, timeout, caller())  # step 1
    if known is not None:
        return known if own else None
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.reduce(group, (allreduce, reduce), x, root, out, asked)
    with begin_call(group, "reduce", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, out if own else None, operation=call.operation)  # step 3
        array = loan.host
        call.check_root(root)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        way = lowering.lower(op, array.dtype, group.size, scales, operation=call.operation)
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, root=root, **scales,
            algorithm=algorithm,
        )  # fmt: skip
        if way is not None:
            loan, op = way.lend(loan), way.op
        send, flat, result = _memory(loan)
        target = flat if own else None
        plan: NodeCall | MessageCall  # step 5
        if engine := call.engine_for(algorithm):
            plan = NodeCall(call, engine.plan_reduce(send, target, op, root, call.digest))
        else:
            how = ReduceSpec(op, algorithm)
            plan = MessageCall(call, partial(by_messages.reduce, how=how, root=root))
        plan.first(call, send, target)  # step 6
        if way is None:
            plan_cache.store(group, key, array, result if own else array, plan)  # step 7
    return None if target is None else loan.restore(host_arrays.copy_to(flat, result))


@overload
def reduce_scatter(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[ReduceScatterOptions]
) -> Array: ...
@overload
def reduce_scatter(
    group: Group, x: Detachable[A], *, out: None = None, **options: Unpack[ReduceScatterOptions]
) -> A: ...
@overload
def reduce_scatter(
    group: Group, x: A, *, out: None = None, **options: Unpack[ReduceScatterOptions]
) -> A: ...
@overload
def reduce_scatter(
    group: Group, x: object, *, out: A, **options: Unpack[ReduceScatterOptions]
) -> A: ...
def reduce_scatter(
    group: Group,
    x: Any,
    *,
    op: Op = MEAN,
    out: Any = None,
    counts: Splits | None = None,
    algorithm: str = "auto",
    prescale: float = 1,
    postscale: float = 1,
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of all ranks, and give each rank its share of the rows.

    Args:
        x: shape (n, ...), the same on all ranks; n need not be a multiple of the size.
        op: how to combine.
        out: where to put the own rows; of their shape and the dtype of `x`, as for `allreduce`. It
            may be this rank's rows of `x`.
        counts: the rows of every rank, which add up to n, the same on all ranks; even shares if
            None, the first `n % size` ranks getting one row more.
        algorithm: "auto", "node", "ring", "halving" or "native".
        prescale: as for `allreduce`.
        postscale: likewise.
        timeout: seconds.

    Returns:
        `out`, or a new array of shape (own rows, ...) and the dtype of `x`.

    Raises:
        ValueError: `x` has no dimension, the counts do not add up, or `out` does not fit.
        TypeError, MismatchError, CollectiveTimeout: as `allreduce`.

    Cost: "ring" P - 1 messages and (P - 1)/P S bytes sent per rank.
    """
    key: plan_cache.Key = ("reduce_scatter", op, algorithm, prescale, postscale,
                      tuple(counts) if type(counts) is list else counts)  # fmt: skip
    find = plan_cache.run_cached if out is None else plan_cache.run_cached_into
    if (known := find(group, key, x, out, timeout, caller())) is not None:  # step 1
        return known
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.reduce_scatter(group, (allreduce, reduce_scatter), x, out, counts, asked)
    with begin_call(group, "reduce_scatter", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation=call.operation)  # step 3
        array = loan.host
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        way = lowering.lower(op, array.dtype, group.size, scales, operation=call.operation)
        shares = row_counts.split_counts(call, array, counts)
        shape = (shares[group.rank], *array.shape[1:])
        target, give_back = None, loan.restore
        if out is not None:
            target, give_back = host_arrays.check_out(
                out, shape, array.dtype, operation=call.operation
            )
        told: dict[str, object] = {}
        if counts is not None:
            told["counts"] = numbers = tuple(shares)
            key = (*key[:-1], numbers)
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, **told, **scales,
            algorithm=algorithm,
        )  # fmt: skip
        if way is not None:
            loan, op = way.lend(HostArgument(array, target, give_back)), way.op
            array, target, give_back = loan.host, None, loan.restore
        bounds = [0, *(n * math.prod(array.shape[1:]) for n in itertools.accumulate(shares))]
        send = host_arrays.flat(array)
        before = bounds[group.rank] * array.itemsize
        result, own = host_arrays.output(target, shape, array.dtype, send, -before)
        plan = plans.reduce_scatter(call, send, bounds, ReduceSpec(op, algorithm), shape)  # step 5
        plan.first(call, send, own)  # step 6
        if way is None:
            plan_cache.store(group, key, array, None, plan)  # step 7
    return give_back(host_arrays.copy_to(own, result))


def _memory(loan: HostArgument) -> tuple[Array, Array, Array]:
    """Return flat memory of what is sent and of the result, and the result in its own shape."""
    array = loan.host
    result = np.empty_like(array) if loan.target is None else loan.target
    return host_arrays.flat(array), host_arrays.flat_target(result, array), result
