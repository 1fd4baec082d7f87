"""MINLOC and MAXLOC: the smallest or largest value and its index.

`x` is a pair (values, indices): two arrays of one shape. The second array holds the location of
each value, such as a rank or a position. The result is also a pair: the best value of every
element, and the smallest index among the ranks with that value. A NaN beats every number.

    rank 0   values 3.0 1.0   indices 0 0        MINLOC of both    values 2.0 1.0
    rank 1   values 2.0 1.0   indices 1 1                          indices 1 0

Two reductions: MIN or MAX of the values, then MIN of the indices. In the second reduction, a rank
without the best value contributes the largest integer of the dtype. So MINLOC supports all
algorithms, kinds of arrays and dtypes that MIN supports.

Cost: two reductions and one comparison of the call. `reduce` and `reduce_scatter` all-reduce the
values.

Source: MPI 3.1 standard, section 5.9.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import host_arrays, lowering, reduction
from collectives.arrays.host_arrays import Array, HostArgument
from collectives.arrays.reduction import MAX, MIN, MINLOC, Op
from collectives.calls import counts as row_counts
from collectives.calls import plan_buffers
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.calls.overloads import Splits
from collectives.plans.planner import CompositePlan, Plan

__all__ = [
    "MinlocOptions",
    "allreduce",
    "plan_allreduce",
    "plan_reduce_scatter",
    "reduce",
    "reduce_scatter",
]

# An operation of `collectives.operations.reduce`, called for each of the two reductions.
Operation = Callable[..., Any]


class MinlocOptions(NamedTuple):
    """Arguments of the caller, as for `allreduce` of `collectives.operations.reduce`."""

    op: Op
    algorithm: str
    prescale: float
    postscale: float
    timeout: float | None

    @property
    def values(self) -> dict[str, Any]:
        """Options of the reduction of the values."""
        op = MIN if self.op is MINLOC else MAX
        return {"op": op, "algorithm": self.algorithm, "timeout": self.timeout}

    @property
    def indices(self) -> dict[str, Any]:
        """Options of the reduction of the indices."""
        return {"op": MIN, "algorithm": self.algorithm, "timeout": self.timeout}


def allreduce(group: Group, everywhere: Operation, x: Any, out: Any, how: MinlocOptions) -> Any:
    """Return the best values and their indices on all ranks."""
    # One comparison for both reductions, so that a wrong pair is refused before data moves.
    with begin_call(group, "allreduce", how.timeout) as call:
        values, indices = _borrow_pair(call, x, out, how)
        _describe(call, values.host, indices.host, how)
    # After the call, because the reductions are calls of their own.
    best = everywhere(group, values.host, **how.values)
    where = everywhere(group, _candidate_indices(values.host, best, indices.host), **how.indices)
    return _as_pair(values, best), _as_pair(indices, where)


def reduce(
    group: Group, by: tuple[Operation, Operation], x: Any, root: int, out: Any, how: MinlocOptions
) -> Any:
    """Return the best values and their indices on the root, None elsewhere.

    `by` holds the all-reduce of the values and the reduce of the indices.
    """
    own = group.rank == root
    with begin_call(group, "reduce", how.timeout) as call:
        values, indices = _borrow_pair(call, x, out if own else None, how)
        call.check_root(root)
        _describe(call, values.host, indices.host, how, root=root)
    everywhere, to_one = by
    best = everywhere(group, values.host, **how.values)
    # All ranks need the best values to find their candidates, so the values are all-reduced.
    where = to_one(group, _candidate_indices(values.host, best, indices.host), root, **how.indices)
    return (_as_pair(values, best), _as_pair(indices, where)) if own else None


def reduce_scatter(
    group: Group,
    by: tuple[Operation, Operation],
    x: Any,
    out: Any,
    counts: Splits | None,
    how: MinlocOptions,
) -> Any:
    """Return this rank's rows of the best values and their indices.

    `by` holds the all-reduce of the values and the reduce-scatter of the indices.
    """
    with begin_call(group, "reduce_scatter", how.timeout) as call:
        values, indices = _borrow_pair(call, x, None, how)
        shares = row_counts.split_counts(call, values.host, counts)
        shape = (shares[group.rank], *values.host.shape[1:])
        outs = (None, None) if out is None else _pair(call, out, "out")
        values = _going_to(call, values, outs[0], shape)
        indices = _going_to(call, indices, outs[1], shape)
        _describe(call, values.host, indices.host, how, counts=tuple(shares))
    everywhere, shared = by
    # An all-reduce, because each rank compares all its values with the best ones.
    best = everywhere(group, values.host, **how.values)
    candidates = _candidate_indices(values.host, best, indices.host)
    where = shared(group, candidates, counts=shares, **how.indices)
    first = sum(shares[: group.rank])
    return _as_pair(values, best[first : first + shares[group.rank]]), _as_pair(indices, where)


def plan_allreduce(group: Group, everywhere: Operation, x: Any, how: MinlocOptions) -> Plan[Any]:
    """Plan an in-place all-reduce of pairs; `everywhere` plans an all-reduce of one array."""
    with begin_call(group, "plan_allreduce", how.timeout) as call:
        values, indices = (plan_buffers.pin(call, array) for array in _pair(call, x, "x"))
        _borrow_pair(call, x, x, how)
        _describe(call, values, indices, how)
    # Memory of the plan: `x` keeps its values until both reductions are complete.
    best, where = np.empty_like(values), np.empty_like(indices)
    by = everywhere(group, best, **how.values), everywhere(group, where, **how.indices)

    # The arguments are those of `PreparedCall.run`; the inner plans have their own arrays.
    def run(*_: Any) -> None:
        _reduce_then_locate((values, indices), (best, where), by)
        values[...], indices[...] = best, where

    return Plan(x, values, values, CompositePlan(group, run), "planned allreduce", how.timeout)


def plan_reduce_scatter(
    group: Group,
    by: tuple[Operation, Operation],
    x: Any,
    out: Any,
    counts: Splits | None,
    how: MinlocOptions,
) -> Plan[Any]:
    """Plan a reduce-scatter of pairs.

    `by` holds functions that plan the all-reduce of the values and the reduce-scatter of the
    indices.
    """
    with begin_call(group, "plan_reduce_scatter", how.timeout) as call:
        values, indices = (plan_buffers.pin(call, array) for array in _pair(call, x, "x"))
        lent = _borrow_pair(call, x, None, how)
        shares = row_counts.split_counts(call, values, counts)
        shape = (shares[group.rank], *values.shape[1:])
        outs = (None, None) if out is None else _pair(call, out, "out")
        made = []
        # Targets are checked now, because a plan cannot copy to a device or a strided array.
        for loan, to in zip(lent, outs, strict=True):
            going = _going_to(call, loan, to, shape)
            plan_buffers.check_out(call, to, going.target)
            own = np.empty(shape, loan.host.dtype) if going.target is None else going.target
            made.append((own, going.restore(own)))
        _describe(call, values, indices, how, counts=tuple(shares))
    (to_values, given_values), (to_indices, given_indices) = made
    best, where = np.empty_like(values), np.empty_like(indices)
    own_where = np.empty(shape, indices.dtype)
    everywhere, shared = by
    find = everywhere(group, best, **how.values)
    locate = shared(group, where, out=own_where, counts=shares, **how.indices)
    first = sum(shares[: group.rank])

    def run(*_: Any) -> None:
        _reduce_then_locate((values, indices), (best, where), (find, locate))
        to_values[...], to_indices[...] = best[first : first + shape[0]], own_where

    steps, given = CompositePlan(group, run), (given_values, given_indices)
    return Plan(given, values, to_values, steps, "planned reduce_scatter", how.timeout)


def _reduce_then_locate(
    pairs: tuple[Array, Array], found: tuple[Array, Array], by: tuple[Plan[Any], Plan[Any]]
) -> None:
    """Run the plans for the best values and then for their indices."""
    (values, indices), (best, where), (find, locate) = pairs, found, by
    best[...] = values
    find()
    where[...] = _candidate_indices(values, best, indices)
    locate()


def _borrow_pair(
    call: Call, x: Any, out: Any, how: MinlocOptions
) -> tuple[HostArgument, HostArgument]:
    """Check the arguments, and return host views of values and indices."""
    outs = (None, None) if out is None else _pair(call, out, "out")
    values, indices = (
        host_arrays.host_view(array, to, operation=call.operation)
        for array, to in zip(_pair(call, x, "x"), outs, strict=True)
    )
    # A scaled value is no longer the value at the index.
    if lowering.validate_scales(how.prescale, how.postscale, operation=call.operation):
        raise TypeError(f"{call.operation}: {how.op.value} has no scales")
    reduction.check(how.values["op"], values.host.dtype, operation=call.operation)
    if indices.host.dtype.kind not in "iu":
        raise TypeError(
            f"{call.operation}: the indices of {how.op.value} are not integers, "
            f"got {indices.host.dtype}"
        )
    if values.host.shape != indices.host.shape:
        raise ValueError(
            f"{call.operation}: values and indices have different shapes, got "
            f"{values.host.shape} and {indices.host.shape}"
        )
    return values, indices


def _going_to(call: Call, loan: HostArgument, out: Any, shape: tuple[int, ...]) -> HostArgument:
    """Return the view with the target for a result of another shape."""
    if out is None:
        return loan._replace(target=None)
    target, give_back = host_arrays.check_out(out, shape, loan.host.dtype, operation=call.operation)
    return HostArgument(loan.host, target, give_back)


def _pair(call: Call, given: Any, word: str) -> tuple[Any, Any]:
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(
            f"{call.operation}: MINLOC and MAXLOC take pairs, expected {word} = (values, indices), "
            f"got {type(given).__name__}"
        )
    return given


def _describe(
    call: Call, values: Array, indices: Array, how: MinlocOptions, **more: object
) -> None:
    """Compare the call on all ranks, for both reductions at once."""
    call.describe(
        op=how.op.value, dtype=values.dtype, indices=indices.dtype, shape=values.shape, **more,
        algorithm=how.algorithm,
    )  # fmt: skip
    call.agree()


def _candidate_indices(values: Array, best: Array, indices: Array) -> Array:
    """Return the index where the value is the best, else the largest integer of the dtype."""
    # NaN differs from itself, so equal NaNs need a test of their own.
    same = (values == best) | ((values != values) & (best != best))
    # The largest integer never wins against an index of a rank with the best value.
    return np.where(same, indices, np.iinfo(indices.dtype).max)


def _as_pair(loan: HostArgument, result: Array) -> Any:
    if loan.target is None:
        return loan.restore(host_arrays.in_order_of(loan.host, result))
    return loan.restore(host_arrays.copy_to(result, loan.target))
