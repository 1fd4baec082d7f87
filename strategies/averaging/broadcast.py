"""Broadcast of parameters and optimizer state from one rank, and means of buffers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

import collectives as cc
from collectives import extend
from strategies.checkpoint.state_protocols import as_key, key_data, key_kind
from strategies.core import agreement
from strategies.core.array_ops import dtype_name, is_array
from strategies.core.pytree import (
    extra_states,
    is_module,
    map_leaves,
    named_leaves,
    replace_named_leaves,
    state_dict_of,
    value_of,
)

__all__ = ["average_buffers", "broadcast_optimizer_state", "broadcast_parameters"]

P = TypeVar("P")  # parameters, or an object with a state

# Types of values in a state besides arrays and containers.
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
    """Broadcast the parameters of one rank to all ranks.

    *Collective*: all ranks, with the same names, shapes and dtypes.

    Args:
        parameters: a PyTorch module: its parameters, all its buffers, persistent or not, and its
            pickled extra state (`set_extra_state`); or arrays of any kind, or variables:
            `module.named_parameters()`, a list, or a tree of dicts, lists and tuples. Dicts are
            matched by key, in any order.
        root: rank with the parameters.
        comm: the ranks; None for the whole job.

    Returns:
        The module, or the same structure. Writable arrays, such as tensors and variables, are
        changed in place and returned. Other values, such as JAX arrays and numbers, are replaced.

    Raises:
        TypeError: a leaf is not an array; on all ranks.
        ValueError: `root` is not a rank, or two leaves have the same path, such as the keys 1 and
            "1"; on all ranks.
        MismatchError: names, shapes or dtypes differ; on all ranks.

    Example:
        >>> import numpy as np
        >>> weights = {"w": np.zeros(3), "b": np.ones(1)}
        >>> broadcast_parameters(weights)["b"].tolist()
        [1.0]
    """
    say = "broadcast_parameters"
    comm = extend.comm_or_world(comm, say)

    def prepare() -> tuple[Any, list[str]]:
        _check_root(root, comm, say)
        # An iterator can be read only once, but its leaves are needed twice.
        given = list(parameters) if isinstance(parameters, Iterator) else parameters
        leaves, facts = _leaves_of(state_dict_of(given), say)
        extra = extra_states(given) if is_module(given) else {}
        own = {}
        # Only the root's extra state is needed, and reading it may be expensive.
        if comm.rank == root:
            own = {name: module.get_extra_state() for name, module in extra.items()}
        # The root is a fact as well: with different roots the broadcasts would deadlock.
        return (given, leaves, extra, own), [f"root {root}", *facts, *extra]

    given, leaves, extra, own = agreement.compare(comm, say, prepare)
    # All ranks have agreed on names, dtypes and shapes, so the sequence of broadcasts is the same.
    received = {name: _receive(leaf, root, comm) for name, leaf in leaves}
    if extra:
        states = comm.broadcast_object(own, root)

        def load() -> tuple[None, list[str]]:
            if comm.rank != root:
                for name, module in extra.items():
                    module.set_extra_state(states[name])
            return None, []

        # Loading may fail on one rank; `compare` then raises on all.
        agreement.compare(comm, say, load)
    return given if is_module(given) else replace_named_leaves(given, received)


def average_buffers(model: P, *, comm: cc.Communicator | None = None) -> P:
    """Replace the buffers of all ranks, such as the statistics of batch normalization, by the mean.

    *Collective*. For models without `SyncBatchNorm`, before an evaluation or a checkpoint: each
    rank has statistics of its own rows.

    Args:
        model: a PyTorch module, whose parameters do not change; or arrays or variables as for
            `broadcast_parameters`, such as `batch_stats` of Flax. Only real floats are averaged,
            not integers such as `num_batches_tracked`.
        comm: the ranks; None for the whole job.

    Returns:
        The module, or the same structure, as for `broadcast_parameters`.

    Raises:
        TypeError: a leaf is not an array; on all ranks.
        ValueError: two leaves have the same path; on all ranks.
        MismatchError: names, shapes or dtypes differ; on all ranks.

    Example:
        >>> import numpy as np
        >>> average_buffers({"mean": np.ones(2), "count": 3})
        {'mean': array([1., 1.]), 'count': 3}
    """
    say = "average_buffers"
    comm = extend.comm_or_world(comm, say)
    module: Any = model if is_module(model) else None

    def prepare() -> tuple[Any, list[str]]:
        given = model if module is None else dict(module.named_buffers())
        leaves, facts = _leaves_of(given, say)
        return (given, leaves), facts

    given, leaves = agreement.compare(comm, say, prepare)
    means = {name: _average(leaf, comm) for name, leaf in leaves}
    result: P = replace_named_leaves(given, means) if module is None else model
    return result


def _average(leaf: Any, comm: cc.Communicator) -> Any:
    value = value_of(leaf)
    if isinstance(value, float):
        return type(value)(comm.allreduce(value))
    if not is_array(value) or "float" not in dtype_name(value):
        return leaf
    if not _is_writable(value):
        return comm.allreduce(value)
    comm.allreduce(value, out=value)
    return leaf


def broadcast_optimizer_state(
    optimizer: P, root: int = 0, *, comm: cc.Communicator | None = None
) -> P:
    """Broadcast the optimizer state of one rank to all ranks, even if no other rank has a state.

    *Collective*. Options such as the learning rate are part of the state.

    Args:
        optimizer: an object with `state_dict` and `load_state_dict`: an optimizer of PyTorch or of
            `strategies.optimizers`, wrapped or not, a learning-rate scheduler, a scaler. Or a state
            of Optax, which must have the same structure on all ranks.
        root: rank with the state.
        comm: the ranks; None for the whole job.

    Returns:
        The optimizer, or the new state of Optax.

    Raises:
        TypeError: the state contains other values than arrays, numbers, text, and lists, tuples
            and dicts of these; on all ranks.
        ValueError: `root` is not a rank, or a rank cannot load the state; on all ranks.
        MismatchError: ranks differ in the class of the optimizer; on all ranks.
    """
    stateful: Any = optimizer
    if not callable(getattr(stateful, "state_dict", None)):
        return broadcast_parameters(optimizer, root, comm=comm)
    say = "broadcast_optimizer_state"
    comm = extend.comm_or_world(comm, say)
    arrays: list[Any] = []

    def write() -> tuple[Any, list[str]]:
        _check_root(root, comm, say)
        # Only the root's, as other optimizers may not have a state before their first step.
        state = stateful.state_dict() if comm.rank == root else None
        facts = [f"root {root}", f"kind {type(optimizer).__qualname__}"]
        return _apart(state, arrays, "state"), facts

    # Only the structure is pickled; arrays are broadcast one by one below.
    written = comm.broadcast_object(agreement.compare(comm, say, write), root)

    def received(leaf: Any) -> Any:
        if not isinstance(leaf, _Array):
            return leaf
        # In the order of the structure, which the root's arrays also have.
        return comm.broadcast(arrays.pop(0) if comm.rank == root else leaf.empty(), root)

    state = map_leaves(received, written)

    def load() -> tuple[None, list[str]]:
        # The root's state is already the one that was sent.
        if comm.rank != root:
            stateful.load_state_dict(state)
        return None, []

    agreement.compare(comm, say, load)
    return optimizer


def _check_root(root: int, comm: cc.Communicator, say: str) -> None:
    # True and False are integers in Python, but not ranks.
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
        raise ValueError(f"{say}: no such root, expected 0 .. {comm.size - 1}, got {root!r}")


def _leaves_of(structure: Any, say: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the leaves of a structure with their names, and their descriptions."""
    # Named in sorted order, so that the ranks send dicts with other orders of keys alike.
    leaves = list(named_leaves(structure))
    # The results are matched by name, so equal names would merge two leaves.
    for name, count in Counter(name for name, _ in leaves).items():
        if count > 1:
            raise ValueError(f"{say}: expected one leaf per name, got {count} ({name})")
    return leaves, [_describe(name, leaf, say) for name, leaf in leaves]


def _describe(name: str, leaf: Any, say: str) -> str:
    value = value_of(leaf)
    if isinstance(value, (bool, int, float, complex)):
        return f"{name}: {type(value).__name__}"
    if not is_array(value):
        raise TypeError(f"{say}: expected arrays, got {type(value).__name__} ({name})")
    kind = key_kind(value)
    what = dtype_name(value) if kind is None else f"random keys {kind}"
    return f"{name}: {what} of shape {tuple(value.shape)}"


def _receive(leaf: Any, root: int, comm: cc.Communicator) -> Any:
    value = value_of(leaf)
    kind = key_kind(value)
    if kind is not None:
        # A key array has an opaque dtype, so its numbers are sent.
        return as_key(comm.broadcast(key_data(value), root), kind)
    if isinstance(value, (bool, int, float, complex)):
        # Back to the Python type, because the broadcast returns a NumPy scalar.
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
    # JAX arrays are immutable; they have `at` instead of assignment.
    return not hasattr(value, "at")


@dataclass(frozen=True)
class _Array:
    """Placeholder of an array in a state."""

    shape: tuple[int, ...]
    dtype: str
    is_tensor: bool

    def empty(self) -> Any:
        """Allocate an array to receive into; a tensor on the CPU, moved by `load_state_dict`."""
        if not self.is_tensor:
            return np.empty(self.shape, np.dtype(self.dtype))
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


def _apart(node: Any, arrays: list[Any], name: str) -> Any:
    """Return a state with an `_Array` for every array; append the arrays to `arrays` in order."""
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
        # The state dict is never changed, so the arrays are sent without a copy.
        arrays.append(node.detach() if is_tensor else node)
        return _Array(tuple(node.shape), dtype_name(node), is_tensor)
    raise TypeError(
        "broadcast_optimizer_state: expected arrays, numbers, text, lists, tuples and dicts, got "
        f"{type(node).__name__} ({name})"
    )
