"""Nested tuples, lists and dicts of arrays: apply a function to every leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["leaves", "map_leaves"]


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return the same structure with `function(leaf)` in place of every leaf.

    Tuples (named ones too), lists and dicts are structure, everything else is a leaf.

    Example:
        >>> map_leaves(abs, {"a": [-1, 2], "b": (-3,)})
        {'a': [1, 2], 'b': (3,)}
    """
    if isinstance(structure, dict):
        return {key: map_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        mapped = [map_leaves(function, value) for value in structure]
        if hasattr(structure, "_fields"):
            return type(structure)(*mapped)
        return type(structure)(mapped)
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """Return the leaves of a structure in order.

    Example:
        >>> leaves({"a": [1, 2], "b": (3,)})
        [1, 2, 3]
    """
    found: list[Any] = []
    map_leaves(found.append, structure)
    return found
