"""Pytrees: map over nested containers of arrays, and name their leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = [
    "WHOLE",
    "extra_states",
    "is_module",
    "is_pair",
    "leaves",
    "map_leaves",
    "named_leaves",
    "flatten_registered",
    "state_dict_of",
    "value_of",
    "zip_leaves",
]

_EXTRA = "_extra_state"  # its name in a `state_dict()` of PyTorch

WHOLE = "the array"
"""Name of a leaf that is in no structure."""


IsLeaf = Callable[[Any], bool]


def map_leaves(
    function: Callable[[Any], Any], structure: Any, is_leaf: IsLeaf | None = None
) -> Any:
    """Return the same structure with `function(leaf)` in place of every leaf.

    Tuples (named ones too), lists and dicts are structure unless `is_leaf` is true for them;
    everything else is a leaf.

    Example:
        >>> map_leaves(abs, {"a": [-1, 2], "b": (-3,)})
        {'a': [1, 2], 'b': (3,)}
        >>> map_leaves(len, {"a": [-1, 2]}, lambda node: isinstance(node, list))
        {'a': 2}
    """
    if is_leaf is not None and is_leaf(structure):
        return function(structure)
    if isinstance(structure, dict):
        return {key: map_leaves(function, value, is_leaf) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        mapped = [map_leaves(function, value, is_leaf) for value in structure]
        if hasattr(structure, "_fields"):
            return type(structure)(*mapped)
        return type(structure)(mapped)
    return function(structure)


def zip_leaves(
    function: Callable[[tuple[Any, ...]], Any],
    structures: Sequence[Any],
    operation: str,
    is_leaf: IsLeaf | None = None,
) -> Any:
    """Return one structure with `function(leaves at this place)` in place of every leaf.

    A node is a leaf if `is_leaf` is true for it in any of the structures.

    Raises:
        ValueError: the structures differ.

    Example:
        >>> zip_leaves(sum, [[1, (2,)], [10, (20,)]], "example")
        [11, (22,)]
    """
    first = structures[0]
    if is_leaf is not None and any(is_leaf(structure) for structure in structures):
        return function(tuple(structures))
    if any(isinstance(structure, (dict, list, tuple)) for structure in structures):
        kinds = {_kind(structure) for structure in structures}
        if len(kinds) > 1:
            raise ValueError(
                f"{operation}: the replicas have different structures, got "
                f"{' and '.join(sorted(kinds))}"
            )
    if isinstance(first, dict):
        return {
            key: zip_leaves(function, [part[key] for part in structures], operation, is_leaf)
            for key in first
        }
    if isinstance(first, (list, tuple)):
        columns = zip(*structures, strict=True)
        zipped = [zip_leaves(function, column, operation, is_leaf) for column in columns]
        return type(first)(*zipped) if hasattr(first, "_fields") else type(first)(zipped)
    return function(tuple(structures))


def leaves(structure: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Return the leaves of a structure in order; see `map_leaves`.

    Example:
        >>> leaves({"a": [1, 2], "b": (3,)})
        [1, 2, 3]
    """
    found: list[Any] = []
    map_leaves(found.append, structure, is_leaf)
    return found


def named_leaves(structure: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a structure with their names, in an order that is equal on all ranks.

    A name is the way to the leaf. Dicts are sorted by their keys; (name, value) pairs, as of
    `named_parameters()`, and containers that only JAX knows are structure, too; None is nothing.

    Example:
        >>> list(named_leaves({"b": [1, None, 2], "a": ("c", 3)}))
        [('a/c', 3), ('b/0', 1), ('b/2', 2)]
    """
    return ((name[1:] or WHOLE, leaf) for name, leaf in _name_leaves(structure, ""))


def _name_leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if node is None:
        return
    children: Any = None
    if is_pair(node):
        children = [node]
    elif isinstance(node, dict):
        children = sorted(node.items(), key=lambda item: str(item[0]))
    elif isinstance(node, (list, tuple)):
        children = enumerate(node)
    elif (parts := flatten_registered(node)) is not None:
        children = enumerate(parts[0])
    else:
        yield name, node
    for key, child in children or ():
        yield from _name_leaves(child, f"{name}/{key}")


def is_pair(node: Any) -> bool:
    """Whether this is a name and what it names."""
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], str)


def flatten_registered(node: Any) -> tuple[list[Any], Any] | None:
    """Take apart a container that only JAX knows, such as a state of Flax; None for others."""
    jax: Any = sys.modules.get("jax")
    if jax is None or hasattr(node, "shape"):
        return None
    children, tree = jax.tree_util.tree_flatten(node, is_leaf=lambda x: x is not node)
    return None if jax.tree_util.treedef_is_leaf(tree) else (children, tree)


def is_module(given: Any) -> bool:
    """Whether this is a module of PyTorch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def state_dict_of(given: Any) -> Any:
    """Return the tensors of a module of PyTorch by name; any other argument unchanged.

    They include buffers that are not persistent, which its `state_dict()` leaves out.
    """
    if not is_module(given):
        return given
    state = {**dict(given.named_buffers()), **given.state_dict()}
    extra = extra_states(given)
    return {name: tensor for name, tensor in state.items() if name not in extra}


def extra_states(module: Any) -> dict[str, Any]:
    """Return the submodules with extra state, by the state's name in `module.state_dict()`."""
    default = sys.modules["torch"].nn.Module.get_extra_state
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: child
        for name, child in module.named_modules(remove_duplicate=False)
        if type(child).get_extra_state is not default
    }


def value_of(leaf: Any) -> Any:
    """Return the array of a variable, other leaves as they are."""
    return leaf.value if hasattr(leaf, "name") and hasattr(leaf, "value") else leaf


def _kind(structure: Any) -> str:
    """Say what a structure is, without its leaves."""
    if isinstance(structure, dict):
        return f"dict with keys {sorted(map(str, structure))}"
    if isinstance(structure, (list, tuple)):
        return f"{type(structure).__name__} of {len(structure)}"
    return "leaf"
