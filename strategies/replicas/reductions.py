"""Reductions over replicas: within the process, then over ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast, get_args

import numpy as np
from array_api_compat import array_namespace

import collectives as cc
from strategies.core import array_ops
from strategies.core.process_group import ProcessGroup
from strategies.core.pytree import leaves, map_leaves, zip_leaves
from strategies.errors import InvalidArgumentError
from strategies.replicas.per_replica import regroup

__all__ = [
    "Axis",
    "ReduceOp",
    "arrays_of",
    "as_array",
    "gather",
    "op_over_ranks",
    "parse_op",
    "reduce",
    "shared",
]

ReduceOp = Literal["sum", "mean"]
Axis = int | tuple[int, ...] | None


def parse_op(op: Any, operation: str) -> ReduceOp:
    """Return the op in lower case.

    Raises:
        ValueError: the op is unknown.
    """
    chosen = op.lower() if isinstance(op, str) else op
    if chosen not in get_args(ReduceOp):
        raise ValueError(f"{operation}: unknown op, expected 'sum' or 'mean', got {op!r}")
    return cast(ReduceOp, chosen)


def op_over_ranks(op: ReduceOp) -> Any:
    """Return the reduction over ranks."""
    return cc.MEAN if op == "mean" else cc.SUM


def reduce(
    ranks: ProcessGroup,
    op: ReduceOp,
    values: list[Any],
    axis: Axis = None,
    *,
    rounded: bool = False,
) -> Any:
    """Reduce the structures of this process's replicas and of the other ranks.

    All leaves are sent together; `rounded` applies the compression of the ranks' options. `axis` is
    as for `Strategy.reduce`.
    """
    columns = _columns(values, "reduce")
    with _at(columns):
        return _fill(values[0], _reduce(ranks, op, columns, axis, rounded=rounded))


def _reduce(
    ranks: ProcessGroup, op: ReduceOp, columns: list[list[Any]], axis: Axis, *, rounded: bool
) -> list[Any]:
    if axis is None:
        # First inside the process: then each rank sends one array, however many replicas it has.
        partial = [_combine(op, column) for column in columns]
        return ranks.allreduce(partial, op_over_ranks(op), rounded=rounded)
    pairs = [_along(op, column, axis) for column in columns]
    # The counts travel with the sums: ranks may hold different numbers of rows.
    counts = np.array([count for _, count in pairs], np.int64)
    *sums, counts = ranks.allreduce(
        [*(total for total, _ in pairs), counts], cc.SUM, rounded=rounded
    )
    if op == "mean":
        sums = [
            _mean(total, int(count), column[0])
            # Each rank divides the same sum by the same count, so the bits agree.
            for total, count, column in zip(sums, counts, columns, strict=True)
        ]
    return sums


def gather(ranks: ProcessGroup, values: list[Any], axis: int) -> Any:
    """Concatenate the arrays of all replicas along an axis; see `Strategy.gather`."""
    columns = _columns(values, "gather")
    with _at(columns):
        joined = [_join(column, axis) for column in columns]
        if ranks.size > 1:
            # `allgather` joins along the first axis, so the wanted one is swapped there and back.
            joined = [_swap(ranks.allgather(_swap(array, axis)), axis) for array in joined]
    return _fill(values[0], joined)


def as_array(leaf: Any, operation: str) -> Any:
    """Return arrays of other libraries unchanged, and other values as NumPy arrays.

    Raises:
        TypeError: the leaf is neither an array nor a number.
    """
    if isinstance(leaf, np.ndarray):
        array = leaf
    elif hasattr(leaf, "__dlpack__") and not isinstance(leaf, np.generic):
        return leaf
    else:
        array = np.asarray(leaf)
    if array.dtype.kind not in "biufc" and array_ops.dtype_name(array) not in array_ops.COMPUTE:
        raise TypeError(
            f"{operation}: expected an array of numbers or a number, got {type(leaf).__name__} "
            f"(dtype: {array.dtype})"
        )
    return array


def shared(result: Any, values: list[Any]) -> list[Any]:
    """Return one result for each replica, on the device of its value.

    No replica can change the result of another: shared NumPy arrays become read-only.
    """
    if len(values) == 1:
        return [result]
    for leaf in leaves(result):
        # After a merge the replicas run again in parallel and would see each other's changes.
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False

    def own(pair: tuple[Any, Any]) -> Any:
        leaf, value = pair
        if isinstance(leaf, np.ndarray):
            return leaf
        there = array_ops.to_device_of(value, leaf)
        # Another replica of the same device: tensors cannot be read-only, so it gets a copy.
        return copy.deepcopy(leaf) if there is leaf else there

    return [result, *(zip_leaves(own, [result, value], "run") for value in values[1:])]


def arrays_of(structure: Any, operation: str) -> list[Any]:
    """Return the leaves of a structure as arrays."""
    return [as_array(leaf, operation) for leaf in leaves(structure)]


def _columns(values: list[Any], operation: str) -> list[list[Any]]:
    """Return the arrays of all replicas for each leaf of the structure."""
    if len(values) > 1:
        regroup(values, operation)  # raises if the structures differ
    rows = [arrays_of(value, operation) for value in values]
    columns = [list(column) for column in zip(*rows, strict=True)]
    for column in columns:
        # Adding mixed dtypes would make the result depend on the number of replicas.
        _check_consistent(operation, [array.dtype for array in column], "dtype")
    # The arrays of a process are combined on the device of its first replica.
    return [
        [column[0], *(array_ops.to_device_of(column[0], x) for x in column[1:])]
        for column in columns
    ]


def _at(columns: list[list[Any]]) -> AbstractContextManager[Any]:
    """Select the device of the first replica's arrays."""
    return array_ops.device_context(columns[0][0]) if columns else nullcontext()


def _fill(structure: Any, found: list[Any]) -> Any:
    rest = iter(found)
    return map_leaves(lambda _: next(rest), structure)


def _combine(op: ReduceOp, column: list[Any]) -> Any:
    """Combine the arrays of this process's replicas elementwise."""
    _check_consistent("reduce", [tuple(array.shape) for array in column], "shape")
    work, final = _dtypes(column[0], op)
    total = _add([array_ops.astype(array, work) for array in column])
    if op == "mean" and len(column) > 1:
        # Processes have equal numbers of replicas, so the mean of these means is over all replicas.
        total = total / len(column)
    return array_ops.astype(total, final)


def _add(parts: Sequence[Any]) -> Any:
    """Return the sum of arrays of one shape and dtype; the array itself if there is only one."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]  # new memory, so adding in place is safe below
    for part in parts[2:]:
        total += part
    return total


def _along(op: ReduceOp, column: list[Any], axis: Axis) -> tuple[Any, int]:
    """Reduce the arrays of this process's replicas along axes; return sum and count."""
    work, final = _dtypes(column[0], op)
    partial, count = [], 0
    for array in column:
        axes = _axes(axis, array.shape)
        # Counted per array, as the replicas may have different lengths along the axis.
        count += math.prod(array.shape[a] for a in axes)
        xp = array_namespace(array)
        # The wide dtype inside the sum: a sum of bool or int8 would overflow.
        partial.append(xp.sum(array, axis=axes, dtype=getattr(xp, work)))
    _check_consistent("reduce", [tuple(array.shape) for array in partial], "shape without the axes")
    # Keep the wide dtype for a mean, so that it is rounded once, after the division.
    return array_ops.astype(_add(partial), work if op == "mean" else final), count


def _mean(total: Any, count: int, like: Any) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):  # the mean of 0 elements is NaN
        mean = total / (count if count else math.nan)
    return array_ops.astype(mean, _dtypes(like, "mean")[1])


def _axes(axis: Axis, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes as sorted non-negative numbers."""
    # None can be one of the given axes; it is rejected by the comparison of lengths.
    given = axis if isinstance(axis, tuple) else (axis,)
    found = {a % len(shape) for a in given if a is not None and -len(shape) <= a < len(shape)}
    if len(found) != len(given):
        raise ValueError(
            f"reduce: no such axis, expected different ones of {len(shape)} dimensions, "
            f"got axis {axis} (shape: {tuple(shape)})"
        )
    return tuple(sorted(found))


def _join(column: list[Any], axis: int) -> Any:
    first = column[0]
    _check_consistent("gather", [array.ndim for array in column], "number of dimensions")
    if not -first.ndim <= axis < first.ndim:
        raise InvalidArgumentError(
            f"gather: no such axis, expected less than {first.ndim} dimensions, got axis {axis} "
            f"(shape: {tuple(first.shape)})"
        )
    at = axis % first.ndim
    rows = [tuple(array.shape[:at]) + tuple(array.shape[at + 1 :]) for array in column]
    _check_consistent("gather", rows, "shape beside the axis")
    return first if len(column) == 1 else array_namespace(first).concat(column, axis=at)


def _swap(array: Any, axis: int) -> Any:
    """Swap an axis with the first one."""
    if axis in (0, -array.ndim):
        return array
    order = list(range(array.ndim))
    order[0], order[axis] = order[axis], order[0]
    return array_namespace(array).permute_dims(array, tuple(order))


def _check_consistent(operation: str, facts: list[Any], what: str) -> None:
    if any(fact != facts[0] for fact in facts):
        raise InvalidArgumentError(
            f"{operation}: the replicas' arrays do not fit, expected one {what}, got "
            f"{', '.join(map(str, facts))}"
        )


def _dtypes(array: Any, op: ReduceOp) -> tuple[str, str]:
    """Return the dtype for sums within a process, and the dtype of the result.

    16-bit floats are summed in float32, bool is counted, and the mean of integers is float64.
    """
    name = array_ops.dtype_name(array)
    if op == "mean" and name.startswith(("bool", "int", "uint")):
        return "float64", "float64"
    if name == "bool":
        return "int64", "int64"
    return array_ops.COMPUTE.get(name, name), name
