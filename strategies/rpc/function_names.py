"""Qualified names of functions that another task can import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from strategies.errors import InvalidArgumentError, NotFoundError

__all__ = ["function_named", "name_of"]


def name_of(function: Callable[..., Any] | str, operation: str) -> str:
    """Return "module:function" for an importable function.

    Raises:
        ValueError: the function cannot be imported by name, such as a nested function.
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
        # The name of a nested function refers to no object, a rebound name to another one.
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
    """Import a module and return one of its functions.

    Args:
        name: "module:function".

    Raises:
        NotFoundError: the module or function does not exist.
        InvalidArgumentError: the object is not callable.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        # A path, because methods and nested classes have dotted qualified names.
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotFoundError(f"no function of this name, got {name!r} ({error})") from error
    if not callable(found):
        raise InvalidArgumentError(f"expected a function, got {name!r}, {type(found).__name__}")
    function: Callable[..., Any] = found
    return function
