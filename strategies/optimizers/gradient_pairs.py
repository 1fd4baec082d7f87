"""Validation of (gradient, variable) pairs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
import numpy.typing as npt

from strategies.core import array_ops
from strategies.core.array_ops import COMPUTE
from strategies.core.sparse import Rows, as_rows, checked_rows

__all__ = ["Pair", "check_slots", "floats", "is_variable", "refuse_jax", "resolve", "split"]


class Pair(NamedTuple):
    """One variable and its gradient.

    Attributes:
        key: for slots.
        where: for people.
        value: the variable's array, a view of it as a NumPy array where its memory allows.
        gradient: of the same kind, or None; if there are rows, those rows alone.
        rows: shape (k,), int64, increasing: where the gradient belongs; None if everywhere.
        settle: called with the new value once it is there; of variables that have such a method,
            since their arrays may be on several devices, or can never change.
    """

    key: str
    where: str
    value: Any
    gradient: Any
    rows: npt.NDArray[np.int64] | None = None
    settle: Callable[[Any], None] | None = None


def resolve(grads_and_vars: Iterable[tuple[Any, Any]], operation: str) -> list[Pair]:
    """Look at every pair before the first variable is changed.

    Raises:
        ValueError: shape, dtype or indices do not fit, a variable is read-only or given twice.
        TypeError: something is not an array, or not a pair, or a gradient is in another memory.
    """
    pairs: dict[str, Pair] = {}
    for position, item in enumerate(grads_and_vars):
        gradient, variable = split(item, operation, position)
        named = is_variable(variable)
        key, value = (variable.name, variable.value) if named else (str(position), variable)
        where = f"variable {key!r}, position {position}"
        if key in pairs:
            raise ValueError(f"{operation}: a variable is given twice ({where})")
        settle = getattr(variable, "settle", None) if named else None
        value = _writable(value, operation, where, replaced=settle is not None)
        pair = _pair(key, where, value, gradient, operation)
        pairs[key] = pair._replace(settle=settle)
    return list(pairs.values())


def is_variable(thing: Any) -> bool:
    """Whether this is a named variable, and not a bare array."""
    # First of the type: to read a value may be collective.
    return hasattr(thing, "name") and (hasattr(type(thing), "value") or hasattr(thing, "value"))


def split(item: Any, operation: str, position: int) -> tuple[Any, Any]:
    """Take a pair of a gradient and its variable apart; a sparse tensor becomes `Rows`.

    Raises:
        TypeError: it is not a pair, or one of a variable and its gradient; or `as_rows`'s.
    """
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(
            f"{operation}: expected (gradient, variable) pairs, got {type(item).__name__} "
            f"(position {position})"
        )
    gradient, variable = item
    if _is_parameter(gradient) and not _is_parameter(variable):
        raise TypeError(
            f"{operation}: the pair is swapped, expected (gradient, variable), got (variable, "
            f"gradient) (variable {getattr(gradient, 'name', None)!r}, position {position})"
        )
    return as_rows(gradient, operation, f"position {position}"), variable


def _is_parameter(thing: Any) -> bool:
    """Whether this is meant to be trained: named, or a tensor that PyTorch differentiates by."""
    return is_variable(thing) or bool(
        getattr(thing, "requires_grad", False) and getattr(thing, "is_leaf", False)
    )


def refuse_jax(value: Any, operation: str, where: str) -> None:
    """Refuse an array of JAX as a variable.

    Raises:
        TypeError: it is one.
    """
    if array_api_compat.is_jax_array(value):
        raise TypeError(
            f"{operation}: a variable of JAX cannot be changed in place, expected an array of "
            "NumPy, CuPy or PyTorch; for JAX use Optax, as in "
            f"DistributedOptimizer(optax.adam(0.001)) ({where})"
        )


def floats(what: str, array: Any, operation: str, where: str, *, seen: bool = True) -> Any:
    """Return an array of floats, as a NumPy array where its memory allows.

    One of JAX stays what it is unless it is to be `seen` so, which waits for its elements.

    Raises:
        TypeError: it is not an array.
        ValueError: its dtype is not in `COMPUTE`.
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        kind = type(array).__name__
        raise TypeError(f"{operation}: {what} is not an array, got {kind} ({where})")
    if array_ops.dtype_name(array) not in COMPUTE:
        raise ValueError(
            f"{operation}: unsupported dtype, expected {', '.join(COMPUTE)}, "
            f"got {array_ops.dtype_name(array)} ({where})"
        )
    if not seen and array_api_compat.is_jax_array(array):
        return array
    try:
        view = array_ops.host(array)
    except (TypeError, RuntimeError) as error:  # a sparse tensor, say
        raise TypeError(f"{operation}: {what} cannot be read: {error} ({where})") from error
    return array if view is None else view


def _writable(value: Any, operation: str, where: str, *, replaced: bool) -> Any:
    """Return the array of a variable, as a NumPy array where its memory allows.

    One of JAX may stand in a variable that takes another one in its place.
    """
    if isinstance(value, np.generic):  # its array would be a copy
        raise TypeError(
            f"{operation}: variable is not an array, got the number {value!r} ({where})"
        )
    if not replaced:
        refuse_jax(value, operation, where)
    value = floats("variable", value, operation, where, seen=not replaced)
    if array_api_compat.is_jax_array(value):
        return value
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise ValueError(f"{operation}: variable is read-only ({where})")
        return value
    if not array_api_compat.is_array_api_obj(value):
        raise TypeError(
            f"{operation}: variable cannot be changed in place, expected an array of NumPy, CuPy "
            f"or PyTorch, got {type(value).__name__} ({where})"
        )
    return value.detach() if hasattr(value, "detach") else value


def _pair(key: str, where: str, value: Any, gradient: Any, operation: str) -> Pair:
    """Check a gradient, or the rows of one, against its variable."""
    if gradient is None:
        return Pair(key, where, value, None)
    sparse = isinstance(gradient, Rows)
    array = gradient.values if sparse else gradient
    jax = array_api_compat.is_jax_array(value)
    array = floats("gradient", array, operation, where, seen=not jax)
    if jax:
        array = array_ops.to_device_of(value, array)
    both_host = isinstance(array, np.ndarray) and isinstance(value, np.ndarray)
    if not both_host and array_ops.device_key(array) != array_ops.device_key(value):
        raise TypeError(
            f"{operation}: gradient is in another memory than the variable, expected "
            f"{_describe(value)}, got {_describe(array)} ({where})"
        )
    given = Rows(gradient.indices, array) if sparse else array
    given = checked_rows(given, tuple(value.shape), array_ops.dtype_name(value), operation, where)
    array, rows = (given.values, given.indices) if sparse else (given, None)
    return Pair(key, where, value, array, rows)


def _describe(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__name__} on {array_api_compat.device(array)}"


def check_slots(
    pairs: list[Pair], slots: Mapping[str, Collection[Any]], loaded: set[str], operation: str
) -> None:
    """Check that slots fit, and that those just loaded were not meant for other variables.

    Args:
        pairs: from `resolve`.
        slots: key -> arrays, those that exist.
        loaded: keys of slots that were loaded and not used since.
        operation: beginning of the message.

    Raises:
        ValueError: the message names the variable.
    """
    unused = sorted(loaded - {pair.key for pair in pairs})
    for pair in pairs:
        if pair.gradient is None:
            continue
        if pair.key not in slots and unused:
            raise ValueError(
                f"{operation}: loaded state belongs to other variables, "
                f"got slots for {', '.join(unused)} and none for this one ({pair.where})"
            )
        shape, dtype = tuple(pair.value.shape), COMPUTE[array_ops.dtype_name(pair.value)]
        for slot in slots.get(pair.key, ()):
            if (tuple(slot.shape), array_ops.dtype_name(slot)) != (shape, dtype):
                raise ValueError(
                    f"{operation}: slot does not fit, expected {dtype} of shape {shape}, got "
                    f"{array_ops.dtype_name(slot)} of shape {tuple(slot.shape)} ({pair.where})"
                )
