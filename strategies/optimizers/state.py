"""Optimizer state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strategies.core import array_ops
from strategies.core.validation import integer

__all__ = ["UPDATES", "VARIABLES", "OptimizerState", "parse"]

UPDATES = "updates"
"""Prefix of a variable's number of updates, where slots have the slot's name."""

VARIABLES = "variables"
"""Number of variables with slots. It is 0 and present only if no step had a gradient, which
distinguishes such a state from one whose slots are missing."""


class OptimizerState(NamedTuple):
    """The step, and the slots and number of updates of each variable."""

    step: int
    slots: dict[str, list[Any]]
    updates: dict[str, int]


def parse(
    state: Mapping[str, Any], kinds: Sequence[str], counted: bool, operation: str
) -> OptimizerState:
    """Parse a state dict.

    Args:
        state: `step`, `<kind>/<variable>` for each slot, `updates/<variable>`; or `step` and
            `variables` if no slot exists yet.
        kinds: names of the slots of each variable.
        counted: whether each variable has `updates`.
        operation: prefix of errors.

    Returns:
        Copies of the slots, in the order of the kinds.

    Raises:
        ValueError: a key is missing or unknown, or a value is invalid.
    """
    known = [*([UPDATES] if counted else []), *kinds]
    expected = " and ".join(["'step'", *(f"'{kind}/<variable>'" for kind in known)])
    found: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        # Names of variables may contain slashes, names of slots may not.
        kind, _, key = name.partition("/")
        if name == "step" or (known and name == VARIABLES):
            continue
        if kind not in known or not key:
            raise ValueError(
                f"{operation}: unknown key in state, expected {expected}, got {name!r}"
            )
        check = _count if kind == UPDATES else _slot
        found.setdefault(key, {})[kind] = check(value, name, operation)
    step = _count(state.get("step"), "step", operation)
    # A variable needs all of its slots: a missing one would start at its initial value.
    for key, values in found.items():
        if len(values) < len(known):
            raise ValueError(
                f"{operation}: incomplete state, expected {expected}, "
                f"got {', '.join(values)} (variable: {key})"
            )
    # A state of step 0 may have no slots; a later one must have them, or say so.
    if known and step and not found and VARIABLES not in state:
        raise ValueError(
            f"{operation}: incomplete state of step {step}, expected {expected}, got {list(state)}"
        )
    # The count also finds states whose slots are lost altogether.
    if VARIABLES in state and _count(state[VARIABLES], VARIABLES, operation) != len(found):
        raise ValueError(
            f"{operation}: incomplete state, expected the slots of {state[VARIABLES]} variables, "
            f"got those of {len(found)}"
        )
    slots = {key: [values[kind] for kind in kinds] for key, values in found.items()}
    updates = {key: values[UPDATES] for key, values in found.items()} if counted else {}
    return OptimizerState(step, slots, updates)


def _count(value: Any, name: str, operation: str) -> int:
    return integer(operation, f"{name!r} in state", value, least=0)


def _slot(value: Any, name: str, operation: str) -> Any:
    if not hasattr(value, "shape") or array_ops.dtype_name(value) not in array_ops.COMPUTE.values():
        got = value.dtype if hasattr(value, "dtype") else type(value).__name__
        raise ValueError(
            f"{operation}: bad slot, expected a float32 or float64 array, got {got} (key: {name!r})"
        )
    # Copies, since slots change in place.
    view = array_ops.host(value)
    return array_ops.copy(value if view is None else view)
