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
        key: key of the slots.
        where: description for errors.
        value: the variable's array, as a NumPy view if in host memory.
        gradient: of the same kind, or None; for `Rows` only the values.
        rows: shape (k,), int64, increasing indices of the rows; None for a dense gradient.
        settle: method of the variable that takes its new value; None if the array changes in place.
            Variables have it if their arrays are on several devices or immutable.
    """

    key: str
    where: str
    value: Any
    gradient: Any
    rows: npt.NDArray[np.int64] | None = None
    settle: Callable[[Any], None] | None = None


def resolve(grads_and_vars: Iterable[tuple[Any, Any]], operation: str) -> list[Pair]:
    """Check every pair before the first variable changes.

    Raises:
        ValueError: shape, dtype or indices do not match, a variable is read-only or passed twice.
        TypeError: an item is not a pair of arrays, or a gradient is in another memory.
    """
    # By key, which also finds a variable that is given twice.
    pairs: dict[str, Pair] = {}
    for position, item in enumerate(grads_and_vars):
        gradient, variable = split(item, operation, position)
        named = is_variable(variable)
        # The value is read once, because a variable's value may be computed.
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
    """Return whether this is a named variable rather than a bare array."""
    # Look at the type first, because reading a value may be collective.
    return hasattr(thing, "name") and (hasattr(type(thing), "value") or hasattr(thing, "value"))


def split(item: Any, operation: str, position: int) -> tuple[Any, Any]:
    """Split a pair into gradient and variable; a sparse tensor becomes `Rows`.

    Raises:
        TypeError: the item is not a pair, the pair is swapped, or the error of `as_rows`.
    """
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(
            f"{operation}: expected (gradient, variable) pairs, got {type(item).__name__} "
            f"(position {position})"
        )
    gradient, variable = item
    # The mistake is common, and would change the gradient's array.
    if _is_parameter(gradient) and not _is_parameter(variable):
        raise TypeError(
            f"{operation}: the pair is swapped, expected (gradient, variable), got (variable, "
            f"gradient) (variable {getattr(gradient, 'name', None)!r}, position {position})"
        )
    return as_rows(gradient, operation, f"position {position}"), variable


def _is_parameter(thing: Any) -> bool:
    """Return whether this is trainable: a named variable, or a leaf tensor with a gradient."""
    return is_variable(thing) or bool(
        getattr(thing, "requires_grad", False) and getattr(thing, "is_leaf", False)
    )


def refuse_jax(value: Any, operation: str, where: str) -> None:
    """Reject a JAX array as a variable.

    Raises:
        TypeError: the value is a JAX array.
    """
    if array_api_compat.is_jax_array(value):
        raise TypeError(
            f"{operation}: a variable of JAX cannot be changed in place, expected an array of "
            "NumPy, CuPy or PyTorch; for JAX use Optax, as in "
            f"DistributedOptimizer(optax.adam(0.001)) ({where})"
        )


def floats(what: str, array: Any, operation: str, where: str, *, seen: bool = True) -> Any:
    """Return an array of floats, as a NumPy view if in host memory.

    A JAX array is returned unchanged if not `seen`, because its view waits for the elements.

    Raises:
        TypeError: the argument is not an array.
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
    except (TypeError, RuntimeError) as error:  # for example a sparse tensor
        raise TypeError(f"{operation}: {what} cannot be read: {error} ({where})") from error
    return array if view is None else view


def _writable(value: Any, operation: str, where: str, *, replaced: bool) -> Any:
    """Return the array of a variable, as a NumPy view if in host memory.

    A JAX array is accepted if the variable can replace it.
    """
    if isinstance(value, np.generic):  # np.asarray would copy it
        raise TypeError(
            f"{operation}: variable is not an array, got the number {value!r} ({where})"
        )
    if not replaced:
        refuse_jax(value, operation, where)
    value = floats("variable", value, operation, where, seen=not replaced)
    if array_api_compat.is_jax_array(value):
        return value
    if isinstance(value, np.ndarray):
        # Raised here: a compiled loop would write to the memory all the same.
        if not value.flags.writeable:
            raise ValueError(f"{operation}: variable is read-only ({where})")
        return value
    if not array_api_compat.is_array_api_obj(value):
        raise TypeError(
            f"{operation}: variable cannot be changed in place, expected an array of NumPy, CuPy "
            f"or PyTorch, got {type(value).__name__} ({where})"
        )
    # Detached: a leaf that requires gradients rejects changes in place.
    return value.detach() if hasattr(value, "detach") else value


def _pair(key: str, where: str, value: Any, gradient: Any, operation: str) -> Pair:
    """Check a gradient or `Rows` against its variable."""
    if gradient is None:
        return Pair(key, where, value, None)
    sparse = isinstance(gradient, Rows)
    array = gradient.values if sparse else gradient
    jax = array_api_compat.is_jax_array(value)
    array = floats("gradient", array, operation, where, seen=not jax)
    # The gradient may be computed on another device of the variable's strategy.
    if jax:
        array = array_ops.to_device_of(value, array)
    # Host arrays of any library are NumPy views by now, and can be combined.
    both_host = isinstance(array, np.ndarray) and isinstance(value, np.ndarray)
    if not both_host and array_ops.device_key(array) != array_ops.device_key(value):
        raise TypeError(
            f"{operation}: gradient is in another memory than the variable, expected "
            f"{_describe(value)}, got {_describe(array)} ({where})"
        )
    given = Rows(gradient.indices, array) if sparse else array
    # Repeated indices are summed here, so that a rule sees each row once.
    given = checked_rows(given, tuple(value.shape), array_ops.dtype_name(value), operation, where)
    array, rows = (given.values, given.indices) if sparse else (given, None)
    return Pair(key, where, value, array, rows)


def _describe(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__name__} on {array_api_compat.device(array)}"


def check_slots(
    pairs: list[Pair], slots: Mapping[str, Collection[Any]], loaded: set[str], operation: str
) -> None:
    """Check that slots fit, and that loaded slots belong to these variables.

    Args:
        pairs: result of `resolve`.
        slots: key -> existing slots.
        loaded: keys of loaded slots that were not used since.
        operation: prefix of errors.

    Raises:
        ValueError: a slot does not fit, or belongs to other variables; names the variable.
    """
    # Slots without a variable: with a new variable, this is a mixed-up state.
    unused = sorted(loaded - {pair.key for pair in pairs})
    for pair in pairs:
        if pair.gradient is None:
            continue
        # A variable may stay without slots as long as it has no gradient.
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
