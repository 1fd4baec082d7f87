"""Serialization of a program's objects: named arrays, and the rest as JSON.

Nothing is pickled. Objects with state, such as modules, optimizers and generators, return it by
their own methods (`state_protocols`). Containers are traversed, and arrays are named by their path,
`optimizer/state/0/momentum_buffer`. All else becomes JSON. Values that JSON cannot represent become
an object with one key::

    {"dict": [[key, node], ...]}       {"list": [node, ...]}        {"tuple": [node, ...]}
    {"array": [name, library]}         {"key": [name, kind]}        a random key of JAX
    {"float": "nan"}                   {"bytes": "00ff"}            {"ranks": [node, ...]}

The last is a generator, key or `PerRank` whose state differs between ranks: one node per rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import collectives as cc
from strategies import errors
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.boxes import Slice
from strategies.checkpoint.distributed_tensors import slice_of
from strategies.checkpoint.per_rank import PerRank
from strategies.checkpoint.remote_state import RemoteTensor
from strategies.core import array_ops, pytree

__all__ = ["Arrays", "serialize"]

Arrays = dict[str, Any]
"""Name -> array of any library, this rank's `Slice` of a larger one, or a `RemoteTensor`."""


def serialize(things: Mapping[str, Any], comm: cc.Communicator | None) -> tuple[Arrays, Any]:
    """Return the contents of a checkpoint: arrays by name, and a JSON object.

    *Collective*.

    Returns:
        Arrays, which may share memory with the objects and may be on a device; and the JSON object.

    Raises:
        InvalidArgumentError: an object cannot be stored, or two arrays have the same name.
    """
    found: Arrays = {}
    nodes = {name: _encode(thing, name, found, comm) for name, thing in things.items()}
    return found, nodes


def _encode(thing: Any, name: str, found: Arrays, comm: cc.Communicator | None) -> Any:
    """Add the arrays of an object to `found`, and return the rest as JSON."""
    kind = kinds.protocol_of(thing)
    # A generator first: its state is compared among the ranks instead of written by rank 0 alone.
    if kind is not None and kind.of_rank:
        return _node_of_ranks(kind.state(thing, comm), name, found, comm)
    if kinds.key_kind(thing) is not None:
        return _node_of_ranks(thing, name, found, comm)
    if isinstance(thing, PerRank):
        return _node_of_ranks(thing.thing, name, found, comm)
    if kind is not None:
        return _encode(kind.state(thing, comm), name, found, comm)
    if array_ops.is_array(thing) or isinstance(thing, (Slice, RemoteTensor)):
        return _node_of_array(thing, name, found)
    if isinstance(thing, Mapping):
        pairs = [
            [_encode_key(key, name), _encode(value, f"{name}/{key}", found, comm)]
            for key, value in thing.items()
        ]
        return {"dict": pairs}
    if (parts := pytree.children_of(thing)) is not None:
        label = pytree.child_labels(thing)
        nodes = [
            _encode(part, f"{name}/{label(index)}", found, comm) for index, part in enumerate(parts)
        ]
        # A container of JAX becomes a tuple: `like` recreates its class from the live object.
        return {"list" if isinstance(thing, list) else "tuple": nodes}
    return _plain(thing, name)


def _encode_key(key: Any, name: str) -> Any:
    # The number has the hash of its NumPy scalar, which would be an array of the file.
    plain = pytree.map_leaves(lambda x: x.item() if isinstance(x, np.generic) else x, key)
    arrays: Arrays = {}
    node = _encode(plain, name, arrays, None)
    if arrays:
        raise errors.InvalidArgumentError(
            f"save: unsupported key, expected a number, text or a tuple of these, got "
            f"{type(key).__name__} (name: {name})"
        )
    return node


def _plain(thing: Any, name: str) -> Any:
    # JSON has no NaN and no infinity; `str` returns "nan", "inf" or "-inf".
    if isinstance(thing, float) and not math.isfinite(thing):
        return {"float": str(float(thing))}
    if isinstance(thing, bytes):
        return {"bytes": thing.hex()}
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    methods = " or ".join("/".join(kind.methods) for kind in kinds.KINDS.values())
    raise errors.InvalidArgumentError(
        f"save: unsupported object, expected arrays, numbers, text, containers of "
        f"these, or something with {methods}, got {type(thing).__name__} (name: {name})"
    )


def _node_of_array(array: Any, name: str, found: Arrays) -> Any:
    if name in found:
        raise errors.InvalidArgumentError(
            f"save: two arrays have the same name, expected one (name: {name})"
        )
    # Typed keys have an opaque dtype; only their numbers fit in a file.
    kind = kinds.key_kind(array)
    if kind is not None:
        found[name] = kinds.key_data(array)
        return {"key": [name, kind]}
    try:
        part = slice_of(array)
    except TypeError as error:
        raise errors.InvalidArgumentError(f"save: {error} (name: {name})") from error
    found[name] = array if part is None else part
    return {"array": [name, kinds.library_of(array if part is None else part.array)]}


def _node_of_ranks(state: Any, name: str, found: Arrays, comm: cc.Communicator | None) -> Any:
    """Return one node if all ranks have the same state, otherwise one node per rank."""
    mine: Arrays = {}
    if kinds.key_kind(state) is not None:
        node = _node_of_array(state, name, mine)
    else:
        # Without communicator: the state of one generator must not start another collective call.
        node = _encode(state, name, mine, None)
    if comm is None or comm.size == 1:
        found |= mine
        return node
    # Pickled in the all-gather below, so the arrays must be NumPy's in host memory.
    mine = {place: np.asarray(kinds.to_host(array)) for place, array in mine.items()}
    every = comm.allgather_object((node, mine))
    # Replicated generators have equal states, which are stored once.
    if all(_same(other, every[0]) for other in every):
        found |= every[0][1]
        return node
    nodes = []
    # One node per rank; arrays get the rank in their names, because names are unique in a file.
    for rank, (node, theirs) in enumerate(every):
        nodes.append(_rename(node, name, f"{name}/rank-{rank}"))
        found |= {f"{name}/rank-{rank}{place[len(name) :]}": x for place, x in theirs.items()}
    return {"ranks": nodes}


def _same(one: tuple[Any, Arrays], other: tuple[Any, Arrays]) -> bool:
    # The nodes list the names of their arrays, so comparing the nodes compares the sets of names.
    same = all(np.array_equal(one[1][name], other[1][name]) for name in one[1] if name in other[1])
    return same and one[0] == other[0]


def _rename(node: Any, old: str, new: str) -> Any:
    """Return a node with the prefix `old` of its arrays' names replaced by `new`."""
    if isinstance(node, list):
        return [_rename(part, old, new) for part in node]
    if not isinstance(node, dict):
        return node
    for tag in node.keys() & {"array", "key"}:
        place, what = node[tag]
        return {tag: [new + place[len(old) :], what]}
    return {tag: _rename(part, old, new) for tag, part in node.items()}
