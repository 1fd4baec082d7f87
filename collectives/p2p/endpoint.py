"""Point-to-point endpoint of a group, matched by source and tag, usable by any thread.

The header of an array is sent at once, together with the elements of a short array. The elements
of a longer array arrive without a copy if a receive was posted in time::

    rank 0                                            rank 1
    isend(a, 1, tag=3)  -- header of a ---------->    kept: no receive for tag 3
    isend(b, 1, tag=4)  -- header of b ---------->    matches irecv(0, tag=4):
                        -- elements of a -------->    into a buffer, for later
                        -- elements of b -------->    into the array of the receive

`collectives.p2p.matching` matches arrays and receives. `collectives.p2p.progress_engine` moves
messages and handles errors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import host_arrays
from collectives.arrays.host_arrays import Array
from collectives.calls.group import Group
from collectives.calls.requests import RequestState
from collectives.core.errors import CollectiveError, CollectiveTimeout
from collectives.p2p.progress_engine import ProgressEngine
from collectives.p2p.transfers import ReceiveOperation, SendOperation
from collectives.tracing.recorder import Record
from collectives.transport import header
from collectives.transport.header import ARRAY, Envelope
from collectives.transport.transport import Deadline

__all__ = ["SEND_BUFFER_BYTES", "P2PEndpoint"]

# Unreceived bytes per destination, plus one array of any size, before `send` waits. Enough for the
# parts in flight of a pipeline, small enough for a laptop.
SEND_BUFFER_BYTES = 1 << 28

# The header has 64 bits for the tag.
_LARGEST_TAG = (1 << 63) - 1


class P2PEndpoint:
    """State shared by the sends and receives of one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # The lane opens with the first message: its receiver posts nothing before a header arrives.
        self._ranks = group.transport
        self._lane = ProgressEngine(group)
        self._matching = self._lane.matching

    def enter(
        self,
        operation: str,
        timeout: float | None,
        tag: int | None,
        frame: FrameType,
        **peers: int | None,
    ) -> AbstractContextManager[Deadline]:
        """Check the arguments, and return the context manager of the call (`_under_way`).

        Args:
            operation: name of the operation.
            timeout: seconds; None uses UNISONO_TIMEOUT.
            tag: the caller's tag, None for any tag.
            frame: frame of the operation's caller, as for `Recorder.take`.
            peers: the other ranks, by argument name.
        """
        group = self._group
        group.check_usable(operation)
        limit = group.settings.timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"{operation}: timeout must be seconds > 0, got {limit}")
        for name, peer in peers.items():
            self._check_peer(operation, name, peer)
        if tag is not None and not 0 <= operator.index(tag) <= _LARGEST_TAG:
            raise ValueError(f"{operation}: tag must be an integer from 0 to 2^63 - 1, got {tag}")
        # The recorder has no lock of its own, and any thread may send or receive.
        with self._matching.lock:
            # Only two ranks take part, so the call does not count as a call of the group.
            record = group.begin(operation, {**peers, "tag": tag}, frame)
        return self._under_way(record, limit)

    @contextmanager
    def _under_way(self, record: Record, limit: float) -> Iterator[Deadline]:
        """Check earlier sends, yield the deadline of the call, and record the end of the call."""
        group, operation = self._group, record.operation
        failure: BaseException | None = None
        try:
            self._check_sent(operation)
            yield Deadline(operation, limit, group.settings.stall_warning)
        except BaseException as error:
            failure = error
            # An exception inside a change leaves the lists incomplete; other errors leave them
            # usable.
            if self._matching.torn:
                self._lane.give_up(operation, error)
            raise
        finally:
            # Records of several threads end in any order, so the lock guards them here.
            with self._matching.lock:
                group.end(record, failure)

    def _check_peer(self, operation: str, name: str, peer: int | None) -> None:
        rank, size = self._group.rank, self._group.size
        if peer is None and name == "source":
            if size == 1:
                # One rank has no other rank that could send, and the wait would last until the
                # deadline.
                raise ValueError(f"{operation}: there is no other rank ({self._ranks.where})")
            return
        if not 0 <= operator.index(peer) < size or peer == rank:  # type: ignore[arg-type]
            raise ValueError(
                f"{operation}: {name} is not another rank, expected one of 0 .. {size - 1} but "
                f"{rank}, got {peer}"
            )

    def send(
        self, array: Array, dest: int, tag: int, deadline: Deadline, kind: str = ARRAY
    ) -> None:
        """Send a copy of an array; first wait until `dest` has received enough earlier data."""
        # Wait for the oldest copies until the rest is within the limit.
        # Only long arrays count: short ones are in their headers, which MPI buffers.
        while behind := [s for s in self._matching.sent if s.dest == dest and s.copy is not None]:
            if sum(sending.copied for sending in behind) <= SEND_BUFFER_BYTES:
                break
            # The oldest first: MPI delivers the messages of one rank in order.
            self._lane.finish(behind[0], deadline)
        short = header.is_short(array, operation=deadline.operation)
        flat, copy = host_arrays.raw_bytes(np.ascontiguousarray(array)), None
        # The header holds the elements of a short array, so only long arrays need a copy.
        if not short:
            # Before the header: without memory for the copy, nothing has been sent yet.
            copy = self._matching.memory(flat.size)
            copy[...] = flat
        sending = SendOperation(deadline, self._ranks, self._lane.move, dest, copy)
        self._lane.start(sending, header.write(array, flat, tag, kind), copy)

    def isend(self, array: Array, dest: int, tag: int, deadline: Deadline) -> RequestState:
        """Start sending an array, which must not change until the request is done."""
        short = header.is_short(array, operation=deadline.operation)
        flat = host_arrays.raw_bytes(np.ascontiguousarray(array))
        sending = SendOperation(deadline, self._ranks, self._lane.move, dest)
        # Before the send, because the transfer may complete at once.
        job = self._lane.job_of(sending)
        # `payload` is the caller's memory, which the request keeps alive until the end.
        payload = None if short else flat
        self._lane.start(sending, header.write(array, flat, tag, ARRAY), payload)
        # Last, because a request that has ended needs no thread.
        self._lane.hand_to_thread(sending)
        return job

    def recv(
        self,
        source: int | None,
        tag: int | None,
        deadline: Deadline,
        out: Any = None,
        kind: str = ARRAY,
    ) -> Any:
        """Receive an array, or the pickle of an object."""
        receiving = self._receiving(deadline, source, tag, kind, out)
        # Posted before the wait: a later array must not match a receive of another thread first.
        self._matching.post_receive(self._lane.transport(), receiving)
        return self._lane.finish(receiving, deadline)

    def irecv(
        self,
        source: int | None,
        tag: int | None,
        deadline: Deadline,
        out: Any,
        ordered: Callable[[], None],
    ) -> RequestState:
        """Post a receive; `ordered` synchronizes streams before a write to a device."""
        receiving = self._receiving(deadline, source, tag, ARRAY, out, ordered)
        # Before the receive is posted, because an array may already be here.
        job = self._lane.job_of(receiving)
        self._matching.post_receive(self._lane.transport(), receiving)
        self._lane.hand_to_thread(receiving)
        return job

    def probe(self, source: int | None, tag: int | None, deadline: Deadline) -> Envelope:
        """Wait for an array that a receive would match, without receiving it."""
        # Not posted, so that the array stays for the `recv` that follows.
        probe = _Probe(self._receiving(deadline, source, tag, ARRAY), self._look, [])
        try:
            self._lane.transport().wait([probe], deadline)
        except BaseException as error:
            if not isinstance(error, CollectiveTimeout):  # a timeout leaves all state unchanged
                self._lane.give_up(deadline.operation, error)
            raise
        return probe.found[0]

    def _look(self, receiving: ReceiveOperation) -> Envelope | None:
        """Move messages, and return the envelope of the oldest array that a receive would match."""
        self._lane.move()
        return self._matching.find(receiving)

    def _receiving(
        self,
        deadline: Deadline,
        source: int | None,
        tag: int | None,
        kind: str,
        out: Any = None,
        ordered: Callable[[], None] = lambda: None,
    ) -> ReceiveOperation:
        return ReceiveOperation(
            deadline, self._ranks, self._lane.move, source, tag, kind, out, ordered
        )

    def _check_sent(self, operation: str) -> None:
        """Raise `CollectiveTimeout` if an earlier send was not received before its deadline."""
        try:
            # `send` returns before the array is received; its deadline is checked by later calls.
            for sending in self._matching.sent:
                if not self._lane.transport().poll(sending, operation):
                    sending.deadline.check(self._ranks, [sending])
        except CollectiveError as error:
            self._lane.give_up(operation, error)
            raise

    def close(self) -> None:
        """Close the progress engine; harmless when repeated. See `ProgressEngine.close`."""
        self._lane.close()


class _Probe(NamedTuple):
    """Wait condition of `probe`: an array has arrived that the receive would match."""

    receiving: ReceiveOperation  # not posted, used for matching only
    look: Callable[[ReceiveOperation], Envelope | None]
    found: list[Envelope]

    def done(self) -> bool:
        found = self.look(self.receiving)
        if found is not None:
            self.found.append(found)
        return found is not None

    def describe(self) -> str:
        return self.receiving.describe()

    @property
    def peers(self) -> Sequence[int]:
        return self.receiving.peers
