"""Optimizer steps on JAX arrays, in one compiled program.

Importing this module loads JAX, so import it inside the function that needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core import array_ops
from strategies.optimizers.rules import Rule

__all__ = ["VariableUpdate", "apply", "donate_gradients"]

_to_spare: ContextVar[bool] = ContextVar("_to_spare", default=False)


class VariableUpdate(NamedTuple):
    """What a rule takes for one variable: arrays of JAX, and numbers."""

    value: Any
    gradient: Any
    slots: Sequence[Any]
    numbers: Sequence[float]


@contextmanager
def donate_gradients() -> Iterator[None]:
    """Let `apply` put what it makes into the memory of its gradients, which nobody else has.

    New memory for each step took 8 devices of the host 0.5 ms, of 11 for a step.
    """
    before = _to_spare.set(True)
    try:
        yield
    finally:
        _to_spare.reset(before)


def apply(rule: Rule, changes: Sequence[VariableUpdate]) -> list[list[Any]]:
    """Return for each variable its new value and its new slots, in the dtypes of the old ones.

    The memory of the old slots is used for the new ones: nobody else has them.
    """
    # To bring the numbers to 8 devices of the host in each step took 0.2 ms.
    there = {change.value.sharding for change in changes}
    rows = tuple(tuple(map(float, change.numbers)) for change in changes)
    numbers = _numbers(rows, there.pop() if len(there) == 1 else None)
    slots = [list(change.slots) for change in changes]
    gradients = [change.gradient for change in changes]
    values = [change.value for change in changes]
    run = _compile(rule, (0, 1) if _to_spare.get() else (0,))
    made: list[list[Any]] = run(slots, gradients, values, numbers)
    return made


@functools.lru_cache(maxsize=16)
def _numbers(rows: tuple[tuple[float, ...], ...], sharding: Any) -> Any:
    """Keep numbers that are the same at every step where JAX has them, on all devices."""
    numbers = np.array(rows)
    if sharding is None or not sharding.is_fully_replicated:
        return jnp.asarray(numbers)
    return jax.device_put(jnp.asarray(numbers), sharding)


@functools.cache
def _compile(rule: Rule, to_spare: tuple[int, ...]) -> Any:
    def run(slots_of: Any, gradients: Any, values: Any, numbers: Any) -> Any:
        made = []
        changes = zip(slots_of, gradients, values, numbers, strict=True)
        for slots, gradient, value, row in changes:
            wide = array_ops.arithmetic_dtype(value)
            own = tuple(number.astype(wide.dtype) for number in row)
            results = rule(wide, array_ops.arithmetic_dtype(gradient), *slots, own)
            kept = zip([value, *slots], results, strict=True)
            made.append([new.astype(old.dtype) for old, new in kept])
        return made

    return jax.jit(run, donate_argnums=to_spare)
