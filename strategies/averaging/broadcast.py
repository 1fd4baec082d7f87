"""Broadcast of parameters and optimizer state from one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

import collectives as cc
from strategies.checkpoint.state_protocols import as_key, key_data, key_kind
from strategies.core import agreement
from strategies.core.array_ops import dtype_name, is_array
from strategies.core.pytree import (
    WHOLE,
    extra_states,
    flatten_registered,
    is_module,
    is_pair,
    map_leaves,
    named_leaves,
    state_dict_of,
    value_of,
)

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

P = TypeVar("P")  # parameters, or whatever holds a state

# What a value in a state may be beside arrays and containers.
_SCALARS = (bool, int, float, str, type(None))


@overload
def broadcast_parameters(
    parameters: Iterator[P], root: int = 0, *, comm: cc.Communicator | None = None
) -> list[P]: ...
@overload
def broadcast_parameters(
    parameters: P, root: int = 0, *, comm: cc.Communicator | None = None
) -> P: ...
def broadcast_parameters(
    parameters: Any, root: int = 0, *, comm: cc.Communicator | None = None
) -> Any:
    """Give every rank the parameters of one.

    *Collective*: all ranks, with the same names, shapes and dtypes.

    Args:
        parameters: a module of PyTorch: its parameters, all its buffers, persistent or not, and
            its pickled extra state (`set_extra_state`); or arrays of any kind, or variables:
            `module.named_parameters()`, a list, or a tree of dicts, lists and tuples. Dicts are
            compared by their keys, whatever their order.
        root: whose parameters.
        comm: the ranks; the whole job if None.

    Returns:
        The module, or the same structure. Arrays that can be written, such as tensors and
        variables, are changed in place and returned; in the place of others, such as JAX arrays and
        numbers, stand new ones.

    Raises:
        TypeError: something is not an array; on all ranks.
        ValueError: no such root; on all ranks.
        MismatchError: names, shapes or dtypes differ; on all ranks.

    Example:
        >>> import numpy as np
        >>> weights = {"w": np.zeros(3), "b": np.ones(1)}
        >>> broadcast_parameters(weights)["b"].tolist()
        [1.0]
    """
    comm = cc.init() if comm is None else comm

    def prepare() -> tuple[Any, list[str]]:
        _check_root(root, comm, "broadcast_parameters")
        given = list(parameters) if isinstance(parameters, Iterator) else parameters
        leaves = list(named_leaves(state_dict_of(given)))
        facts = [_describe(name, leaf) for name, leaf in leaves]
        extra = extra_states(given) if is_module(given) else {}
        own = {}
        if comm.rank == root:
            own = {name: module.get_extra_state() for name, module in extra.items()}
        return (given, leaves, extra, own), [f"root {root}", *facts, *extra]

    given, leaves, extra, own = agreement.compare(comm, "broadcast_parameters", prepare)
    received = {name: _receive(leaf, root, comm) for name, leaf in leaves}
    if extra:
        _set_extra(comm.broadcast_object(own, root), extra, root, comm)
    return given if is_module(given) else _rebuild(given, "", received)


def _set_extra(
    states: Mapping[str, Any], extra: Mapping[str, Any], root: int, comm: cc.Communicator
) -> None:
    """Set the root's extra states in the modules of all other ranks."""

    def load() -> tuple[None, list[str]]:
        if comm.rank != root:
            for name, module in extra.items():
                module.set_extra_state(states[name])
        return None, []

    agreement.compare(comm, "broadcast_parameters", load)


def broadcast_optimizer_state(
    optimizer: P, root: int = 0, *, comm: cc.Communicator | None = None
) -> P:
    """Give every rank the state of one rank's optimizer, also where only that one has a state.

    *Collective*. Options such as the learning rate are part of the state.

    Args:
        optimizer: whatever has `state_dict` and `load_state_dict`: an optimizer of PyTorch or of
            `strategies.optimizers`, wrapped or not, a learning-rate scheduler, a scaler. Or a state
            of Optax, which must have the same structure on all ranks.
        root: whose state.
        comm: the ranks; the whole job if None.

    Returns:
        The optimizer, or the new state of Optax.

    Raises:
        TypeError: the state holds something other than arrays, numbers, text, and lists, tuples and
            dicts of these; on all ranks.
        ValueError: no such root; or a rank cannot load the state; on all ranks.
        MismatchError: ranks differ in the kind of the optimizer; on all ranks.
    """
    stateful: Any = optimizer
    if not callable(getattr(stateful, "state_dict", None)):
        return broadcast_parameters(optimizer, root, comm=comm)
    say = "broadcast_optimizer_state"
    comm = cc.init() if comm is None else comm
    arrays: list[Any] = []

    def write() -> tuple[Any, list[str]]:
        _check_root(root, comm, say)
        state = stateful.state_dict() if comm.rank == root else None
        facts = [f"root {root}", f"kind {type(optimizer).__qualname__}"]
        return _apart(state, arrays, "state"), facts

    written = comm.broadcast_object(agreement.compare(comm, say, write), root)

    def received(leaf: Any) -> Any:
        if not isinstance(leaf, _Array):
            return leaf
        return comm.broadcast(arrays.pop(0) if comm.rank == root else leaf.empty(), root)

    state = map_leaves(received, written)

    def load() -> tuple[None, list[str]]:
        if comm.rank != root:
            stateful.load_state_dict(state)
        return None, []

    agreement.compare(comm, say, load)
    return optimizer


def _check_root(root: int, comm: cc.Communicator, say: str) -> None:
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
        raise ValueError(f"{say}: no such root, expected 0 .. {comm.size - 1}, got {root!r}")


def _describe(name: str, leaf: Any) -> str:
    value = value_of(leaf)
    if isinstance(value, (bool, int, float, complex)):
        return f"{name}: {type(value).__name__}"
    if not is_array(value):
        raise TypeError(
            f"broadcast_parameters: expected arrays, got {type(value).__name__} ({name})"
        )
    kind = key_kind(value)
    what = dtype_name(value) if kind is None else f"random keys {kind}"
    return f"{name}: {what} of shape {tuple(value.shape)}"


def _receive(leaf: Any, root: int, comm: cc.Communicator) -> Any:
    value = value_of(leaf)
    kind = key_kind(value)
    if kind is not None:
        return as_key(comm.broadcast(key_data(value), root), kind)
    if isinstance(value, (bool, int, float, complex)):
        return type(value)(comm.broadcast(value, root))
    if _is_writable(value):
        comm.broadcast(value, root, out=value)
        return leaf
    return comm.broadcast(value, root)


def _is_writable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    if isinstance(value, np.generic):
        return False
    # Arrays of JAX have no __setitem__ that works; they say so by a method for it.
    return not hasattr(value, "at")


def _rebuild(node: Any, name: str, received: Mapping[str, Any]) -> Any:
    """Make the same structure of the leaves received."""
    if node is None:
        return None
    if is_pair(node):
        return node[0], _rebuild(node[1], f"{name}/{node[0]}", received)
    if isinstance(node, dict):
        return {key: _rebuild(child, f"{name}/{key}", received) for key, child in node.items()}
    if isinstance(node, (list, tuple)):
        made = [_rebuild(child, f"{name}/{i}", received) for i, child in enumerate(node)]
        return type(node)(*made) if hasattr(node, "_fields") else type(node)(made)
    parts = flatten_registered(node)
    if parts is None:
        return received[name[1:] or WHOLE]
    children, tree = parts
    made = [_rebuild(child, f"{name}/{i}", received) for i, child in enumerate(children)]
    return sys.modules["jax"].tree_util.tree_unflatten(tree, made)


@dataclass(frozen=True)
class _Array:
    """Stands for an array in a state."""

    shape: tuple[int, ...]
    dtype: str
    is_tensor: bool

    def empty(self) -> Any:
        """Make one to receive into; a tensor on the CPU, which is loaded to where it belongs."""
        if not self.is_tensor:
            return np.empty(self.shape, np.dtype(self.dtype))
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


def _apart(node: Any, arrays: list[Any], name: str) -> Any:
    """Return a state with an `_Array` in place of every array; these go to `arrays`, in order."""
    if isinstance(node, _SCALARS):
        return node
    if isinstance(node, dict):
        return {
            _apart(key, arrays, name): _apart(child, arrays, f"{name}[{key!r}]")
            for key, child in node.items()
        }
    if isinstance(node, (list, tuple)):
        parts = [_apart(child, arrays, f"{name}[{i}]") for i, child in enumerate(node)]
        return tuple(parts) if isinstance(node, tuple) else parts
    if is_array(node):
        torch: Any = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(node, torch.Tensor)
        arrays.append(node.detach() if is_tensor else node)
        return _Array(tuple(node.shape), dtype_name(node), is_tensor)
    raise TypeError(
        "broadcast_optimizer_state: expected arrays, numbers, text, lists, tuples and dicts, got "
        f"{type(node).__name__} ({name})"
    )
