"""Nested tuples, lists and dicts of arrays: apply a function to every leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["leaves", "map_leaves", "zip_leaves"]


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


def zip_leaves(
    function: Callable[[tuple[Any, ...]], Any], structures: Sequence[Any], operation: str
) -> Any:
    """Return one structure with `function(leaves at this place)` in place of every leaf.

    Raises:
        ValueError: the structures differ.

    Example:
        >>> zip_leaves(sum, [[1, (2,)], [10, (20,)]], "example")
        [11, (22,)]
    """
    first = structures[0]
    if any(isinstance(structure, (dict, list, tuple)) for structure in structures):
        kinds = {_kind(structure) for structure in structures}
        if len(kinds) > 1:
            raise ValueError(
                f"{operation}: the replicas have different structures, got "
                f"{' and '.join(sorted(kinds))}"
            )
    if isinstance(first, dict):
        return {
            key: zip_leaves(function, [structure[key] for structure in structures], operation)
            for key in first
        }
    if isinstance(first, (list, tuple)):
        columns = zip(*structures, strict=True)
        zipped = [zip_leaves(function, column, operation) for column in columns]
        return type(first)(*zipped) if hasattr(first, "_fields") else type(first)(zipped)
    return function(tuple(structures))


def leaves(structure: Any) -> list[Any]:
    """Return the leaves of a structure in order.

    Example:
        >>> leaves({"a": [1, 2], "b": (3,)})
        [1, 2, 3]
    """
    found: list[Any] = []
    map_leaves(found.append, structure)
    return found


def _kind(structure: Any) -> str:
    """Say what a structure is, without its leaves."""
    if isinstance(structure, dict):
        return f"dict with keys {sorted(map(str, structure))}"
    if isinstance(structure, (list, tuple)):
        return f"{type(structure).__name__} of {len(structure)}"
    return "leaf"
