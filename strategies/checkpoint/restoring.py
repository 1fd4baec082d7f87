"""Restoring: from checkpoint contents back to the program's objects.

Modules, optimizers, variables and arrays of NumPy and PyTorch are changed in place. Other objects
are replaced by new ones, in the containers and the library of the old ones. Everything is compared
before anything is changed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import collectives as cc
from strategies import errors
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.boxes import Slice
from strategies.checkpoint.distributed_tensors import PartialReads, dtensor_like, slice_of
from strategies.checkpoint.per_rank import PerRank
from strategies.checkpoint.serialization import Arrays
from strategies.core import array_ops, pytree

__all__ = ["Put", "restore_into"]

Put = Callable[[], None]
"""Changes one object."""


def restore_into(
    nodes: Mapping[str, Any],
    stored: Arrays,
    things: Mapping[str, Any],
    comm: cc.Communicator | None,
    parts: PartialReads,
    *,
    place: int | None = None,
) -> tuple[dict[str, Any], list[Put]]:
    """Compare the contents of a checkpoint with the objects to restore.

    Nothing has changed yet when this returns.

    Args:
        nodes: the JSON object of `serialize`.
        stored: the arrays; those in `parts` only in this rank's part.
        things: name -> object of the program.
        comm: the ranks.
        parts: the objects that this rank reads in part.
        place: rank whose generators this rank takes; None for its own number in `comm`.

    Returns:
        The new objects, among which are the old ones that are changed in place; and the functions
        that change them.

    Raises:
        NotFoundError: the checkpoint does not contain a name.
        InvalidArgumentError: containers, shapes or dtypes differ.
        DataLossError: the JSON object is not one of `serialize`.
    """
    if place is None:
        place = 0 if comm is None else comm.rank
    back = _Restorer(stored, comm, parts, place)
    new = {}
    for name, thing in things.items():
        if name not in nodes:
            raise errors.NotFoundError(
                f"restore: the checkpoint does not hold {name!r}, got {', '.join(nodes) or 'none'}"
            )
        try:
            new[name] = back.thing(nodes[name], thing, name)
        # These errors mean nodes of a wrong form: the JSON is damaged or from another program.
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            # `InvalidArgumentError` is also a `ValueError`.
            if isinstance(error, errors.OpError):
                raise
            raise errors.DataLossError(
                f"restore: damaged contents of a Saver checkpoint: {type(error).__name__}: {error} "
                f"(name: {name})"
            ) from error
    return new, back.puts


class _Restorer:
    """One restore: `puts` collects the functions that change objects in place."""

    def __init__(
        self, stored: Arrays, comm: cc.Communicator | None, parts: PartialReads, place: int
    ) -> None:
        self.puts: list[Put] = []
        self._parts = parts
        self._stored = stored
        self._comm = comm
        self._place = place

    def thing(self, node: Any, live: Any, name: str) -> Any:
        """Return the restored object for `live`: itself if changed in place, or a new one."""
        if isinstance(live, PerRank):
            own = self._of_rank(node)
            return live if own is None else PerRank(self.thing(own, live.thing, name))
        if name in self._parts.restores:
            self._load_remotely(node, name)
            return live
        kind = kinds.protocol_of(live)
        if kind is not None:
            self._load(kind, node, live)
            return live
        if live is None:
            # None is a placeholder, such as for an input that does not exist yet.
            return self.value(node)
        if array_ops.is_array(live) or isinstance(live, Slice):
            return self._array(node, live, name)
        # Numbers and texts without arrays may change their form freely between save and restore.
        if _is_plain(node) and _is_plain_live(live):
            return self.value(node)
        if isinstance(live, Mapping):
            return self._mapping(node, live, name)
        parts = pytree.children_of(live)
        if parts is None:
            raise _differs(name, type(live).__name__, _describe(node))
        # A node has one tag. A list that became a plain value is not a node.
        ((tag, nodes),) = node.items() if isinstance(node, dict) else [("plain", [])]
        if tag not in ("list", "tuple") or len(nodes) != len(parts):
            raise _differs(name, f"{type(live).__name__} of {len(parts)}", _describe(node))
        label = pytree.child_labels(live)
        made = [
            self.thing(part, old, f"{name}/{label(index)}")
            for index, (part, old) in enumerate(zip(nodes, parts, strict=True))
        ]
        return pytree.with_children(live, made)

    def value(self, node: Any) -> Any:
        """Return the value of a node when the program has no object to compare with."""
        if not isinstance(node, dict):
            return node
        ((tag, content),) = node.items()
        if tag == "dict":
            # Keys are nodes as well, because JSON has only texts as keys.
            return {self.value(key): self.value(value) for key, value in content}
        if tag in ("list", "tuple"):
            made = [self.value(part) for part in content]
            return made if tag == "list" else tuple(made)
        if tag == "array":
            return self._new_array(*content)
        if tag == "key":
            return kinds.as_key(self._name(content[0]), content[1])
        if tag == "float":
            return float(content)
        if tag == "bytes":
            return bytes.fromhex(content)
        raise ValueError(f"unknown tag {tag!r}")

    def _new_array(self, name: str, library: str) -> Any:
        made = kinds.from_host(self._name(name), library)
        there = self._parts.of(name)
        part = None if there is None or isinstance(there, Slice) else slice_of(there)
        # Other state of a parameter, such as its number of updates, is whole.
        return made if part is None or made.shape != part.array.shape else dtensor_like(there, made)

    def _load(self, kind: kinds.StateProtocol, node: Any, live: Any) -> None:
        if (node := self._of_rank(node)) is None:
            return
        state = self.value(node)
        nested = isinstance(state, dict) and any(isinstance(x, dict) for x in state.values())
        # The file stores a Counter, such as that of MultiStepLR, as a dict. A flat state lacks
        # dicts, and may be as large as that of variables on ps tasks.
        if kind.methods[0] == "state_dict" and nested:
            state = _with_counters(state, live.state_dict())
        # Only collected here: `Saver.restore` runs all of them after every rank has compared.
        self.puts.append(lambda: kind.load(live, state, self._comm))

    def _load_remotely(self, node: Any, name: str) -> None:
        pairs = node.get("dict") if isinstance(node, dict) else None
        if pairs is None or not all(isinstance(x, dict) and "array" in x for _, x in pairs):
            raise _differs(name, "a dict of arrays", _describe(node))
        restore = self._parts.restores[name]
        self._parts.chosen.append((restore, {key: x["array"][0] for key, x in pairs}))
        self.puts.append(restore.load)

    def _of_rank(self, node: Any) -> Any:
        """Return this rank's node if there is one per rank; None if the save had fewer ranks.

        A rank without a node keeps the state of its program.
        """
        if not isinstance(node, dict) or "ranks" not in node:
            return node
        nodes = node["ranks"]
        return nodes[self._place] if self._place < len(nodes) else None

    def _mapping(self, node: Any, live: Mapping[Any, Any], name: str) -> Any:
        if not isinstance(node, dict) or "dict" not in node:
            raise _differs(name, "a dict", _describe(node))
        # Compared without order: dicts of Python and of JAX may list their keys differently.
        nodes = {self.value(key): value for key, value in node["dict"]}
        if nodes.keys() != live.keys():
            raise _differs(name, f"keys {list(live)}", f"keys {list(nodes)}")
        made = {key: self.thing(nodes[key], old, f"{name}/{key}") for key, old in live.items()}
        if not isinstance(live, dict):
            # `FrozenDict` of Flax, for example, is made from a dict.
            return type(live)(made)  # type: ignore[call-arg]
        # A copy keeps what a subclass adds, such as the factory of a `defaultdict`.
        like = copy.copy(live)
        # Not `update`, which adds the numbers of a `Counter`.
        for key, value in made.items():
            like[key] = value
        return like

    def _array(self, node: Any, live: Any, name: str) -> Any:
        """Return `live`, to be changed in place, or a new array like it."""
        kind = kinds.key_kind(live)
        # A rank that the save lacked keeps its key, as it keeps its generators.
        if kind is not None and (node := self._of_rank(node)) is None:
            return live
        if kind is not None or (isinstance(node, dict) and "key" in node):
            if not isinstance(node, dict) or node.get("key", [0, 0])[1] != kind:
                raise _differs(name, f"a random key of kind {kind}", _describe(node))
            return self.value(node)
        if not isinstance(node, dict) or "array" not in node:
            raise _differs(name, "an array", _describe(node))
        array = self._name(node["array"][0])
        part = slice_of(live)
        if part is not None:
            made = self._array(node, part.array, name)
            # A part that changes in place stays in its slice or distributed tensor.
            return live if made is part.array else Slice(made, part.start, part.shape)
        here = (tuple(live.shape), array_ops.dtype_name(live))
        # By name, because NumPy has no dtype object for PyTorch's dtypes.
        there = (array.shape, array_ops.dtype_name(array))
        if here != there:
            raise _differs(name, "{} of {}".format(*here), "{} of {}".format(*there))
        library = kinds.library_of(live)
        if library == "torch":
            self.puts.append(lambda: kinds.into_tensor(live, array))
            return live
        if library == "jax":
            # JAX arrays are immutable, so the result is a new one with the same sharding.
            return kinds.beside(array, live)
        if library == "scalar" or not getattr(getattr(live, "flags", None), "writeable", True):
            # These cannot change in place.
            return kinds.from_host(array, library)

        def put() -> None:
            live[...] = array_ops.on_same_device(live, array)

        self.puts.append(put)
        return live

    def _name(self, name: str) -> Any:
        return self._stored[name]


def _differs(name: str, expected: str, got: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"restore: checkpoint and program differ, expected {expected}, got {got} (name: {name})"
    )


def _describe(node: Any) -> str:
    """Return the kind of a node as text, without its content."""
    if not isinstance(node, dict):
        return type(node).__name__
    ((tag, content),) = node.items()
    if tag == "dict":
        return f"dict with keys {[key for key, _ in content]}"
    return f"{tag} of {len(content)}" if tag in ("list", "tuple") else str(tag)


def _is_plain(node: Any) -> bool:
    """Return whether the tree below this node has no array."""
    if isinstance(node, list):
        return all(map(_is_plain, node))
    if isinstance(node, dict):
        return not node.keys() & {"array", "key", "ranks"} and all(map(_is_plain, node.values()))
    return True


def _is_plain_live(live: Any) -> bool:
    """Return whether an object consists of numbers, text and plain dicts, lists and tuples."""
    if type(live) is dict:
        return all(map(_is_plain_live, live.values()))
    if type(live) in (list, tuple):
        return all(map(_is_plain_live, live))
    return live is None or isinstance(live, (bool, int, float, str, bytes))


# A dict would lack `elements`, which `MultiStepLR` calls.
def _with_counters(state: Any, live: Any) -> Any:
    """Return a state dict with a `Counter` wherever the object's own state dict has one."""
    if not isinstance(state, dict) or not isinstance(live, Mapping):
        return state
    made = {key: _with_counters(value, live.get(key)) for key, value in state.items()}
    return Counter(made) if isinstance(live, Counter) else made
