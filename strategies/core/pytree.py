"""Pytrees: map over nested containers of arrays, and name their leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "WHOLE",
    "child_labels",
    "children_of",
    "extra_states",
    "is_module",
    "is_pair",
    "leaves",
    "map_leaves",
    "named_leaves",
    "replace_named_leaves",
    "state_dict_of",
    "value_of",
    "with_children",
    "zip_leaves",
]

_EXTRA = "_extra_state"  # key in PyTorch's `state_dict()`

WHOLE = "the array"
"""Name of a leaf that is in no structure."""


IsLeaf = Callable[[Any], bool]


def map_leaves(
    function: Callable[[Any], Any], structure: Any, is_leaf: IsLeaf | None = None
) -> Any:
    """Return the same structure with `function(leaf)` in place of every leaf.

    Tuples (including named ones), lists and dicts are structure unless `is_leaf` is true for them;
    all other objects are leaves.

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
        return with_children(structure, mapped)
    return function(structure)


def zip_leaves(
    function: Callable[[tuple[Any, ...]], Any],
    structures: Sequence[Any],
    operation: str,
    is_leaf: IsLeaf | None = None,
) -> Any:
    """Return one structure with `function(leaves at this position)` in place of every leaf.

    A node is a leaf if `is_leaf` is true for it in any of the structures.

    Raises:
        ValueError: the structures differ.

    Example:
        >>> zip_leaves(sum, [[1, (2,)], [10, (20,)]], "example")
        [11, (22,)]
    """
    first = structures[0]
    # Any of them: a replica may return None where another returns a leaf.
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
        return with_children(first, zipped)
    return function(tuple(structures))


def leaves(structure: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Return the leaves of a structure in order; see `map_leaves`.

    Example:
        >>> leaves({"a": [1, 2], "b": (3,)})
        [1, 2, 3]
    """
    found: list[Any] = []
    map_leaves(found.append, structure, is_leaf)
    # The mapped structure is discarded: one traversal serves both functions.
    return found


def named_leaves(structure: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a structure with their names, in an order that is equal on all ranks.

    A name is the path to the leaf. Dicts are sorted by key. (name, value) pairs, as from
    `named_parameters()`, and containers registered with JAX are also structure; None is skipped.

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
        # By text, since keys of different types cannot be compared.
        children = sorted(node.items(), key=lambda item: str(item[0]))
    elif (parts := children_of(node)) is not None:
        children = enumerate(parts)
    else:
        yield name, node
    # The separator in front of the first level is cut off by `named_leaves`.
    for key, child in children or ():
        yield from _name_leaves(child, f"{name}/{key}")


def replace_named_leaves(structure: Any, values: Mapping[str, Any]) -> Any:
    """Return the same structure with other leaves, given by the names of `named_leaves`."""
    return _replace_leaves(structure, "", values)


def _replace_leaves(node: Any, name: str, values: Mapping[str, Any]) -> Any:
    if node is None:
        return None
    if is_pair(node):
        return node[0], _replace_leaves(node[1], f"{name}/{node[0]}", values)
    if isinstance(node, dict):
        return {key: _replace_leaves(part, f"{name}/{key}", values) for key, part in node.items()}
    parts = children_of(node)
    if parts is None:
        return values[name[1:] or WHOLE]
    made = [_replace_leaves(part, f"{name}/{i}", values) for i, part in enumerate(parts)]
    return with_children(node, made)


def is_pair(node: Any) -> bool:
    """Return whether an object is a (name, value) pair."""
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], str)


def children_of(node: Any) -> list[Any] | None:
    """Return the children of a list, tuple or container registered with JAX; None for others."""
    if isinstance(node, (list, tuple)):
        return list(node)
    registered = None if node is None else _flatten_registered(node)
    return None if registered is None else registered[0]


def child_labels(node: Any) -> Callable[[int], Any]:
    """Return a function from index to label: field names of a named tuple, otherwise the index."""
    fields = getattr(node, "_fields", None)
    return (lambda index: index) if fields is None else (lambda index: fields[index])


def with_children(node: Any, children: list[Any]) -> Any:
    """Return a container of the same kind with other children; see `children_of`."""
    if hasattr(node, "_fields"):
        return type(node)(*children)
    if isinstance(node, (list, tuple)):
        return type(node)(children)
    registered = _flatten_registered(node)
    assert registered is not None
    return sys.modules["jax"].tree_util.tree_unflatten(registered[1], children)


def _flatten_registered(node: Any) -> tuple[list[Any], Any] | None:
    """Flatten a container registered with JAX, such as a Flax state; None for other objects."""
    jax: Any = sys.modules.get("jax")
    # JAX treats arrays as leaves as well; the check avoids the call for each of them.
    if jax is None or hasattr(node, "shape"):
        return None
    # `is_leaf` stops below the first level, so that only this container is opened.
    children, tree = jax.tree_util.tree_flatten(node, is_leaf=lambda x: x is not node)
    return None if jax.tree_util.treedef_is_leaf(tree) else (children, tree)


def is_module(given: Any) -> bool:
    """Return whether an object is a PyTorch module."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def state_dict_of(given: Any) -> Any:
    """Return the tensors of a PyTorch module by name; other arguments unchanged.

    Includes non-persistent buffers, which `state_dict()` omits.
    """
    if not is_module(given):
        return given
    state = {**dict(given.named_buffers()), **given.state_dict()}
    extra = extra_states(given)
    # The keys of extra state hold arbitrary objects, which are pickled separately.
    return {name: tensor for name, tensor in state.items() if name not in extra}


def extra_states(module: Any) -> dict[str, Any]:
    """Return the submodules with extra state, by the state's name in `module.state_dict()`."""
    default = sys.modules["torch"].nn.Module.get_extra_state
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: child
        # With duplicates, because a module used twice has a name in each place.
        for name, child in module.named_modules(remove_duplicate=False)
        if type(child).get_extra_state is not default
    }


def value_of(leaf: Any) -> Any:
    """Return the array of a variable; other leaves unchanged."""
    # Both attributes: tensors of PyTorch have a `name`, and other objects a `value`.
    return leaf.value if hasattr(leaf, "name") and hasattr(leaf, "value") else leaf


def _kind(structure: Any) -> str:
    """Describe a structure without its leaves."""
    if isinstance(structure, dict):
        return f"dict with keys {sorted(map(str, structure))}"
    if isinstance(structure, (list, tuple)):
        return f"{type(structure).__name__} of {len(structure)}"
    return "leaf"
