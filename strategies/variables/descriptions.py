"""Optimizers and functions as words, by which another task makes or finds the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from strategies import optimizers
from strategies.errors import InvalidArgumentError, NotFoundError
from strategies.optimizers import Optimizer
from strategies.variables.store import Rate

__all__ = ["function_named", "make_optimizer", "name_of", "optimizer_as_words"]


def name_of(function: Callable[..., Any] | str, operation: str) -> str:
    """Return "module:function" for a function that can be imported.

    Raises:
        ValueError: it cannot be imported by its name, as one inside a function.
    """
    if isinstance(function, str):
        module, _, path = function.partition(":")
        if not module or not path:
            raise ValueError(
                f"{operation}: no name of a function, expected 'module:function', got {function!r}"
            )
        return function
    module = getattr(function, "__module__", None) or ""
    name = f"{module}:{getattr(function, '__qualname__', '')}"
    try:
        same = function_named(name) == function
    except (NotFoundError, InvalidArgumentError):
        same = False
    if not same:
        raise ValueError(
            f"{operation}: another task cannot import this function, expected one at the top of a "
            f"module, got {function!r}"
        )
    return name


def function_named(name: str) -> Callable[..., Any]:
    """Return a function by its name, importing its module.

    Raises:
        NotFoundError: there is none of this name.
        InvalidArgumentError: it cannot be called.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotFoundError(f"no function of this name, got {name!r} ({error})") from error
    if not callable(found):
        raise InvalidArgumentError(f"expected a function, got {name!r}, {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def optimizer_as_words(optimizer: Optimizer | None, operation: str) -> dict[str, Any] | None:
    """Return the class and the arguments of an optimizer, as msgpack can carry them.

    Raises:
        TypeError: none of the optimizers of this package.
        ValueError: its learning rate is a function that cannot be imported.
    """
    if optimizer is None:
        return None
    kind = type(optimizer)
    if getattr(optimizers, kind.__name__, None) is not kind:
        known = sorted(set(optimizers.__all__) - {"LearningRate", "Optimizer"})
        raise TypeError(
            f"{operation}: not an optimizer that can live on a task, expected one of "
            f"{' '.join(known)}, got {kind.__name__}"
        )
    words = {
        name: name_of(value, f"{operation}: learning rate") if callable(value) else _plain(value)
        for name, value in optimizer.settings.items()
    }
    return {"class": kind.__name__, **words}


def make_optimizer(words: Mapping[str, Any]) -> tuple[Optimizer, Rate]:
    """Make an optimizer, and what its learning rate can be changed with."""
    arguments = dict(words)
    kind = getattr(optimizers, arguments.pop("class"))
    given = arguments["learning_rate"]
    rate = Rate(function_named(given) if isinstance(given, str) else given)
    return kind(**{**arguments, "learning_rate": rate}), rate


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int)) else float(value)
