"""Protocols of objects that can be saved.

A thing with a state of its own, such as a module, an optimizer or a generator, gives it and takes
it back by its own methods (`KINDS`). Arrays belong to a library; containers are those of Python and
what JAX has been told of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies.checkpoint.boxes import Slice
from strategies.core import pytree

__all__ = [
    "KINDS",
    "StateProtocol",
    "as_key",
    "beside",
    "to_host",
    "from_host",
    "into_tensor",
    "key_data",
    "key_kind",
    "protocol_of",
    "labels",
    "library_of",
    "like",
    "parts_of",
]


class StateProtocol(NamedTuple):
    """How things of one kind give their state, and take it back.

    Attributes:
        methods: which they have, and others have not.
        state: from the thing and the ranks; *collective*. A structure of arrays and plain values.
        load: takes the thing, its state and the ranks.
        of_rank: whether each rank has a state of its own.
    """

    methods: tuple[str, ...]
    state: Callable[[Any, cc.Communicator | None], Any]
    load: Callable[[Any, Any, cc.Communicator | None], Any]
    of_rank: bool = False


KINDS = {
    # Before those with a `state_dict`, which an input may have beside, of its own rank alone.
    "input": StateProtocol(
        ("state", "load_state"),
        lambda thing, comm: thing.state(comm),
        lambda thing, state, comm: thing.load_state(state),
    ),
    "module, optimizer or schedule": StateProtocol(
        ("state_dict", "load_state_dict"),
        lambda thing, comm: thing.state_dict(),
        lambda thing, state, comm: thing.load_state_dict(state),
    ),
    "pipeline": StateProtocol(
        ("state", "resume"),
        lambda thing, comm: thing.state(comm),
        lambda thing, state, comm: thing.resume(state, comm),
    ),
    "variable": StateProtocol(
        ("value", "assign"),
        lambda thing, comm: thing.value,
        lambda thing, state, comm: thing.assign(state),
    ),
    "variable on a task": StateProtocol(
        ("read", "assign", "scatter_add"),
        lambda thing, comm: thing.read().value,
        # One variable for all ranks, which wait for each other after this.
        lambda thing, state, comm: thing.assign(state) if not comm or comm.rank == 0 else None,
    ),
    "generator of NumPy": StateProtocol(
        ("bit_generator",),
        lambda thing, comm: thing.bit_generator.state,
        lambda thing, state, comm: setattr(thing.bit_generator, "state", state),
        of_rank=True,
    ),
    "generator of PyTorch, or RandomState": StateProtocol(
        ("get_state", "set_state"),
        lambda thing, comm: thing.get_state(),
        lambda thing, state, comm: thing.set_state(state),
        of_rank=True,
    ),
    "generator of Python": StateProtocol(
        ("getstate", "setstate"),
        lambda thing, comm: _words_of(thing),
        lambda thing, state, comm: thing.setstate((state[0], tuple(state[1].tolist()), state[2])),
        of_rank=True,
    ),
}


def _words_of(generator: Any) -> Any:
    """Give the state of a generator of Python, its 625 words as one array."""
    version, words, gauss = generator.getstate()
    return version, np.array(words, np.uint32), gauss


def protocol_of(thing: Any) -> StateProtocol | None:
    """Say of which kind a thing is; None where it has no state of its own."""
    # Of the class: to ask a variable for its value may be a collective operation.
    owner = thing if isinstance(thing, ModuleType) else type(thing)
    return next(
        (kind for kind in KINDS.values() if all(hasattr(owner, name) for name in kind.methods)),
        None,
    )


def to_host(array: Any) -> Any:
    """Give an array in host memory: the same one where it is there already."""
    if isinstance(array, Slice):
        return Slice(to_host(array.array), array.start, array.shape)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach().cpu()
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):
        return array.get()
    return array


def library_of(array: Any) -> str:
    """Say what makes an array like this one from one of NumPy."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(array, jax.Array):
        return "jax"
    return "scalar" if isinstance(array, np.generic) else "numpy"


def from_host(array: Any, library: str) -> Any:
    """Give an array of a library, in host memory or where JAX puts it."""
    if library == "torch":
        import torch

        made = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
        into_tensor(made, array)
        return made
    if library == "jax":
        import jax.numpy

        return jax.numpy.asarray(array)
    if library not in ("numpy", "scalar"):
        raise ValueError(f"unknown library {library!r}")
    return array[()] if library == "scalar" else array


def beside(array: Any, live: Any) -> Any:
    """Give an array of NumPy as one of JAX, on the devices of another."""
    return sys.modules["jax"].device_put(array, live.sharding)


def into_tensor(tensor: Any, array: Any) -> None:
    """Copy an array of NumPy into a tensor of PyTorch, on whatever device."""
    torch = sys.modules["torch"]
    if array.dtype.name == "bfloat16":  # which PyTorch does not take from NumPy
        source = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        source = torch.from_numpy(array)
    with torch.no_grad():
        tensor.copy_(source)


def key_kind(array: Any) -> str | None:
    """Say how a random key of JAX is used; None for arrays of numbers."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        return None
    if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    return str(jax.random.key_impl(array))


def key_data(key: Any) -> Any:
    """Give the numbers of a random key of JAX."""
    return sys.modules["jax"].random.key_data(key)


def as_key(data: Any, kind: str) -> Any:
    """Make a random key of JAX of its numbers."""
    import jax

    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=kind)


def parts_of(thing: Any) -> list[Any] | None:
    """Give the parts of a list, a tuple, or a container that only JAX knows; None for others."""
    if isinstance(thing, (list, tuple)):
        return list(thing)
    parts = None if thing is None else pytree.flatten_registered(thing)
    return None if parts is None else parts[0]


def labels(container: Any) -> Callable[[int], Any]:
    """Say what the parts of a container are called: the fields of a named tuple, else numbers."""
    fields = getattr(container, "_fields", None)
    return (lambda index: index) if fields is None else (lambda index: fields[index])


def like(container: Any, parts: list[Any]) -> Any:
    """Give a container of the same kind with other parts."""
    if hasattr(container, "_fields"):
        return type(container)(*parts)
    if isinstance(container, (list, tuple)):
        return type(container)(parts)
    registered = pytree.flatten_registered(container)
    assert registered is not None
    return sys.modules["jax"].tree_util.tree_unflatten(registered[1], parts)
