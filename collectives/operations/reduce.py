"""`allreduce` and `reduce`.

Each operation looks for the plan of an equal earlier call and runs it. Otherwise it checks its
arguments, describes the call, makes a plan, runs it and keeps it. Comments name the steps of
`docs/how-a-call-goes.md`.
"""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np

from collectives.arrays import host_arrays, lowering, reduction
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.arrays.lowering import Lowering
from collectives.arrays.reduction import LOCATING, MEAN, Op
from collectives.calls.call import Call, begin_call
from collectives.calls.fast_path import Given
from collectives.calls.group import Group
from collectives.calls.overloads import (
    A,
    CompressionOptions,
    Numbers,
    ReduceOptions,
    Tensor,
    Unpack,
)
from collectives.devices.staged import DeviceArgument, DeviceOperations
from collectives.kernels.compression import NONE, Codec, Compression, resolve
from collectives.operations import minloc, plan_cache
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.tracing.call_sites import caller

__all__ = ["allreduce", "reduce"]


@overload
def allreduce(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[CompressionOptions]
) -> Array: ...
@overload
def allreduce(
    group: Group, x: Tensor[A], *, out: None = None, **options: Unpack[CompressionOptions]
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
    """Reduce the arrays of all ranks, and return the result on every rank.

    As if all arrays were gathered and combined in a fixed order of ranks.

    Args:
        x: shape (...), any dtype of the table in `collectives.arrays.reduction`, any strides. A
            NumPy, PyTorch, JAX or CuPy array, a number or a nested list of numbers.
        op: reduction operation; the default divides by the number of ranks. LOGICAL_AND, LOGICAL_OR
            and LOGICAL_XOR treat nonzero numbers as true. INTEGER_MEAN truncates towards zero.
        out: writable array for the result, with shape and dtype of `x`, of NumPy, PyTorch, CuPy or
            another library with DLPack; may be `x` itself. None returns a new array.
        algorithm: "auto", "node", "ring", "tree", "double_tree", "doubling", "halving",
            "hierarchical" or "native"; "nccl" for arrays on CUDA devices.
        compression: `FP16`, `BF16` or `INT8` send float32 and float64 arrays as 16 or 8 bits in all
            messages. Each element is rounded once, summed in float32, and the result is rounded
            once, for any number of ranks. `TOPK(fraction)` sends the largest elements of each
            contribution and counts the others as zeros; for SUM and MEAN of float32 and float64.
            `on("network")` compresses only messages between nodes. None is `NONE`.
        name: name of the array, for compression with feedback.
        prescale: factor of every rank's array before the reduction; not for integers. Equal on all
            ranks. 16-bit floats are scaled as 32-bit floats and rounded once, at the end.
        postscale: factor of the result, under the same rules.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out`, or a new array of the kind, shape and dtype of `x`, on its device; on the host also
        with the memory order of `x` (`channels_last`, Fortran). The same bits on all ranks
        ("native" and "nccl": as far as the library guarantees it). With MINLOC and MAXLOC `x`,
        `out` and the result are pairs (see `collectives.operations.minloc`).

    Raises:
        TypeError: the op is not defined for the dtype, or `compression` has another type.
        ValueError: the algorithm is unknown, or `out` does not fit.
        MismatchError: ranks differ in operation, op, dtype, shape or options; on all ranks. Or the
            arguments of another rank are wrong.
        CollectiveTimeout: a rank is missing at the deadline; on the ranks that waited.
        PeerFailure: a rank has died; on the ranks that waited for it.

    Cost: "ring" 2 (P - 1) messages and 2 (P - 1)/P S bytes sent per rank; "tree" at most
        2 ceil(log2 P) messages of S bytes.
    Order: fixed by algorithm, P and size; reproducible.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> comm.allreduce([1.0, 2.0], op=cc.SUM).tolist() == [comm.size, 2.0 * comm.size]
        True
    """
    coded = None if compression is NONE else compression
    made = group.fast_path.repeat(
        x, out, caller(), timeout, "allreduce", op, algorithm, coded, prescale, postscale
    )
    if made is not None:
        return made
    key = ("allreduce", op, algorithm, coded, prescale, postscale)
    try:
        return plan_cache.run_cached(group, key, x, out, timeout, caller())  # step 1
    except plan_cache.NoPlan:
        pass
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.allreduce(group, allreduce, x, out, asked)
    with begin_call(group, "allreduce", timeout) as call:  # step 2
        compression = resolve(compression, call.operation)
        on_devices = group.state_of(DeviceOperations)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        loan: HostArgument | DeviceArgument | None = None
        # Scales, lowered ops and operations of the user compute on the host.
        if not scales and not reduction.is_on_host(op):
            loan = on_devices.borrow(call.operation, x, out, algorithm)
        loan = loan or host_arrays.host_view(x, out, operation=call.operation)  # step 3
        array = loan.host if isinstance(loan, HostArgument) else loan
        way = lowering.lower(
            op, array.dtype, group.size, scales, operation=call.operation, algorithm=algorithm
        )
        codec = _codec_for(array, group, op, way, compression, name)
        memory = {}
        if isinstance(loan, DeviceArgument):
            algorithm = on_devices.algorithm_for(algorithm, loan, op, codec, call.operation)
            memory = {"memory": "device"}
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, compression=compression, **memory,
            **scales, algorithm=algorithm,
        )  # fmt: skip
        how = ReduceSpec(op, algorithm, codec)
        if isinstance(loan, DeviceArgument):
            return _allreduce_on_device(call, key, loan, how)
        if way is not None:
            loan, how = way.lend(loan), how._replace(op=way.op)
        # For a lowered op the loan holds a private copy, so `send` and `flat` are one memory.
        send, flat, result = _memory(loan)
        plan = plans.allreduce(call, send, flat, how)  # step 5
        plan.first(call, send, flat)  # step 6
        # Feedback and scaling need their own work in every call, so such calls have no cached plan.
        if way is None and (codec is None or codec.residuals is None):
            plan_cache.store(group, key, loan.host, result, plan)  # step 7
    return loan.restore(host_arrays.copy_to(flat, result))


def _codec_for(
    array: Array | DeviceArgument, group: Group, op: Op, way: Lowering | None,
    compression: Compression, name: str | None,
) -> Codec | None:  # fmt: skip
    # Top-k rejects what it cannot add; the others send it unchanged.
    if way is not None and way.dtype != array.dtype and compression.fraction is None:
        return None
    codec = compression.codec(array.dtype, op, network=group.num_nodes > 1, name=name)
    if codec is not None:
        # Before the comparison, so that the name of another array is a refusal.
        codec.acquire(math.prod(array.shape), array.dtype)
    return codec


def _allreduce_on_device(
    call: Call, key: plan_cache.Key, loan: DeviceArgument, how: ReduceSpec
) -> Any:
    group = call.group
    # The device path compares the call itself, and may return a plan for an array in a window.
    planned = group.state_of(DeviceOperations).allreduce(call, loan, how)
    if planned is not None:
        window, in_window = planned
        plan_cache.store(group, key, window, window, in_window)  # step 7
    return loan.finish()


@overload
def reduce(
    group: Group, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[ReduceOptions]
) -> Array | None: ...
@overload
def reduce(
    group: Group, x: Tensor[A], root: int = 0, *, out: None = None, **options: Unpack[ReduceOptions]
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
    """Reduce the arrays of all ranks, and return the result on one rank.

    Arguments and errors as `allreduce`; `out` is used on the root only.

    Algorithms: "auto", "node", "tree", "double_tree" or "native".

    Returns:
        On the root `out` or a new array of the shape and dtype of `x`, elsewhere None.

    Cost: "tree" one message of S bytes per rank, ceil(log2 P) received by the root; "double_tree"
        S bytes received by every rank, in slices.
    """
    own = group.rank == root
    # Elsewhere nothing is written; `x` as the result avoids an allocation.
    made = group.fast_path.repeat(
        x, out if own else x, caller(), timeout, "reduce", op, algorithm, root, prescale, postscale
    )
    if made is not None:
        return made if own else None
    key = ("reduce", op, algorithm, root, prescale, postscale)
    try:  # step 1
        # `own` decides between two lookups of the same plan: a result is on the root only.
        if own:
            return plan_cache.run_cached(group, key, x, out, timeout, caller())
        if type(x) is np.ndarray:  # `out=x` avoids an allocation; nothing is written
            plan_cache.run_cached(group, key, x, x, timeout, caller())
        else:
            plan_cache.run_cached_send(group, key, x, timeout, caller(), Given(x, x, marks=False))
        return None
    except plan_cache.NoPlan:
        pass
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.reduce(group, (allreduce, reduce), x, root, out, asked)
    with begin_call(group, "reduce", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, out if own else None, operation=call.operation)  # step 3
        array = loan.host
        call.check_root(root)
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        way = lowering.lower(
            op, array.dtype, group.size, scales, operation=call.operation, algorithm=algorithm
        )
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, root=root, **scales,
            algorithm=algorithm,
        )  # fmt: skip
        if way is not None:
            loan, op = way.lend(loan), way.op
        send, flat, result = _memory(loan)
        # Without a result the engine writes nothing on this rank.
        target = flat if own else None
        plan = plans.reduce(call, send, target, root, ReduceSpec(op, algorithm))  # step 5
        plan.first(call, send, target)  # step 6
        if way is None:
            # Other ranks look the plan up in place, as in step 1.
            plan_cache.store(group, key, array, result if own else array, plan)  # step 7
    return None if target is None else loan.restore(host_arrays.copy_to(flat, result))


def _memory(loan: HostArgument) -> tuple[Array, Array, Array]:
    """Return the flat input, the flat result, and the result in its own shape."""
    array = loan.host
    # In the memory order of the argument, as documented.
    result = np.empty_like(array) if loan.target is None else loan.target
    return host_arrays.flat(array), host_arrays.flat_target(result, array), result
