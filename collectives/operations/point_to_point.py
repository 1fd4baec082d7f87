"""Arrays between two ranks, matched by source and tag, from any thread.

The head of an array comes unasked, and a short array with it. The elements of a longer one come
when somebody wants them, without a copy::

    rank 0                                            rank 1
    isend(a, 1, tag=3)  -- head of a ------------>    kept: nobody wants tag 3
    isend(b, 1, tag=4)  -- head of b ------------>    irecv(0, tag=4) takes it:
                        -- elements of a -------->    into memory of ours, for later
                        -- elements of b -------->    where they belong

Which array a receive gets is in `collectives.operations.matching`.

All of it goes on a *lane*: messages that never meet those of the operations of all ranks, so that a
rank may send before such an operation what another one receives after it.

Messages move whenever a thread sends, receives, asks or waits here. While requests are open, a
thread of ours moves them as well, and finds the errors that nobody waits for
(`collectives.operations.attendant`); not where MPI does not allow that.
"""

from __future__ import annotations

import atexit
import logging
import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import host
from collectives.arrays.host import Array
from collectives.errors import CollectiveError, CollectiveTimeout, LaunchError, PeerFailure, some
from collectives.operations import heads, recorder
from collectives.operations.attendant import Attendant
from collectives.operations.group import Group
from collectives.operations.heads import ARRAY, Envelope
from collectives.operations.matching import Matching
from collectives.operations.requests import Job
from collectives.operations.transfers import Receiving, Sending, Transfer
from collectives.transport.transport import Deadline, Transport

__all__ = ["AHEAD_BYTES", "PointToPoint"]

log = logging.getLogger(__name__)

# A rank may be so many bytes ahead of one that does not receive, and one array of any size; then
# `send` waits. Enough for the parts in flight of a pipeline, little enough for a laptop.
AHEAD_BYTES = 1 << 28

# Seconds that `close` waits for ranks that have not received yet what was sent to them.
_DRAIN = 5.0

# Heads have 64 bits for it.
_LARGEST_TAG = (1 << 63) - 1


class PointToPoint:
    """What the `send` and `recv` of one group share."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks = group.transport
        self.process = os.getpid()
        self._matching = Matching(self._ranks)
        self._attendant = Attendant(self._requests, self._advance, self._look_after)
        self._lane: Transport | None = None
        self._handed_over = 0  # so many transfers so far
        self._closed = False

    @contextmanager
    def enter(
        self, operation: str, timeout: float | None, tag: int | None, **peers: int | None
    ) -> Iterator[Deadline]:
        """Check the arguments, look after what was sent before, and record how the call ends.

        Args:
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
            record = group.begin(operation, {**peers, "tag": tag}, ours=4)
        failure: BaseException | None = None
        try:
            self._check_sent(operation)
            yield Deadline(operation, limit, group.settings.stall_warning)
        except BaseException as error:
            failure = error
            if self._matching.torn:
                self._give_up(operation, error)
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
            if sum(sending.copied for sending in behind) <= AHEAD_BYTES:
                break
            self.finish(behind[0], deadline)
        flat, copy = host.raw_bytes(np.ascontiguousarray(array)), None
        if flat.size > heads.SHORT:
            copy = self._matching.memory(flat.size)
            copy[...] = flat
        sending = Sending(deadline, self._ranks, self.move, dest, copy)
        self._start(sending, heads.write(array, flat, tag, kind), copy)

    def isend(self, array: Array, dest: int, tag: int, deadline: Deadline) -> Job:
        """Start sending an array, which must not change until that is over."""
        flat = host.raw_bytes(np.ascontiguousarray(array))
        sending = Sending(deadline, self._ranks, self.move, dest)
        job = self._job_of(sending)
        payload = flat if flat.size > heads.SHORT else None
        self._start(sending, heads.write(array, flat, tag, ARRAY), payload)
        self._attend_to(sending)
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
        self._matching.want(self._open(), receiving)
        return self.finish(receiving, deadline)

    def irecv(
        self,
        source: int | None,
        tag: int | None,
        deadline: Deadline,
        out: Any,
        ordered: Callable[[], None],
    ) -> Job:
        """Want an array; `ordered` is called before a device is written to."""
        receiving = self._receiving(deadline, source, tag, ARRAY, out, ordered)
        job = self._job_of(receiving)
        self._matching.want(self._open(), receiving)
        self._attend_to(receiving)
        return job

    def probe(self, source: int | None, tag: int | None, deadline: Deadline) -> Envelope:
        """Wait for an array that could be received, and leave it where it is."""
        probe = _Probe(self._receiving(deadline, source, tag, ARRAY), self._look, [])
        try:
            self._open().wait([probe], deadline)
        except BaseException as error:
            if not isinstance(error, CollectiveTimeout):  # which leaves all as it was
                self._give_up(deadline.operation, error)
            raise
        return probe.found[0]

    def finish(self, transfer: Transfer, deadline: Deadline) -> Any:
        """Wait until a transfer is over, and return what has come of it."""
        try:
            self._open().wait([transfer], deadline)
        except BaseException as error:
            # Whatever it is, as of a signal handler: what comes later would meet the rest of this.
            self._give_up(deadline.operation, error)
            raise
        if transfer.error is not None:
            raise transfer.error
        return transfer.result

    def _drive(self, transfer: Transfer, timeout: float | None) -> None:
        """Move messages until a request is over, or for so many seconds; what fails is its end."""
        deadline = transfer.deadline
        try:
            if timeout == 0:
                self._open().poll(transfer, deadline.operation)
            else:
                give_up = math.inf if timeout is None else time.monotonic() + timeout
                self._open().wait([_Until(transfer, give_up)], deadline)
        except CollectiveError as error:
            self._fail(transfer, error)
        except BaseException as error:
            if self._matching.torn:
                self._fail(transfer, error)
            raise

    def move(self) -> None:
        """Move all messages, and hand over what has come."""
        if self._group.unusable is not None:
            self._drop()
            return
        over = self._matching.advance(self._open())
        self._handed_over += len(over)
        for transfer in over:
            transfer.deliver()

    def _start(self, sending: Sending, head: Array, payload: Array | None) -> None:
        """Send a head and what follows it; no other thread's come between."""
        if self._matching.start(self._open(), sending, head, payload):
            sending.deliver()

    def _look(self, receiving: Receiving) -> Envelope | None:
        """Return what is known of the oldest array that a receive would take."""
        self.move()
        return self._matching.find(receiving)

    def _receiving(
        self,
        deadline: Deadline,
        source: int | None,
        tag: int | None,
        kind: str,
        out: Any = None,
        ordered: Callable[[], None] = lambda: None,
    ) -> Receiving:
        return Receiving(deadline, self._ranks, self.move, source, tag, kind, out, ordered)

    def _job_of(self, transfer: Transfer) -> Job:
        transfer.job = Job(transfer.deadline.operation, partial(self._drive, transfer))
        return transfer.job

    def _open(self) -> Transport:
        """Return the lane."""
        if self._lane is None:
            with self._matching.lock:
                self._lane = self._lane or self._ranks.lane()
        return self._lane

    def _check_sent(self, operation: str) -> None:
        """Raise `CollectiveTimeout` if something sent before was not received in its time."""
        try:
            for sending in self._matching.sent:
                lane = self._open()
                if not lane.poll(sending, operation):
                    sending.deadline.check(self._ranks, [sending])
        except CollectiveError as error:
            self._give_up(operation, error)
            raise

    def _fail(self, transfer: Transfer, error: BaseException) -> None:
        """End a request by an error, after which nothing here can go on."""
        operation = transfer.deadline.operation
        transfer.fail(error)
        self._give_up(operation, error)
        if isinstance(error, (CollectiveTimeout, PeerFailure)):
            recorder.write(f"{operation}: {type(error).__name__}")

    def _give_up(self, operation: str, error: BaseException) -> None:
        """Refuse later calls of the group, and end what is under way."""
        if self._group.unusable is None:
            self._group.failed(operation, error)
        self._drop(PeerFailure if isinstance(error, PeerFailure) else CollectiveError)

    def _drop(self, kind: type[CollectiveError] = CollectiveError) -> None:
        """End what is under way, since the group is unusable."""
        for transfer in self._matching.drop():
            transfer.fail(
                kind(
                    f"{transfer.deadline.operation}: this communicator is not usable any more, "
                    f"since {self._group.unusable} ({self._ranks.where})"
                )
            )

    def _attend_to(self, transfer: Transfer) -> None:
        """Let the thread move a request, too, where MPI allows that."""
        if transfer.over:
            return
        if self._attendant.needed:
            try:
                self._ranks.check_threads(transfer.deadline.operation)
            except LaunchError:
                return  # it moves whenever this rank calls something here
            _started.add(self)
        self._attendant.attend()

    def _requests(self) -> list[Transfer]:
        """Return the requests that are not over."""
        return self._matching.requests

    def _advance(self, request: Transfer) -> int:
        """Move messages as for a request, and return how many transfers have ended so far."""
        self._drive(request, 0)
        return self._handed_over

    def _look_after(self, transfer: Transfer, look: bool) -> None:
        """End a request whose time is over, or for which another rank does not live any more."""
        lane, deadline = self._open(), transfer.deadline
        try:
            deadline.check(self._ranks, [transfer], lane.culprit)
            if look:
                lane.look_around(deadline.operation, transfer.peers)
        except CollectiveError as error:
            self._fail(transfer, error)

    def close(self) -> None:
        """Wait a moment for ranks that have not received everything; harmless when repeated.

        Requests that are still open then fail, and are named in a warning.
        """
        if os.getpid() != self.process or self._closed:
            return
        self._closed = True
        sent = self._matching.sent
        if sent and self._group.unusable is None:
            try:
                self._open().wait(sent, Deadline("close", _DRAIN))
            except CollectiveTimeout as error:
                log.warning("what was sent has not been received: %s", error)
        self.end()

    def end(self) -> None:
        """End the thread, and the requests that are open."""
        self._closed = True
        left = [transfer for transfer in self._matching.drop() if transfer.job is not None]
        jobs = [transfer.job for transfer in left if transfer.job is not None]
        names = [str(job) for job in jobs if not job.settled]
        for job in jobs:
            job.settled = True
        for transfer in left:
            operation = transfer.deadline.operation
            transfer.fail(
                CollectiveError(f"{operation}: the communicator was closed before it was done")
            )
        if names:
            log.warning(
                "%d request%s not done when their communicator was closed: %s",
                len(names), "s" * (len(names) > 1), some(names),
            )  # fmt: skip
        self._attendant.end()


class _Until(NamedTuple):
    """A transfer, or the end of the time that somebody waits for it."""

    transfer: Transfer
    give_up: float  # by the monotonic clock

    def done(self) -> bool:
        return self.transfer.done() or time.monotonic() >= self.give_up

    def describe(self) -> str:
        return self.transfer.describe()

    @property
    def peers(self) -> Sequence[int]:
        return self.transfer.peers


class _Probe(NamedTuple):
    """An array that somebody waits for without receiving it."""

    receiving: Receiving  # which it would be
    look: Callable[[Receiving], Envelope | None]
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


# Those whose threads were started.
_started: weakref.WeakSet[PointToPoint] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter does."""
    for each in list(_started):
        if each.process == os.getpid():
            each.end()
