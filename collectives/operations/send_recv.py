"""Arrays from one rank to another.

An array is announced by a head of fixed length, in which a small one travels along:

::

    head     [ magic | dimensions | dtype | shape | elements, if they fit ]
    payload  [ elements ]

Both go on a *lane*: messages that never meet those of the operations of all ranks, so that a rank
may send before such an operation what another one receives after it.

`send` copies, and does not wait for the other side. So two ranks may send to each other before they
receive, and a stage of a pipeline goes on with its next part.
"""

from __future__ import annotations

import logging
import math
import operator
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

import numpy as np

from collectives.arrays import host
from collectives.arrays.host import Array
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.operations.group import Group
from collectives.operations.signatures import A
from collectives.transport.transport import Deadline, Message, Transport

__all__ = ["PointToPoint", "recv", "send"]

log = logging.getLogger(__name__)

_MAGIC = 0xA11A
_HEAD = struct.Struct("<HHxxxx16s")  # magic, number of dimensions, name of the dtype

# What the other rank is called in each operation.
_PEER = {"send": "dest", "recv": "source"}

# Every head has this length, since the receiver must know it: room for 64 dimensions and nearly
# 500 bytes of elements, which costs a message of its own where they do not fit.
_HEAD_BYTES = 1024

# A rank may be so many bytes ahead of one that does not receive, and one array of any size; then
# `send` waits. Enough for the parts in flight of a pipeline, little enough for a laptop.
AHEAD_BYTES = 1 << 28

# Sent buffers kept for the next arrays: fresh memory costs more than the copy into it.
_KEPT_BUFFERS = 4

# Seconds that `close` waits for ranks that have not received yet what was sent to them.
_DRAIN = 5.0


def send(group: Group, x: Any, dest: int, *, timeout: float | None = None) -> None:
    """Send an array to another rank, which calls `recv`.

    Returns at once, and `x` may change: what the other rank has not received is kept in a copy.
    Only when 256 MiB are on their way to `dest` this waits until it receives. Arrays arrive in the
    order in which they were sent.

    Args:
        x: shape (...), as for `allreduce`.
        dest: another rank.
        timeout: seconds within which `dest` has to receive it. The next `send` or `recv` of this
            rank finds out.

    Raises:
        ValueError: no such rank, or this one.
        TypeError: the elements cannot be read, or are not numbers.
        CollectiveTimeout: an array that was sent before has not been received in its time.
        PeerFailure: a rank is dead.

    Cost: one message up to about 500 bytes, else two; one copy of S bytes.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> if comm.rank > 0:
        ...     comm.send([1.0, 2.0], 0)
        >>> parts = [comm.recv(source) for source in range(1, comm.size) if comm.rank == 0]
    """
    direct = group.kept(PointToPoint)
    with direct.enter("send", dest, timeout) as deadline:
        direct.send(host.borrow(x, operation="send").host, dest, deadline)


@overload
def recv(group: Group, source: int, *, out: None = None, timeout: float | None = None) -> Array: ...
@overload
def recv(group: Group, source: int, *, out: A, timeout: float | None = None) -> A: ...
def recv(group: Group, source: int, *, out: Any = None, timeout: float | None = None) -> Any:
    """Receive the next array that another rank sends to this one.

    Args:
        source: another rank.
        out: where to put it: a NumPy array or torch tensor of the shape and dtype that was sent.
        timeout: seconds.

    Returns:
        `out`, or a new NumPy array of the shape and dtype that was sent.

    Raises:
        ValueError: no such rank, or this one; or `out` has another shape: the array is lost.
        TypeError: `out` has another dtype: the array is lost.
        CollectiveTimeout: nothing came in time.
        PeerFailure: a rank is dead.
    """
    direct = group.kept(PointToPoint)
    with direct.enter("recv", source, timeout) as deadline:
        return direct.recv(source, out, deadline)


class _Sent(NamedTuple):
    """A head or payload on its way."""

    message: Message
    memory: Array
    dest: int
    deadline: Deadline


class _Awaited(NamedTuple):
    """A head that has not come, of an array of which nothing else is known."""

    message: Message
    ranks: Transport
    source: int

    def done(self) -> bool:
        return self.message.done()

    def describe(self) -> str:
        return f"{self.ranks.name([self.source])} to send an array"

    @property
    def peers(self) -> Sequence[int]:
        return (self.source,)


class PointToPoint:
    """What the `send` and `recv` of one group share."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lane: Transport | None = None
        self._sent: list[_Sent] = []  # not known to have arrived
        self._halfway = False  # of an array, a part was sent or received, or is being received
        self._spare: list[Array] = []

    @contextmanager
    def enter(self, operation: str, peer: int, timeout: float | None) -> Iterator[Deadline]:
        """Check the arguments, look after what was sent before, and note how the call ends."""
        group = self._group
        group.check_usable(operation)
        limit = group.settings.timeout if timeout is None else timeout
        self._check(operation, peer, limit)
        # Only two ranks make this call, so it gets no number of its own.
        record = group.begin(operation)
        record.fields = {_PEER[operation]: peer}
        failure: BaseException | None = None
        try:
            self._forget(operation)
            for sent in self._sent:
                sent.deadline.check(group.transport, [sent.message])
            yield Deadline(operation, limit, group.settings.stall_warning)
        except BaseException as error:
            failure = error
            own = isinstance(error, Exception) and not isinstance(error, CollectiveError)
            if self._halfway or not own:
                group.failed(operation, error)
            raise
        finally:
            group.end(record, failure)

    def send(self, array: Array, dest: int, deadline: Deadline) -> None:
        """Start sending a copy of an array."""
        while behind := [sent for sent in self._sent if sent.dest == dest]:
            if sum(sent.memory.nbytes for sent in behind) <= AHEAD_BYTES:
                break
            self._open().wait([behind[0].message], deadline)
            self._forget(deadline.operation)
        head = np.empty(_HEAD_BYTES, np.uint8)
        shape = np.array(array.shape, np.int64).view(np.uint8)
        start = _HEAD.size + shape.size
        _HEAD.pack_into(head.data, 0, _MAGIC, array.ndim, array.dtype.name.encode())
        head[_HEAD.size : start] = shape
        fits = start + array.nbytes <= _HEAD_BYTES
        elements = head[start : start + array.nbytes] if fits else self._memory(array.nbytes)
        elements[...] = host.raw_bytes(np.ascontiguousarray(array))
        self._halfway = True
        for memory in [head] if fits else [head, elements]:
            message = self._open().start_send(memory, dest)
            self._sent.append(_Sent(message, memory, dest, deadline))
        self._halfway = False
        self._forget(deadline.operation)

    def recv(self, source: int, out: Any, deadline: Deadline) -> Any:
        """Receive an array."""
        lane = self._open()
        head = np.empty(_HEAD_BYTES, np.uint8)
        self._halfway = True
        lane.wait([_Awaited(lane.start_receive(head, source), lane, source)], deadline)
        dtype, shape, start = _read(head, lane, source)
        nbytes = math.prod(shape) * dtype.itemsize
        inside = start + nbytes <= _HEAD_BYTES
        target, give_back = None, None
        try:
            if out is not None:
                target, give_back = host.borrow_out(out, shape, dtype, operation="recv")
        except (TypeError, ValueError):
            if not inside:  # so that the next array can be received
                lane.receive(np.empty(nbytes, np.uint8), source, deadline)
            self._halfway = False
            raise
        result = np.empty(shape, dtype) if target is None else target
        flat = host.flat_target(result)
        if inside:
            host.raw_bytes(flat)[...] = head[start : start + nbytes]
        else:
            lane.receive(flat, source, deadline)
        self._halfway = False
        host.store(flat, result)
        return result if give_back is None else give_back(result)

    def close(self) -> None:
        """Wait a moment for ranks that have not received everything; harmless when repeated."""
        rest, self._sent = self._sent, []
        if not rest or self._group.unusable is not None:
            return
        try:
            self._open().wait([sent.message for sent in rest], Deadline("close", _DRAIN))
        except CollectiveTimeout as error:
            log.warning("what was sent has not been received: %s", error)

    def _check(self, operation: str, peer: int, limit: float) -> None:
        """Look at the arguments that both operations have."""
        rank, size = self._group.rank, self._group.size
        if not limit > 0:
            raise ValueError(f"{operation}: timeout must be seconds > 0, got {limit}")
        if not 0 <= operator.index(peer) < size or peer == rank:
            raise ValueError(
                f"{operation}: {_PEER[operation]} is not another rank, expected one of 0 .. "
                f"{size - 1} but {rank}, got {peer}"
            )

    def _open(self) -> Transport:
        """Return the lane."""
        if self._lane is None:
            self._lane = self._group.transport.lane()
        return self._lane

    def _forget(self, operation: str) -> None:
        """Let go what has arrived."""
        under_way = []
        for sent in self._sent:
            if not self._open().poll(sent.message, operation):
                under_way.append(sent)
            elif sent.memory.size > _HEAD_BYTES:
                self._spare = [*self._spare[1 - _KEPT_BUFFERS :], sent.memory]
        self._sent = under_way

    def _memory(self, nbytes: int) -> Array:
        """Return memory for a payload, used before if some fits."""
        for index, spare in enumerate(self._spare):
            if spare.size == nbytes:
                return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)


def _read(head: Array, ranks: Transport, source: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype and shape of the array that is announced, and where its elements would begin.

    Raises:
        CollectiveError: this is not a head.
    """
    magic, ndim, name = _HEAD.unpack_from(head.data)
    start = _HEAD.size + 8 * ndim
    if magic != _MAGIC or start > _HEAD_BYTES:
        raise CollectiveError(
            f"recv: what {ranks.name([source])} sent is not an array, it begins with "
            f"{head[:16].tobytes().hex()}"
        )
    shape = tuple(head[_HEAD.size : start].view(np.int64).tolist())
    return np.dtype(name.rstrip(b"\0").decode()), shape, start
