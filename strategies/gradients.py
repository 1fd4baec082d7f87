"""Pairs of a gradient and its variable, checked before an optimizer changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["COMPUTE", "Pair", "check_slots", "resolve"]

COMPUTE: dict[Any, Any] = {
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.float32),
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float64),
}
"""dtype of a variable -> dtype of its slots and of the arithmetic."""


class Pair(NamedTuple):
    """One variable: its key for slots, its name for people, its array, a gradient or None."""

    key: str
    where: str
    value: Any
    gradient: Any


def resolve(grads_and_vars: Iterable[tuple[Any, Any]], operation: str) -> list[Pair]:
    """Look at every pair before the first variable is changed.

    Raises:
        ValueError: shape or dtype do not fit, a variable is read-only or given twice.
        TypeError: something is no array, or no pair.
    """
    pairs: dict[str, Pair] = {}
    for position, item in enumerate(grads_and_vars):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(
                f"{operation}: expected (gradient, variable) pairs, got {type(item).__name__} "
                f"(position {position})"
            )
        gradient, variable = item
        named = hasattr(variable, "name") and hasattr(variable, "value")
        key, value = (variable.name, variable.value) if named else (str(position), variable)
        pair = Pair(key, f"variable {key!r}, position {position}", value, gradient)
        if key in pairs:
            raise ValueError(f"{operation}: a variable is given twice ({pair.where})")
        _check_pair(pair, operation)
        pairs[key] = pair
    return list(pairs.values())


def _check_pair(pair: Pair, operation: str) -> None:
    _, where, value, gradient = pair
    for what, array in (("variable", value), ("gradient", value if gradient is None else gradient)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            kind = type(array).__name__
            raise TypeError(f"{operation}: {what} is no array, got {kind} ({where})")
    if value.dtype not in COMPUTE:
        names = ", ".join(str(dtype) for dtype in COMPUTE)
        raise ValueError(
            f"{operation}: unsupported dtype, expected {names}, got {value.dtype} ({where})"
        )
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError(f"{operation}: variable is read-only ({where})")
    if gradient is not None:
        _check_like("gradient", gradient, value.dtype, pair, operation)


def _check_like(what: str, array: Any, dtype: Any, pair: Pair, operation: str) -> None:
    shape = pair.value.shape
    if (array.shape, array.dtype) != (shape, dtype):
        raise ValueError(
            f"{operation}: {what} does not fit, expected {dtype} of shape {shape}, "
            f"got {array.dtype} of shape {array.shape} ({pair.where})"
        )


def check_slots(
    pairs: list[Pair], slots: Mapping[str, Any], loaded: set[str], operation: str
) -> None:
    """Check that slots fit, and that those just loaded were not meant for other variables.

    Args:
        pairs: from `resolve`.
        slots: key -> array, those that exist.
        loaded: keys of slots that were loaded and not used since.
        operation: beginning of the message.

    Raises:
        ValueError: the message names the variable.
    """
    unused = sorted(loaded - {pair.key for pair in pairs})
    for pair in pairs:
        slot = slots.get(pair.key)
        if pair.gradient is None:
            continue
        if slot is None and unused:
            raise ValueError(
                f"{operation}: loaded state belongs to other variables, "
                f"got slots for {', '.join(unused)} and none for this one ({pair.where})"
            )
        if slot is not None:
            _check_like("slot", slot, COMPUTE[pair.value.dtype], pair, operation)
