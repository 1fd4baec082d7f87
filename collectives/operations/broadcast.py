"""`broadcast` and `barrier`.

Comments name the steps of `docs/how-a-call-goes.md`.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.calls.call import begin_call, is_timeout
from collectives.calls.fast_path import Given
from collectives.calls.group import Group
from collectives.calls.overloads import A, CommonOptions, Numbers, Tensor, Unpack
from collectives.devices.staged import DeviceArgument, DeviceOperations
from collectives.operations import plan_cache
from collectives.plans import planner as plans
from collectives.tracing.call_sites import caller

__all__ = ["barrier", "broadcast"]

# The array of a barrier for the fast path.
_NOTHING = np.empty(0, np.uint8)


@overload
def broadcast(
    group: Group, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
) -> Array: ...
@overload
def broadcast(
    group: Group, x: Tensor[A], root: int = 0, *, out: None = None, **options: Unpack[CommonOptions]
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
    """Copy the root's array to all ranks.

    Args:
        x: shape (...); on the other ranks any array of the same shape and dtype, such as
            `np.empty(shape, dtype)`.
        root: rank whose array is copied.
        out: array for the result, with shape and dtype of `x`; may be `x` itself. None returns a
            new array.
        algorithm: "auto", "node", "tree", "double_tree", "ring", "hierarchical" or "native"; "nccl"
            for arrays on CUDA devices.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out`, or a new array; the root's bits.

    Raises:
        TypeError: `x` is None. For data that only the root has, use `broadcast_object`.
        ValueError: the root is not a rank, or `out` does not fit.
        CollectiveTimeout: as `allreduce`.

    Cost: ceil(log2 P) messages of S bytes sent by the root.
    """
    made = group.fast_path.repeat(x, out, caller(), timeout, "broadcast", root, algorithm)
    if made is not None:
        return made
    own, key = group.rank == root, ("broadcast", root, algorithm)
    try:
        return plan_cache.run_cached(group, key, x, out, timeout, caller())  # step 1
    except plan_cache.NoPlan:
        pass
    with begin_call(group, "broadcast", timeout) as call:  # step 2
        if x is None:  # a habit from mpi4py's lower-case bcast
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
        # Without `out`, other ranks receive into a copy of their argument, whose elements are
        # overwritten.
        if loan.target is None:
            buffer = host_arrays.flat_copy(loan.host, None, loan.host.dtype)
        else:
            # `flat` keeps the root's elements, `flat_target` only the memory.
            buffer = host_arrays.flat(loan.host) if own else host_arrays.flat_target(loan.target)
        plan = plans.broadcast(call, buffer, root, algorithm)  # step 5
        plan.first(call, buffer, buffer)  # step 6
        plan_cache.store(group, key, loan.host, loan.target, plan)  # step 7
    result = loan.target
    if result is None:
        result = host_arrays.in_order_of(loan.host, buffer.reshape(array.shape))
    return loan.restore(host_arrays.copy_to(buffer, result))


def barrier(group: Group, *, algorithm: str = "auto", timeout: float | None = None) -> None:
    """Wait until every rank of the group has called `barrier`.

    Args:
        algorithm: "auto", "node", "tree", "hierarchical" or "native".
        timeout: seconds; None uses UNISONO_TIMEOUT.
    """
    made = group.fast_path.repeat(_NOTHING, _NOTHING, caller(), timeout, "barrier", algorithm)
    if made is not None:
        return
    # Barriers have no array, so their plan has a key of its own; other algorithms are rare.
    known = group.plans.get("barrier") if algorithm == "auto" else None
    if known is not None and (timeout is None or is_timeout(timeout)):
        known.run(None, None, timeout, caller())
        key, given = ("barrier", algorithm), Given(_NOTHING, _NOTHING)
        group.fast_path.learn(group, known, key, given, timeout, caller())
        return
    with begin_call(group, "barrier", timeout) as call:
        call.describe(algorithm=algorithm)
        plan = plans.barrier(call, algorithm)
        plan.first(call)
        # Kept without `store`, which needs an array for the key.
        if algorithm == "auto":
            group.plans["barrier"] = plan
