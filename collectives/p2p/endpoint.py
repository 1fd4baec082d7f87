"""Point-to-point endpoint of a group, matched by source and tag, usable by any thread.

The head of an array comes unasked, and a short array with it. The elements of a longer one come
when somebody wants them, without a copy::

    rank 0                                            rank 1
    isend(a, 1, tag=3)  -- head of a ------------>    kept: nobody wants tag 3
    isend(b, 1, tag=4)  -- head of b ------------>    irecv(0, tag=4) takes it:
                        -- elements of a -------->    into memory of ours, for later
                        -- elements of b -------->    where they belong

Which array a receive gets is in `collectives.p2p.matching`; how the messages move, and what
an error does to them, in `collectives.p2p.progress_engine`.
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

# A rank may be so many bytes ahead of one that does not receive, and one array of any size; then
# `send` waits. Enough for the parts in flight of a pipeline, little enough for a laptop.
SEND_BUFFER_BYTES = 1 << 28

# Heads have 64 bits for it.
_LARGEST_TAG = (1 << 63) - 1


class P2PEndpoint:
    """What the `send` and `recv` of one group share."""

    def __init__(self, group: Group) -> None:
        self._group = group
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
        """Check the arguments, and begin a call; returns its block, as `_under_way`.

        Args:
            frame: of the operation's caller, as for `Recorder.take`.
            peers: the other ranks, by the names of the arguments.
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
        with self._matching.lock:
            # Only two ranks make this call, so it gets no number of its own.
            record = group.begin(operation, {**peers, "tag": tag}, frame)
        return self._under_way(record, limit)

    @contextmanager
    def _under_way(self, record: Record, limit: float) -> Iterator[Deadline]:
        """Look after what was sent before, and record how the call ends."""
        group, operation = self._group, record.operation
        failure: BaseException | None = None
        try:
            self._check_sent(operation)
            yield Deadline(operation, limit, group.settings.stall_warning)
        except BaseException as error:
            failure = error
            if self._matching.torn:
                self._lane.give_up(operation, error)
            raise
        finally:
            with self._matching.lock:
                group.end(record, failure)

    def _check_peer(self, operation: str, name: str, peer: int | None) -> None:
        rank, size = self._group.rank, self._group.size
        if peer is None and name == "source":
            if size == 1:
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
        """Send a copy of an array, once the other rank is not too far behind."""
        while behind := [s for s in self._matching.sent if s.dest == dest and s.copy is not None]:
            if sum(sending.copied for sending in behind) <= SEND_BUFFER_BYTES:
                break
            self._lane.finish(behind[0], deadline)
        short = header.is_short(array, operation=deadline.operation)
        flat, copy = host_arrays.raw_bytes(np.ascontiguousarray(array)), None
        if not short:
            copy = self._matching.memory(flat.size)
            copy[...] = flat
        sending = SendOperation(deadline, self._ranks, self._lane.move, dest, copy)
        self._lane.start(sending, header.write(array, flat, tag, kind), copy)

    def isend(self, array: Array, dest: int, tag: int, deadline: Deadline) -> RequestState:
        """Start sending an array, which must not change until that is over."""
        short = header.is_short(array, operation=deadline.operation)
        flat = host_arrays.raw_bytes(np.ascontiguousarray(array))
        sending = SendOperation(deadline, self._ranks, self._lane.move, dest)
        job = self._lane.job_of(sending)
        payload = None if short else flat
        self._lane.start(sending, header.write(array, flat, tag, ARRAY), payload)
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
        """Want an array; `ordered` is called before a device is written to."""
        receiving = self._receiving(deadline, source, tag, ARRAY, out, ordered)
        job = self._lane.job_of(receiving)
        self._matching.post_receive(self._lane.transport(), receiving)
        self._lane.hand_to_thread(receiving)
        return job

    def probe(self, source: int | None, tag: int | None, deadline: Deadline) -> Envelope:
        """Wait for an array that could be received, and leave it where it is."""
        probe = _Probe(self._receiving(deadline, source, tag, ARRAY), self._look, [])
        try:
            self._lane.transport().wait([probe], deadline)
        except BaseException as error:
            if not isinstance(error, CollectiveTimeout):  # which leaves all as it was
                self._lane.give_up(deadline.operation, error)
            raise
        return probe.found[0]

    def _look(self, receiving: ReceiveOperation) -> Envelope | None:
        """Return what is known of the oldest array that a receive would take."""
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
        """Raise `CollectiveTimeout` if something sent before was not received in its time."""
        try:
            for sending in self._matching.sent:
                if not self._lane.transport().poll(sending, operation):
                    sending.deadline.check(self._ranks, [sending])
        except CollectiveError as error:
            self._lane.give_up(operation, error)
            raise

    def close(self) -> None:
        """End what is under way; harmless when repeated. See `ProgressEngine.close`."""
        self._lane.close()


class _Probe(NamedTuple):
    """An array that somebody waits for without receiving it."""

    receiving: ReceiveOperation  # which it would be
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
