"""Python objects, by pickle."""

from __future__ import annotations

import itertools
import pickle
from typing import Any, TypeVar

import numpy as np

from collectives.arrays.host import Array
from collectives.operations import compare, joins
from collectives.operations import plan as plans
from collectives.operations.call import Call, enter
from collectives.operations.group import Group

__all__ = ["allgather_object", "broadcast_object", "from_root", "pickled", "unpickled"]

T = TypeVar("T")

_HEAD_BYTES = compare.CARRIED_BYTES


def broadcast_object(group: Group, obj: T, root: int = 0, *, timeout: float | None = None) -> T:
    """Give every rank a copy of the root's Python object, by pickle.

    Pickle runs code of its choice when it is read: use this among ranks of one job only, never for
    data that came from elsewhere.

    Returns:
        `obj` itself on the root, a copy elsewhere.
    """
    with enter(group, "broadcast_object", timeout) as call:
        call.check_root(root)
        call.describe(root=root)
        copy: T = from_root(call, obj, root)
    return copy


def allgather_object(group: Group, obj: T, *, timeout: float | None = None) -> list[T]:
    """Give every rank the Python objects of all ranks, in rank order, by pickle.

    See `broadcast_object` about pickle.
    """
    with enter(group, "allgather_object", timeout) as call:
        data = pickled(obj)
        call.describe()  # step 4 of docs/how-a-call-goes.md
        joined, lengths, _ = joins.allgather(call, data)
    parts = zip(itertools.accumulate(lengths), lengths, strict=True)
    return [unpickled(joined[end - length : end]) for end, length in parts]


def from_root(call: Call, obj: Any, root: int) -> Any:
    """Return the root's object, by pickle; itself on the root. Part of a call that is described."""
    own = call.group.rank == root
    data = pickled(obj) if own else np.empty(0, np.uint8)
    # The length, and as much of the object as travels with it.
    head = np.zeros(_HEAD_BYTES, np.uint8)
    length, begin = head[:8].view(np.int64), head[8:]
    if own:
        length[0] = data.size
        begin[: data.size] = data[: begin.size]
    plans.broadcast(call, head, root).first(call, head, head)
    if length[0] <= begin.size:
        data = begin[: length[0]]
    else:
        if not own:
            data = np.empty(length[0], np.uint8)
        plans.broadcast_part(call, data, root)
    return obj if own else unpickled(data)


def pickled(obj: object) -> Array:
    """Return an object as bytes: shape (n,), uint8."""
    return np.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), np.uint8)


def unpickled(data: Array) -> Any:
    """Return the object that such bytes are."""
    return pickle.loads(data.data)
