"""Protocols of objects that can be saved.

Objects with state, such as modules, optimizers and generators, return and restore it by their own
methods (`KINDS`). Arrays belong to a library. Containers are those of Python and those registered
with JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from collectives import extend
from strategies.checkpoint.boxes import Slice

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
    "library_of",
]


class StateProtocol(NamedTuple):
    """How objects of one kind return and restore their state.

    Attributes:
        methods: names of the methods that identify the kind.
        state: called with the object and the ranks; *collective*. Returns a structure of arrays and
            plain values.
        load: called with the object, its state and the ranks.
        of_rank: whether the state differs between ranks.
    """

    methods: tuple[str, ...]
    state: Callable[[Any, cc.Communicator | None], Any]
    load: Callable[[Any, Any, cc.Communicator | None], Any]
    of_rank: bool = False


KINDS = {
    # Before `state_dict`, because an input may also have one, which covers its own rank only.
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
        # All ranks share the variable, so rank 0 assigns it. The ranks synchronize afterwards.
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
    """Return the state of a Python generator, with its 625 words as one array."""
    version, words, gauss = generator.getstate()
    return version, np.array(words, np.uint32), gauss


def protocol_of(thing: Any) -> StateProtocol | None:
    """Return the protocol of an object; None if it has no state of its own."""
    # Look at the class, because `value` of a variable may be a collective operation.
    # The module `random` is a generator itself.
    owner = thing if isinstance(thing, ModuleType) else type(thing)
    return next(
        (kind for kind in KINDS.values() if all(hasattr(owner, name) for name in kind.methods)),
        None,
    )


def to_host(array: Any) -> Any:
    """Return an array in host memory, the same object if it is there already."""
    if isinstance(array, Slice):
        return Slice(to_host(array.array), array.start, array.shape)
    # By `sys.modules`: a program without PyTorch must not import it for a check.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach().cpu()
    # CuPy: other arrays with this interface have no `get`.
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):
        return array.get()
    return array


def library_of(array: Any) -> str:
    """Return the library that `from_host` needs to make an array like this one."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(array, jax.Array):
        return "jax"
    return "scalar" if isinstance(array, np.generic) else "numpy"


def from_host(array: Any, library: str) -> Any:
    """Return a NumPy array as an array of a library, in host memory or on JAX's default device."""
    if library == "torch":
        import torch

        # Not `torch.from_numpy`, which shares the caller's memory and lacks bfloat16.
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
    """Return a NumPy array as an array of JAX, with the sharding of `live`."""
    return sys.modules["jax"].device_put(array, live.sharding)


def into_tensor(tensor: Any, array: Any) -> None:
    """Copy a NumPy array into a PyTorch tensor on any device."""
    with sys.modules["torch"].no_grad():
        tensor.copy_(extend.as_tensor(array))


# JAX's implementations of random keys.
_KEY_KINDS = ("threefry2x32", "rbg", "unsafe_rbg")


def key_kind(array: Any) -> str | None:
    """Return the implementation of a random key of JAX; None for other arrays."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        return None
    # A key of the old style is a plain uint32 array, and is stored as one.
    if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    kind = jax.random.key_impl(array)
    if isinstance(kind, str):
        return kind
    # JAX 0.4.35 returns an object without a public name.
    known = ((name, jax.random.key(0, impl=name)) for name in _KEY_KINDS)
    return next(name for name, key in known if jax.random.key_impl(key) == kind)


def key_data(key: Any) -> Any:
    """Return the numbers of a random key of JAX."""
    return sys.modules["jax"].random.key_data(key)


def as_key(data: Any, kind: str) -> Any:
    """Return a random key of JAX with these numbers."""
    import jax

    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=kind)
