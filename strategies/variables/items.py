"""What callers give to variables on tasks and get from them, as it travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies import arrays
from strategies.checks import number
from strategies.errors import InvalidArgumentError
from strategies.remote.containers import Place
from strategies.remote.wire import Array, dtype_named
from strategies.sparse import Rows
from strategies.variables import actions
from strategies.variables.actions import Outcome
from strategies.variables.many import Item

__all__ = [
    "Reading",
    "Update",
    "gradient_item",
    "host_array",
    "packing",
    "reading_of",
    "spread",
    "stepping",
    "wanted_rows",
]


class Reading(NamedTuple):
    """What a variable held at one moment.

    Attributes:
        value: an array that nobody changes any more, nor may the reader.
        version: how often the variable had been changed.
    """

    value: Array
    version: Any


class Update(NamedTuple):
    """What became of a gradient.

    Attributes:
        version: of the variable afterwards.
        staleness: how many changes the gradient had not seen; None if that was not asked.
        applied: False if it was too stale, and nothing has changed.
    """

    version: Any
    staleness: int | None
    applied: bool


def wanted_rows(indices: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    """Return indices of rows to read.

    Raises:
        InvalidArgumentError: they are no integers.
    """
    wanted = np.asarray(indices)
    if wanted.size and wanted.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"gather: indices are no integers, got {wanted.dtype} (variable: {name})"
        )
    return wanted.astype(np.int64)


def spread(rows: Array, places: npt.NDArray[Any], shape: tuple[int, ...]) -> Array:
    """Return the rows at these places, of which there are as many as the shape says."""
    if places.size == len(rows) and np.array_equal(places.reshape(-1), np.arange(len(rows))):
        found = rows.reshape(*shape, *rows.shape[1:])  # they were asked for in their order
    else:
        found = rows.take(places.reshape(shape), axis=0)
    found.flags.writeable = False
    return found


def packing(compression: cc.Compression | None, operation: str) -> dict[str, Any]:
    """Return the options of an action whose arrays are rounded on their way.

    Raises:
        ValueError: only between nodes, which is not known here.
    """
    if compression is None or compression.dtype is None:
        return {}
    if compression.where != "everywhere":
        raise ValueError(
            f"{operation}: variables on tasks are rounded everywhere or not at all, got "
            f"{compression}"
        )
    return {"as": compression.dtype.name}


def stepping(
    most_stale: int | None,
    scale_stale: bool,
    learning_rate: float | None,
    compression: cc.Compression | None,
) -> dict[str, Any]:
    """Return the options that all gradients of a step have."""
    rate = None if learning_rate is None else number("apply_gradients", "rate", learning_rate)
    options = {"most": most_stale, "rate": rate, "scaled": scale_stale or None}
    given = {name: value for name, value in options.items() if value is not None}
    return given | packing(compression, "apply_gradients")


def gradient_item(
    place: Place,
    gradient: npt.ArrayLike | Rows,
    seen: int | None,
    options: Mapping[str, Any],
    compression: cc.Compression | None,
) -> Item:
    """Return what is to be done with the variable at a place, given its gradient."""
    sparse = isinstance(gradient, Rows)
    values = gradient.values if isinstance(gradient, Rows) else gradient
    array = host_array(values, "apply_gradients", place.name)
    # Rows are others in every step: what rounding leaves over would come to the wrong ones.
    if sparse and compression is not None and compression.residuals is not None:
        compression = cc.Compression(compression.dtype)
    given = [actions.compressed(array, compression, place.name)]
    if isinstance(gradient, Rows):
        given.insert(0, host_array(gradient.indices, "apply_gradients", place.name))
    seen_now = {} if seen is None else {"seen": int(seen)}
    return Item(place, given, {**options, **seen_now})


def reading_of(outcome: Outcome, options: Mapping[str, Any]) -> Reading:
    """Return what a read has brought."""
    version, dtype = outcome.facts
    value = actions.widened(outcome.arrays[0], options, dtype_named(dtype))
    value.flags.writeable = False
    return Reading(value, version)


def host_array(value: Any, operation: str, name: str) -> Array:
    """Return an array in host memory, of whatever library.

    Raises:
        TypeError: it is on a device.
    """
    if hasattr(value, "__dlpack_device__"):
        view = arrays.host(value)
        if view is None:
            raise TypeError(
                f"{operation}: the array is on a device, expected one in host memory, got "
                f"{type(value).__name__} (variable: {name})"
            )
        return view
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(
            f"{operation}: not an array of numbers, got {type(value).__name__} (variable: {name})"
        )
    return array
