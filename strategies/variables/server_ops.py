"""Server operations on a variable stored here.

An *action* gets the variable, whose lock is held, the arrays of the caller and options, and returns
facts and arrays. Nothing has changed if it raises an error.
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
    """What an action has brought about.

    Attributes:
        facts: what msgpack can carry; the version comes first. Of an error: code and message.
        arrays: for the caller; they do not change.
    """

    facts: Any
    arrays: list[Array]


Action = Callable[[StoredVariable, Sequence[Array], Mapping[str, Any]], Result]


def execute(
    operation: str, thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    """Perform an action; a wrong argument is an `InvalidArgumentError` wherever the caller is."""
    try:
        if operation not in _RAW:
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
    """Return an array, or indices and rows, as they travel: rounded to 16 bits, if so wished."""
    *indices, values = arrays
    # Rows are others in every step: what rounding leaves over would come to the wrong ones.
    if indices and compression is not None and compression.residuals is not None:
        compression = replace(compression, residuals=None)
    return [*indices, _round(values, compression, name)]


def _round(array: Array, compression: cc.Compression | None, name: str | None = None) -> Array:
    """Return an array rounded to 16 bits, or itself if it is none that is rounded."""
    if compression is None:
        return array
    codec = compression.codec(array.dtype, cc.SUM, network=False, name=name)
    if codec is None:
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    codec.acquire(flat.size, flat.dtype)
    return codec.pack(flat).reshape(array.shape)


def widened(array: Array, options: Mapping[str, Any], dtype: np.dtype[Any]) -> Array:
    """Undo `compressed`.

    Args:
        array: as it travelled.
        options: `as` is the dtype that it was rounded to, if it was.
        dtype: what it has been, if it was rounded.
    """
    packed = options.get("as")
    if packed is None or array.dtype.name != packed or dtype == array.dtype:
        return array
    codec = COMPRESSIONS[packed].codec(dtype, cc.SUM, network=False)
    if codec is None:
        return array
    out = np.empty(array.size, dtype)
    codec.unpack(np.ascontiguousarray(array).reshape(-1), out)
    return out.reshape(array.shape)


def rounded(array: Array, packed: str | None) -> Array:
    """Return an array as it travels: rounded to this 16-bit dtype, unless that is None."""
    return array if packed is None else _round(array, COMPRESSIONS[packed])


# Reading.


def _describe(thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]) -> Result:
    value = thing.view()
    return Result([thing.version, list(value.shape), value.dtype.name], [])


def _read_value(
    thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    """Return the value, or what lies between two rows."""
    value = thing.view()
    if "start" in options:
        if value.ndim == 0:
            raise InvalidArgumentError(
                f"read_rows: the variable has no rows, expected a shape of one dimension or more, "
                f"got () (variable: {thing.name})"
            )
        value = value[options["start"] : options["stop"]]
    return Result([thing.version, value.dtype.name], [rounded(value, options.get("as"))])


def _gather(thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]) -> Result:
    indices = _indices("gather", thing, arrays[0])
    rows = thing.view().take(indices, axis=0)
    return Result([thing.version, rows.dtype.name], [rounded(rows, options.get("as"))])


# Changing.


def _assign(thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]) -> Result:
    new = _like("assign", thing, arrays[0])
    thing.writable(keep=False)[...] = new
    return _change(thing)


def _assign_sum(operation: str, combine: np.ufunc) -> Action:
    """Return the action that adds to the value, or subtracts from it."""

    def action(
        thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
    ) -> Result:
        delta = _like(operation, thing, arrays[0])
        value = thing.writable()
        combine(value, delta, out=value)
        return _change(thing)

    return action


def _scatter_update(
    thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    indices = _indices("scatter_update", thing, arrays[0])
    rows = _rows_like("scatter_update", thing, indices, arrays[1])
    # Of an index that is given several times the last row counts.
    last = len(indices) - 1 - np.unique(indices[::-1], return_index=True)[1]
    thing.writable()[indices[last]] = rows[last]
    return _change(thing)


def _scatter_sum(operation: str, combine: np.ufunc) -> Action:
    """Return the action that adds or subtracts rows, those of one index summed."""

    def action(
        thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
    ) -> Result:
        indices = _indices(operation, thing, arrays[0])
        rows = _rows_like(operation, thing, indices, arrays[1])
        value = thing.writable()
        if rows.dtype.name in COMPUTE:
            change = coalesced(Rows(indices, rows))
            value[change.indices] = combine(value[change.indices], change.values)
        else:
            combine.at(value, indices, rows)
        return _change(thing)

    return action


def _apply_gradients(
    thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result:
    """Let the optimizer change the value, unless the gradient is too old."""
    if thing.optimizer is None:
        raise FailedPreconditionError(
            "apply_gradients: the variable has no optimizer, expected one where it was made, got "
            f"None (variable: {thing.name})"
        )
    seen = options.get("seen")
    staleness = None if seen is None else thing.version - seen
    if staleness is not None and staleness < 0:
        raise InvalidArgumentError(
            f"apply_gradients: this version has not been there yet, expected at most "
            f"{thing.version}, got {seen} (variable: {thing.name})"
        )
    most = options.get("most")
    if staleness is not None and most is not None and staleness > most:
        return Result([thing.version, staleness, False], [])
    gradient: Any = arrays[0] if len(arrays) == 1 else Rows(*arrays)
    where, dtype = f"variable: {thing.name}", dtype_name(thing.initialized_value)
    gradient = checked_rows(
        gradient, thing.initialized_value.shape, dtype, "apply_gradients", where, cast=True
    )
    gradient = gradient_sums.rounded(gradient, dtype)
    factor = 1.0 / (1 + (staleness or 0)) if options.get("scaled") else 1.0
    thing.step(gradient, factor, options.get("rate"))
    thing.version += 1
    return Result([thing.version, staleness, True], [])


def _change(thing: StoredVariable) -> Result:
    thing.version += 1
    return Result([thing.version], [])


def _like(operation: str, thing: StoredVariable, array: Array) -> Array:
    """Return an array of the variable's shape and dtype."""
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
    """Return indices of rows as int64."""
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
_RAW = READS  # their arrays are indices
