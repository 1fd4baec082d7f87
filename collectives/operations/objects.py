"""Operations on Python objects, by pickle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from collectives.calls import pickling, signature_check
from collectives.calls.call import Call, begin_call
from collectives.calls.group import Group
from collectives.operations import gather_moves
from collectives.plans import planner as plans

__all__ = [
    "allgather_object",
    "broadcast_object",
    "from_root",
    "gather_object",
    "scatter_object",
]

T = TypeVar("T")

# The payload of one eager message, so that a small object needs no message beside the comparison.
_HEAD_BYTES = signature_check.MAX_PAYLOAD_BYTES


def broadcast_object(group: Group, obj: T, root: int = 0, *, timeout: float | None = None) -> T:
    """Copy the root's Python object to all ranks, by pickle.

    Unpickling can run arbitrary code. Use this function only between ranks of one job, never for
    data from other sources.

    Returns:
        `obj` itself on the root, a copy elsewhere.
    """
    with begin_call(group, "broadcast_object", timeout) as call:
        call.check_root(root)
        call.describe(root=root)
        copy: T = from_root(call, obj, root)
    return copy


def allgather_object(group: Group, obj: T, *, timeout: float | None = None) -> list[T]:
    """Return the Python objects of all ranks on every rank, in rank order, by pickle.

    See `broadcast_object` about pickle.
    """
    with begin_call(group, "allgather_object", timeout) as call:
        # Before the comparison, so that an object without a pickle is a refusal of this rank.
        data = pickling.dumps(obj)
        call.describe()  # step 4 of docs/how-a-call-goes.md
        # As an array of bytes: its length is the number of rows.
        joined, lengths, _ = gather_moves.allgather(call, data)
    # Unpickled after the call, because `__setstate__` of the program may make calls.
    parts = zip(itertools.accumulate(lengths), lengths, strict=True)
    return [pickling.loads(joined[end - length : end]) for end, length in parts]


def gather_object(
    group: Group, obj: T, root: int = 0, *, timeout: float | None = None
) -> list[T] | None:
    """Return the Python objects of all ranks on the root, in rank order, by pickle.

    See `broadcast_object` about pickle.

    Returns:
        On the root a list with a copy of every rank's object, elsewhere None.

    Raises:
        ValueError: the root is not a rank.
    """
    with begin_call(group, "gather_object", timeout) as call:
        data = pickling.dumps(obj)
        call.check_root(root)
        call.describe(root=root)  # step 4 of docs/how-a-call-goes.md
        joined, lengths, _ = gather_moves.gather(call, data, root)  # step 6
    if joined is None:
        return None
    parts = zip(itertools.accumulate(lengths), lengths, strict=True)
    return [pickling.loads(joined[end - length : end]) for end, length in parts]


def scatter_object(
    group: Group, objs: Sequence[T] | None, root: int = 0, *, timeout: float | None = None
) -> T:
    """Send every rank one of the root's Python objects, by pickle.

    See `broadcast_object` about pickle.

    Args:
        objs: on the root, an object for every rank, in rank order; ignored elsewhere.
        root: rank whose objects are sent.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        This rank's object: the original on the root, a copy elsewhere.

    Raises:
        ValueError: the root is not a rank; on the root, the number of objects is not the number of
            ranks.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> names = [f"part-{rank}" for rank in range(comm.size)] if comm.rank == 0 else None
        >>> comm.scatter_object(names) == f"part-{comm.rank}"
        True
    """
    with begin_call(group, "scatter_object", timeout) as call:
        call.check_root(root)
        own = group.rank == root
        if own and (objs is None or len(objs) != group.size):
            raise ValueError(
                f"scatter_object: expected an object for each of {group.size} ranks, got "
                f"{None if objs is None else len(objs)}"
            )
        # Before the comparison, as in `allgather_object`.
        parts = [pickling.dumps(obj) for obj in objs or ()] if own else []
        call.describe(root=root)  # step 4 of docs/how-a-call-goes.md
        lengths = from_root(call, [part.size for part in parts], root)  # step 6
        # One array of all pickles, scattered by their lengths.
        send = np.concatenate(parts) if own else None
        received = gather_moves.scatter(call, send, lengths, (), np.dtype(np.uint8), root)
    return objs[root] if own and objs is not None else cast(T, pickling.loads(received))


def from_root(call: Call, obj: Any, root: int) -> Any:
    """Return the root's object in a described call, by pickle; the original on the root."""
    own = call.group.rank == root
    data = pickling.dumps(obj) if own else np.empty(0, np.uint8)
    # The length, and the beginning of the object: a small object needs no second broadcast.
    head = np.zeros(_HEAD_BYTES, np.uint8)
    length, begin = head[:8].view(np.int64), head[8:]
    if own:
        length[0] = data.size
        begin[: data.size] = data[: begin.size]
    plans.broadcast(call, head, root).first(call, head, head)
    # The length is equal on all ranks, so all take the same branch.
    if length[0] <= begin.size:
        data = begin[: length[0]]
    else:
        if not own:
            data = np.empty(length[0], np.uint8)
        plans.broadcast_chunk(call, data, root)
    return obj if own else pickling.loads(data)
