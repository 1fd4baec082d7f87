"""`reduce_scatter`.

Comments name the steps of `docs/how-a-call-goes.md`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, overload

from collectives.arrays import host_arrays, lowering
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.arrays.reduction import LOCATING, MEAN, Op
from collectives.calls import counts as row_counts
from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import A, Numbers, ReduceScatterOptions, Splits, Tensor, Unpack
from collectives.operations import minloc, plan_cache
from collectives.operations.reduce import allreduce
from collectives.plans import planner as plans
from collectives.plans.by_messages import ReduceSpec
from collectives.tracing.call_sites import caller

__all__ = ["reduce_scatter"]


@overload
def reduce_scatter(
    group: Group, x: Numbers, *, out: None = None, **options: Unpack[ReduceScatterOptions]
) -> Array: ...
@overload
def reduce_scatter(
    group: Group, x: Tensor[A], *, out: None = None, **options: Unpack[ReduceScatterOptions]
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
    """Reduce the arrays of all ranks, and return each rank's share of the rows.

    Args:
        x: shape (n, ...), the same on all ranks; n need not be a multiple of the size.
        op: reduction operation.
        out: array for this rank's rows, with their shape and the dtype of `x`, as for `allreduce`.
            It may be this rank's rows of `x`.
        counts: rows for every rank, which add up to n, the same on all ranks; None shares evenly,
            with one more row for each of the first `n % size` ranks.
        algorithm: "auto", "node", "ring", "halving" or "native".
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out`, or a new array of shape (own rows, ...) and the dtype of `x`.

    Raises:
        ValueError: `x` has no dimension, the counts do not add up, or `out` does not fit.
        TypeError, MismatchError, CollectiveTimeout: as `allreduce`.

    Cost: "ring" P - 1 messages and (P - 1)/P S bytes sent per rank.
    """
    # A list is the usual form of `counts`, and has no hash.
    key: plan_cache.Key = ("reduce_scatter", op, algorithm, prescale, postscale,
                      tuple(counts) if type(counts) is list else counts)  # fmt: skip
    made = group.fast_path.repeat(x, out, caller(), timeout, *key)
    if made is not None:
        return made
    run = plan_cache.run_cached if out is None else plan_cache.run_cached_into
    try:
        return run(group, key, x, out, timeout, caller())  # step 1
    except plan_cache.NoPlan:
        pass
    if type(op) is Op and op in LOCATING:
        asked = minloc.MinlocOptions(op, algorithm, prescale, postscale, timeout)
        return minloc.reduce_scatter(group, (allreduce, reduce_scatter), x, out, counts, asked)
    with begin_call(group, "reduce_scatter", timeout) as call:  # step 2
        loan = host_arrays.host_view(x, operation=call.operation)  # step 3
        array = loan.host
        scales = lowering.validate_scales(prescale, postscale, operation=call.operation)
        way = lowering.lower(
            op, array.dtype, group.size, scales, operation=call.operation, algorithm=algorithm
        )
        shares = row_counts.split_counts(call, array, counts)
        shape = (shares[group.rank], *array.shape[1:])
        target, give_back = None, loan.restore
        if out is not None:
            target, give_back = host_arrays.check_out(
                out, shape, array.dtype, operation=call.operation
            )
        told: dict[str, object] = {}
        if counts is not None:
            # Equal counts must be found again whether they are a list, a tuple or an array.
            told["counts"] = numbers = tuple(shares)
            key = (*key[:-1], numbers)
        call.describe(  # step 4
            op=op.value, dtype=array.dtype, shape=array.shape, **told, **scales,
            algorithm=algorithm,
        )  # fmt: skip
        if way is not None:
            loan, op = way.lend(HostArgument(array, target, give_back)), way.op
            # The lowered result has another dtype than the memory of the caller, so `give_back`
            # copies it.
            array, target, give_back = loan.host, None, loan.restore
        bounds = [0, *(n * math.prod(array.shape[1:]) for n in itertools.accumulate(shares))]
        send = host_arrays.flat(array)
        # `out` may be the own rows of `x`, which then begins `before` bytes before it.
        before = bounds[group.rank] * array.itemsize
        result, own = host_arrays.output(target, shape, array.dtype, send, -before)
        plan = plans.reduce_scatter(call, send, bounds, ReduceSpec(op, algorithm), shape)  # step 5
        plan.first(call, send, own)  # step 6
        if way is None:
            # None: the result is never the whole array, so no place in shared memory is a part of
            # the key.
            plan_cache.store(group, key, array, None, plan)  # step 7
    return give_back(host_arrays.copy_to(own, result))
