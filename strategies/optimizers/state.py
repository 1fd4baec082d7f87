"""Optimizer state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strategies.core import array_ops
from strategies.core.validation import integer

__all__ = ["UPDATES", "VARIABLES", "OptimizerState", "parse"]

UPDATES = "updates"
"""Stands where a slot's name stands, before how often the variable was changed."""

VARIABLES = "variables"
"""The number of variables with slots, 0: there where no step had a gradient, as the only sign that
none is missing."""


class OptimizerState(NamedTuple):
    """A step, and by variable its slots and how often it was changed."""

    step: int
    slots: dict[str, list[Any]]
    updates: dict[str, int]


def parse(
    state: Mapping[str, Any], kinds: Sequence[str], counted: bool, operation: str
) -> OptimizerState:
    """Take a state dict apart.

    Args:
        state: `step`, `<kind>/<variable>` for each slot, `updates/<variable>`; or `step` and
            `variables` where there are no slots yet.
        kinds: names of the slots that each variable has.
        counted: whether each has `updates`.
        operation: beginning of a message.

    Returns:
        Copies of the slots, in the order of the kinds.

    Raises:
        ValueError: a key is missing or unknown, or a value is of no use.
    """
    known = [*([UPDATES] if counted else []), *kinds]
    expected = " and ".join(["'step'", *(f"'{kind}/<variable>'" for kind in known)])
    found: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
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
    for key, values in found.items():
        if len(values) < len(known):
            raise ValueError(
                f"{operation}: incomplete state, expected {expected}, "
                f"got {', '.join(values)} (variable: {key})"
            )
    if known and step and not found and VARIABLES not in state:
        raise ValueError(
            f"{operation}: incomplete state of step {step}, expected {expected}, got {list(state)}"
        )
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
    view = array_ops.host(value)
    return array_ops.copy(value if view is None else view)
