"""Restoring: from checkpoint contents back to the program's objects.

What can be changed in place is: modules, optimizers, variables, arrays of NumPy and PyTorch. Of
anything else a new one is made, in the containers and the library of the old one. All is compared
before anything is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import collectives as cc
from strategies import errors
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.boxes import Slice
from strategies.checkpoint.distributed_tensors import PartialReads, dtensor_like, slice_of
from strategies.checkpoint.serialization import Arrays
from strategies.core import array_ops

__all__ = ["Put", "restore_into"]

Put = Callable[[], None]
"""Changes one thing."""


def restore_into(
    nodes: Mapping[str, Any],
    stored: Arrays,
    things: Mapping[str, Any],
    comm: cc.Communicator | None,
    parts: PartialReads,
    *,
    place: int | None = None,
) -> tuple[dict[str, Any], list[Put]]:
    """Compare what a checkpoint holds with the things that are to have it.

    Nothing has changed yet when this returns.

    Args:
        nodes: the JSON object of `serialize`.
        stored: the arrays, of which this rank has what `parts` says.
        things: the program's.
        comm: the ranks.
        parts: of the things.
        place: which rank's generators this one takes; those of its own number in `comm` if None.

    Returns:
        The new things, of which those that are changed in place are the old ones; and what has to
        be called to change them.

    Raises:
        NotFoundError: the checkpoint has nothing of that name.
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
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, errors.OpError):
                raise
            raise errors.DataLossError(
                f"restore: not what Saver has written: {type(error).__name__}: {error} "
                f"(name: {name})"
            ) from error
    return new, back.puts


class _Restorer:
    """One way back: `puts` are the changes that it will take."""

    def __init__(
        self, stored: Arrays, comm: cc.Communicator | None, parts: PartialReads, place: int
    ) -> None:
        self.puts: list[Put] = []
        self._parts = parts
        self._stored = stored
        self._comm = comm
        self._place = place

    def thing(self, node: Any, live: Any, name: str) -> Any:
        """Give what stands where `live` does, from what the file holds."""
        kind = kinds.protocol_of(live)
        if kind is not None:
            self._load(kind, node, live)
            return live
        if live is None:
            return self.value(node)
        if array_ops.is_array(live) or isinstance(live, Slice):
            return self._array(node, live, name)
        if _is_plain(node) and _is_plain_live(live):
            return self.value(node)
        if isinstance(live, Mapping):
            return self._mapping(node, live, name)
        parts = kinds.parts_of(live)
        if parts is None:
            raise _differs(name, type(live).__name__, _describe(node))
        ((tag, nodes),) = node.items() if isinstance(node, dict) else [("plain", [])]
        if tag not in ("list", "tuple") or len(nodes) != len(parts):
            raise _differs(name, f"{type(live).__name__} of {len(parts)}", _describe(node))
        label = kinds.labels(live)
        made = [
            self.thing(part, old, f"{name}/{label(index)}")
            for index, (part, old) in enumerate(zip(nodes, parts, strict=True))
        ]
        return kinds.like(live, made)

    def value(self, node: Any) -> Any:
        """Give what a node stands for, where nothing says how it should look."""
        if not isinstance(node, dict):
            return node
        ((tag, content),) = node.items()
        if tag == "dict":
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
        # What else belongs to a parameter, such as the number of its updates, is whole.
        return made if part is None or made.shape != part.array.shape else dtensor_like(there, made)

    def _load(self, kind: kinds.StateProtocol, node: Any, live: Any) -> None:
        if (node := self._of_rank(node)) is None:
            return
        state = self.value(node)
        if kind.methods[0] == "state_dict":
            state = _with_counters(state, live.state_dict())
        self.puts.append(lambda: kind.load(live, state, self._comm))

    def _of_rank(self, node: Any) -> Any:
        """Give this rank's node where there is one for each; None if this rank was not there.

        Such a rank keeps the state that its program gave it.
        """
        if not isinstance(node, dict) or "ranks" not in node:
            return node
        nodes = node["ranks"]
        return nodes[self._place] if self._place < len(nodes) else None

    def _mapping(self, node: Any, live: Mapping[Any, Any], name: str) -> Any:
        if not isinstance(node, dict) or "dict" not in node:
            raise _differs(name, "a dict", _describe(node))
        nodes = {self.value(key): value for key, value in node["dict"]}
        if nodes.keys() != live.keys():
            raise _differs(name, f"keys {list(live)}", f"keys {list(nodes)}")
        made = {key: self.thing(nodes[key], old, f"{name}/{key}") for key, old in live.items()}
        return made if isinstance(live, dict) else type(live)(made)  # type: ignore[call-arg]

    def _array(self, node: Any, live: Any, name: str) -> Any:
        """Give `live`, to be changed in place, or a new array like it."""
        kind = kinds.key_kind(live)
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
            self._array(node, part.array, name)
            return live
        here = (tuple(live.shape), array_ops.dtype_name(live))
        there = (array.shape, array_ops.dtype_name(array))
        if here != there:
            raise _differs(name, "{} of {}".format(*here), "{} of {}".format(*there))
        library = kinds.library_of(live)
        if library == "torch":
            self.puts.append(lambda: kinds.into_tensor(live, array))
            return live
        if library == "jax":
            return kinds.beside(array, live)
        if library == "scalar" or not getattr(getattr(live, "flags", None), "writeable", True):
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
    """Say what a node stands for, without its content."""
    if not isinstance(node, dict):
        return type(node).__name__
    ((tag, content),) = node.items()
    if tag == "dict":
        return f"dict with keys {[key for key, _ in content]}"
    return f"{tag} of {len(content)}" if tag in ("list", "tuple") else str(tag)


def _is_plain(node: Any) -> bool:
    """Whether no array stands below this node."""
    if isinstance(node, list):
        return all(map(_is_plain, node))
    if isinstance(node, dict):
        return not node.keys() & {"array", "key", "ranks"} and all(map(_is_plain, node.values()))
    return True


def _is_plain_live(live: Any) -> bool:
    """Whether there are only numbers and text in it, and containers without names of their own."""
    if type(live) is dict:
        return all(map(_is_plain_live, live.values()))
    if type(live) in (list, tuple):
        return all(map(_is_plain_live, live))
    return live is None or isinstance(live, (bool, int, float, str, bytes))


def _with_counters(state: Any, live: Any) -> Any:
    """Give a state dict in which there are counters where the thing itself has them."""
    if not isinstance(state, dict) or not isinstance(live, Mapping):
        return state
    made = {key: _with_counters(value, live.get(key)) for key, value in state.items()}
    return Counter(made) if isinstance(live, Counter) else made
