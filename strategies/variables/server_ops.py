"""Server operations on a stored variable.

An *action* receives the variable, with its lock held, the caller's arrays and options, and returns
facts and arrays. If an action raises, the variable is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies.core import gradient_sums
from strategies.core.array_ops import COMPUTE, dtype_name
from strategies.core.sparse import Rows, checked_rows, coalesced
from strategies.errors import FailedPreconditionError, InvalidArgumentError, OpError
from strategies.rpc.wire import Array
from strategies.variables import partition
from strategies.variables.stored_variable import StoredVariable

__all__ = [
    "ACTIONS",
    "COMPRESSIONS",
    "READS",
    "Result",
    "execute",
    "compressed",
    "rounded",
    "widened",
]

COMPRESSIONS = {"float16": cc.FP16, "bfloat16": cc.BF16}


class Result(NamedTuple):
    """Result of an action.

    Attributes:
        facts: values that msgpack can encode, the version first; for an error its code and message.
        arrays: arrays for the caller; they do not change.
    """

    facts: Any
    arrays: list[Array]


Action = Callable[[StoredVariable, Sequence[Array], Mapping[str, Any]], Result]


def execute(
    operation: str, thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    """Run an action; raise wrong arguments as `InvalidArgumentError`, as on another task."""
    try:
        # Back to the variable's dtype, so that actions never see 16-bit arguments. Arguments of
        # reads are indices, which are never rounded.
        if operation not in READS:
            arrays = [widened(array, options, thing.initialized_value.dtype) for array in arrays]
        return ACTIONS[operation](thing, arrays, options)
    except OpError:
        raise
    except (ValueError, TypeError) as error:
        text = f"{error}" if thing.name in str(error) else f"{error} (variable: {thing.name})"
        raise InvalidArgumentError(text) from error


def compressed(
    arrays: Sequence[Array], compression: cc.Compression | None, name: str | None = None
) -> list[Array]:
    """Round an array, or the rows of indices and rows, to 16 bits if `compression` says so."""
    *indices, values = arrays
    # No error feedback for rows: the indices differ in every step, so residuals would be added to
    # the wrong rows.
    if indices and compression is not None and compression.residuals is not None:
        compression = replace(compression, residuals=None)
    return [*indices, _round(values, compression, name)]


def _round(array: Array, compression: cc.Compression | None, name: str | None = None) -> Array:
    """Round an array to 16 bits; return other dtypes unchanged."""
    if compression is None:
        return array
    # SUM, because MEAN would divide before it rounds.
    codec = compression.codec(array.dtype, cc.SUM, network=False, name=name)
    if codec is None:
        # Only float32 and float64 can be compressed; other arrays are sent unchanged.
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    # Binds the name of the feedback to this array, or raises if another array has it.
    codec.acquire(flat.size, flat.dtype)
    return codec.pack(flat).reshape(array.shape)


def widened(array: Array, options: Mapping[str, Any], dtype: np.dtype[Any]) -> Array:
    """Reverse `compressed`.

    Args:
        array: array from a message.
        options: `as` is the 16-bit dtype of a rounded array.
        dtype: original dtype of a rounded array.
    """
    packed = options.get("as")
    # A variable that has the 16-bit dtype itself was not rounded.
    if packed is None or array.dtype.name != packed or dtype == array.dtype:
        return array
    codec = COMPRESSIONS[packed].codec(dtype, cc.SUM, network=False)
    if codec is None:
        return array
    out = np.empty(array.size, dtype)
    codec.unpack(np.ascontiguousarray(array).reshape(-1), out)
    return out.reshape(array.shape)


def rounded(array: Array, packed: str | None) -> Array:
    """Round an array to the 16-bit dtype `packed`; None returns it unchanged."""
    return array if packed is None else _round(array, COMPRESSIONS[packed])


# Reading.


def _describe(thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]) -> Result:
    value = thing.view()
    return Result([thing.version, list(value.shape), value.dtype.name], [])


def _read_value(
    thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    """Return the value, or a range of rows."""
    value = thing.view()
    if "start" in options:
        if value.ndim == 0:
            raise InvalidArgumentError(
                f"read_rows: the variable has no rows, expected a shape of one dimension or more, "
                f"got () (variable: {thing.name})"
            )
        # A view: without compression the reply is sent from the variable's own memory.
        value = value[options["start"] : options["stop"]]
    return Result([thing.version, value.dtype.name], [rounded(value, options.get("as"))])


def _gather(thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]) -> Result:
    indices = _indices("gather", thing, arrays[0])
    # Through a view, but `take` copies, so the next update needs no copy of the value.
    rows = thing.view().take(indices, axis=0)
    return Result([thing.version, rows.dtype.name], [rounded(rows, options.get("as"))])


# Changing.


def _assign(thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]) -> Result:
    new = _like("assign", thing, arrays[0])
    # All elements are overwritten, so the old value need not be copied.
    thing.writable(keep=False)[...] = new
    return _change(thing)


def _assign_sum(operation: str, combine: np.ufunc) -> Action:
    """Return the action that adds to or subtracts from the value."""

    def action(
        thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
    ) -> Result:
        delta = _like(operation, thing, arrays[0])
        value = thing.writable()  # after the checks, so that a wrong argument changes nothing
        combine(value, delta, out=value)
        return _change(thing)

    return action


def _scatter_update(
    thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    indices = _indices("scatter_update", thing, arrays[0])
    rows = _rows_like("scatter_update", thing, indices, arrays[1])
    # For a duplicate index the last row wins. `unique` returns first places, so it searches from
    # the end.
    last = len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1]
    thing.writable()[indices[last]] = rows[last]
    return _change(thing)


def _scatter_sum(operation: str, combine: np.ufunc) -> Action:
    """Return the action that adds or subtracts rows; duplicates are summed."""

    def action(
        thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
    ) -> Result:
        indices = _indices(operation, thing, arrays[0])
        rows = _rows_like(operation, thing, indices, arrays[1])
        value = thing.writable()
        # Floats are summed per index first, 16-bit ones in float32. Integers are exact in any
        # order.
        if rows.dtype.name in COMPUTE:
            change = coalesced(Rows(indices, rows))
            value[change.indices] = combine(value[change.indices], change.values)
        else:
            # `at` adds every row of a duplicate index; `value[indices] += rows` would add one.
            combine.at(value, indices, rows)
        return _change(thing)

    return action


def _apply_gradients(
    thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    """Update the value with the optimizer, unless the gradient is too stale."""
    if thing.optimizer is None:
        raise FailedPreconditionError(
            "apply_gradients: the variable has no optimizer, expected one where it was made, got "
            f"None (variable: {thing.name})"
        )
    seen = options.get("seen")
    staleness = None if seen is None else thing.version - seen
    # Such as the version of another variable, or of one that a reset has removed.
    if staleness is not None and staleness < 0:
        raise InvalidArgumentError(
            f"apply_gradients: this version has not been there yet, expected at most "
            f"{thing.version}, got {seen} (variable: {thing.name})"
        )
    most = options.get("most")
    if staleness is not None and most is not None and staleness > most:
        # Dropped without an error: the worker reads the new value and continues.
        return Result([thing.version, staleness, False], [])
    gradient: Any = arrays[0] if len(arrays) == 1 else Rows(*arrays)
    where, dtype = f"variable: {thing.name}", dtype_name(thing.initialized_value)
    gradient = checked_rows(
        gradient, thing.initialized_value.shape, dtype, "apply_gradients", where, cast=True
    )
    # Rows of one index were summed in float32, and `checked_rows` allows another float dtype.
    gradient = gradient_sums.rounded(gradient, dtype)
    # Source: W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware async-SGD for distributed deep
    # learning", IJCAI 2016, which divides by the staleness.
    factor = 1.0 / (1 + (staleness or 0)) if options.get("scaled") else 1.0
    thing.step(gradient, factor, options.get("rate"))
    thing.version += 1  # after the step, which may raise
    return Result([thing.version, staleness, True], [])


def _change(thing: StoredVariable) -> Result:
    thing.version += 1
    return Result([thing.version], [])


def _like(operation: str, thing: StoredVariable, array: Array) -> Array:
    """Check shape and dtype of an array, and return it in the variable's dtype."""
    partition.check_shape(operation, array, thing.initialized_value.shape, thing.name)
    return _like_dtype(operation, thing, array)


def _like_dtype(operation: str, thing: StoredVariable, array: Array) -> Array:
    dtype = thing.initialized_value.dtype
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise InvalidArgumentError(
            f"{operation}: the value has the wrong dtype, expected {dtype}, got {array.dtype} "
            f"(variable: {thing.name})"
        )
    return array.astype(dtype, copy=False)


def _indices(operation: str, thing: StoredVariable, indices: Array) -> Array:
    """Check row indices, and return them as int64."""
    # An empty list of indices becomes float64, which is accepted.
    if thing.initialized_value.ndim == 0 or (indices.size and indices.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"{operation}: expected integers that name rows, got {indices.dtype} for a variable of "
            f"{thing.initialized_value.ndim} dimensions (variable: {thing.name})"
        )
    length = len(thing.initialized_value)
    if indices.size and not 0 <= indices.min() <= indices.max() < length:
        raise InvalidArgumentError(
            f"{operation}: an index is out of range, expected 0 .. {length - 1}, got "
            f"{indices.min()} .. {indices.max()} (variable: {thing.name})"
        )
    return indices.astype(np.int64, copy=False)


def _rows_like(operation: str, thing: StoredVariable, indices: Array, rows: Array) -> Array:
    expected = (*indices.shape, *thing.initialized_value.shape[1:])
    if indices.ndim != 1 or rows.shape != expected:
        raise InvalidArgumentError(
            f"{operation}: expected a row for every index, of shape {expected}, got {rows.shape} "
            f"(variable: {thing.name})"
        )
    return _like_dtype(operation, thing, rows)


ACTIONS: dict[str, Action] = {
    "apply_gradients": _apply_gradients,
    "assign": _assign,
    "assign_add": _assign_sum("assign_add", np.add),
    "assign_sub": _assign_sum("assign_sub", np.subtract),
    "describe": _describe,
    "gather": _gather,
    "read": _read_value,
    "scatter_add": _scatter_sum("scatter_add", np.add),
    "scatter_sub": _scatter_sum("scatter_sub", np.subtract),
    "scatter_update": _scatter_update,
}
READS = frozenset({"describe", "gather", "read"})
