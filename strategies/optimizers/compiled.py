"""Rules carried over arrays of JAX: all variables of a step in one compiled program.

Importing this module loads JAX, so import it inside the function that needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strategies import arrays
from strategies.optimizers.rules import Rule

__all__ = ["Change", "apply"]


class Change(NamedTuple):
    """What a rule takes for one variable: arrays of JAX, and numbers."""

    value: Any
    gradient: Any
    slots: Sequence[Any]
    numbers: Sequence[float]


def apply(rule: Rule, changes: Sequence[Change]) -> list[list[Any]]:
    """Return for each variable its new value and its new slots, in the dtypes of the old ones."""
    numbers = _numbers(tuple(tuple(map(float, change.numbers)) for change in changes))
    taken = [(change.value, change.gradient, list(change.slots)) for change in changes]
    made: list[list[Any]] = _compiled(rule)(taken, numbers)
    return made


@functools.lru_cache(maxsize=16)
def _numbers(rows: tuple[tuple[float, ...], ...]) -> Any:
    """Keep numbers that are the same at every step where JAX has them."""
    return jnp.asarray(np.array(rows))


@functools.cache
def _compiled(rule: Rule) -> Any:
    def run(changes: Any, numbers: Any) -> Any:
        made = []
        for (value, gradient, slots), row in zip(changes, numbers, strict=True):
            wide = arrays.wide(value)
            own = tuple(number.astype(wide.dtype) for number in row)
            results = rule(wide, arrays.wide(gradient), *slots, own)
            kept = zip([value, *slots], results, strict=True)
            made.append([new.astype(old.dtype) for old, new in kept])
        return made

    return jax.jit(run)
