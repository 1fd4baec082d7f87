"""Optimizers as words, by which another task makes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies import optimizers
from strategies.optimizers import Optimizer
from strategies.remote.names import function_named, name_of
from strategies.variables.store import Rate

__all__ = ["make_optimizer", "optimizer_as_words"]

# What a task may be asked to make: the optimizers of this package, by name.
_KINDS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(optimizers).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def optimizer_as_words(optimizer: Optimizer | None, operation: str) -> dict[str, Any] | None:
    """Return the class and the arguments of an optimizer, as msgpack can carry them.

    Raises:
        TypeError: none of the optimizers of this package.
        ValueError: its learning rate is a function that cannot be imported.
    """
    if optimizer is None:
        return None
    kind = type(optimizer)
    if _KINDS.get(kind.__name__) is not kind:
        raise TypeError(
            f"{operation}: not an optimizer that can live on a task, expected one of "
            f"{' '.join(sorted(_KINDS))}, got {kind.__name__}"
        )
    words = {
        name: name_of(value, f"{operation}: learning rate") if callable(value) else _plain(value)
        for name, value in optimizer.settings.items()
    }
    return {"class": kind.__name__, **words}


def make_optimizer(words: Mapping[str, Any]) -> tuple[Optimizer, Rate]:
    """Make an optimizer, and what its learning rate can be changed with."""
    arguments = dict(words)
    kind = _KINDS[arguments.pop("class")]
    given = arguments["learning_rate"]
    rate = Rate(function_named(given) if isinstance(given, str) else given)
    return kind(**{**arguments, "learning_rate": rate}), rate


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int)) else float(value)
