"""`broadcast` and `barrier`.

The steps are those of `docs/how-a-call-goes.md`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, overload

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.arrays.reduction import MAX
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, CommonOptions, Detachable, Numbers, Unpack
from collectives.devices.staged import DeviceArgument, DeviceOperations
from collectives.operations import plan_cache
from collectives.plans import by_messages
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.plans.prepared_calls import EagerCall, MessageCall, NodeCall
from collectives.tracing.call_sites import caller

__all__ = ["barrier", "broadcast"]


@overload
def broadcast(
    group: Group, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
) -> Array: ...
@overload
def broadcast(
    group: Group,
    x: Detachable[A],
    root: int = 0,
    *,
    out: None = None,
    **options: Unpack[CommonOptions],
) -> A: ...
@overload
def broadcast(
    group: Group, x: A, root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
) -> A: ...
@overload
def broadcast(
    group: Group, x: object, root: int = 0, *, out: A, **options: Unpack[CommonOptions]
) -> A: ...
def broadcast(
    group: Group,
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    algorithm: str = "auto",
    timeout: float | None = None,
) -> Any:
    """Give every rank the root's array.

    Args:
        x: shape (...); on the other ranks any array of the same shape and dtype, such as
            `np.empty(shape, dtype)`.
        root: whose array.
        out: where to put the result, may be `x` itself; shape and dtype of `x`.
        algorithm: "auto", "node", "tree", "double_tree", "ring", "hierarchical" or "native"; "nccl"
            for arrays on CUDA devices.
        timeout: seconds.

    Returns:
        `out`, or a new array; the root's bits.

    Raises:
        TypeError: `x` is None. What only the root knows is for `broadcast_object`.
        ValueError: no such root, or `out` does not fit.
        CollectiveTimeout: as `allreduce`.

    Cost: ceil(log2 P) messages of S bytes sent by the root.
    """
    own = group.rank == root
    key = ("broadcast", root, algorithm)
    later = plan_cache.DEFERRED_OUT if own and out is None else out
    known = plan_cache.run_cached(group, key, x, later, timeout, caller())  # step 1
    if known is not None:
        return _copy_result(x, out) if own and known is not x else known
    with begin_call(group, "broadcast", timeout) as call:  # step 2
        if x is None:  # what users of mpi4py pass on the other ranks
            raise TypeError(
                "broadcast: x is None, expected an array on every rank. Where the root's is "
                "to go, pass one of its shape and dtype, such as np.empty(shape, dtype), or "
                "use broadcast_object, which sends what only the root knows"
            )
        on_devices = group.state_of(DeviceOperations)
        loan: HostArgument | DeviceArgument | None = on_devices.borrow(
            call.operation, x, out, algorithm
        )
        loan = loan or host_arrays.host_view(x, out, operation=call.operation)  # step 3
        array = loan.host if isinstance(loan, HostArgument) else loan
        if not isinstance(loan, HostArgument):
            algorithm = on_devices.algorithm_for(algorithm, loan, None, None, call.operation)
        call.check_root(root)
        memory = {} if isinstance(loan, HostArgument) else {"memory": "device"}
        call.describe(  # step 4
            dtype=array.dtype, shape=array.shape, root=root, **memory, algorithm=algorithm
        )
        if not isinstance(loan, HostArgument):
            on_devices.broadcast(call, loan, root, algorithm)
            return loan.finish()
        if loan.target is None:
            buffer = host_arrays.flat_copy(loan.host, None, loan.host.dtype)
        else:
            buffer = host_arrays.flat(loan.host) if own else host_arrays.flat_target(loan.target)
        plan = plans.broadcast(call, buffer, root, algorithm)  # step 5
        plan.first(call, buffer, buffer)  # step 6
        plan_cache.store(group, key, loan.host, loan.target, plan)  # step 7
    result = loan.target
    if result is None:
        result = host_arrays.in_order_of(loan.host, buffer.reshape(array.shape))
    return loan.restore(host_arrays.copy_to(buffer, result))


def _copy_result(x: Any, out: Any) -> Any:
    """Return the root's array as its result, in `out` if there is one, which fits."""
    if type(x) is np.ndarray and out is None:
        return x.copy("K")
    if type(x) is np.ndarray and type(out) is np.ndarray:
        np.copyto(out, x)
        return out
    loan = host_arrays.host_view(x, out, operation="broadcast")
    target = np.empty_like(loan.host) if loan.target is None else loan.target
    np.copyto(target, loan.host)
    return loan.restore(target)


def barrier(group: Group, *, algorithm: str = "auto", timeout: float | None = None) -> None:
    """Return when every rank of the group has called this.

    Args:
        algorithm: "auto", "node", "tree", "hierarchical" or "native".
        timeout: seconds.
    """
    known = group.plans.get("barrier") if algorithm == "auto" else None
    if known is not None and (
        timeout is None or (isinstance(timeout, (int, float)) and timeout > 0)
    ):
        known.run(0, 0, timeout, caller())
        return
    with begin_call(group, "barrier", timeout) as call:
        call.describe(algorithm=algorithm)
        plan: NodeCall | EagerCall | MessageCall
        if engine := call.engine_for(algorithm):
            plan = NodeCall(call, engine.plan_publish(0, [], call.digest, 0))
        elif small := plans.eager_allreduce(
            call, np.empty(0, np.uint8), ReduceSpec(MAX, algorithm)
        ):
            plan = small
        else:
            plan = MessageCall(call, partial(by_messages.barrier, algorithm=algorithm))
        plan.first(call)
        if algorithm == "auto":
            group.plans["barrier"] = plan
