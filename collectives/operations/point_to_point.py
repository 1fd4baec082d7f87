"""Arrays between two ranks, matched by source and tag, from any thread.

The head of an array comes unasked, and a short array with it. The elements of a longer one come
when somebody wants them, without a copy::

    rank 0                                            rank 1
    isend(a, 1, tag=3)  -- head of a ------------>    kept: nobody wants tag 3
    isend(b, 1, tag=4)  -- head of b ------------>    irecv(0, tag=4) takes it:
                        -- elements of a -------->    into memory of ours, for later
                        -- elements of b -------->    where they belong

Elements come from one rank in the order of its heads, so those before the wanted ones are taken,
too. An array goes to the oldest receive that wants it, a receive takes the oldest array that it
wants.

All of it goes on a *lane*: messages that never meet those of the operations of all ranks, so that a
rank may send before such an operation what another one receives after it.

Messages move whenever a thread sends, receives, asks or waits here. While requests are open, a
thread of ours moves them as well, and finds the errors that nobody waits for; not where MPI does
not allow that. One lock guards what is known of them. What has come is handed over without the
lock, since callers' functions may go on with other messages.
"""

from __future__ import annotations

import atexit
import logging
import math
import operator
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import host
from collectives.arrays.host import Array
from collectives.errors import CollectiveError, CollectiveTimeout, LaunchError, PeerFailure, some
from collectives.operations import heads, recorder
from collectives.operations.group import Group
from collectives.operations.heads import ARRAY, Envelope
from collectives.operations.requests import Job
from collectives.operations.transfers import Arrival, Receiving, Sending, Transfer
from collectives.transport.transport import Deadline, Transport, this_thread
from collectives.transport.waiting import Wait

__all__ = ["AHEAD_BYTES", "PointToPoint"]

log = logging.getLogger(__name__)

# A rank may be so many bytes ahead of one that does not receive, and one array of any size; then
# `send` waits. Enough for the parts in flight of a pipeline, little enough for a laptop.
AHEAD_BYTES = 1 << 28

# Sent buffers kept for the next arrays: fresh memory costs more than the copy into it.
_KEPT_BUFFERS = 4

# Seconds that `close` waits for ranks that have not received yet what was sent to them.
_DRAIN = 5.0

# Seconds that the thread sleeps between two looks, at first; 2 % of a core.
_NAP = 0.0005

# Seconds within which the thread sees that it shall stop.
_STOP = 1.0

# Heads have 64 bits for it.
_LARGEST_TAG = (1 << 63) - 1


class PointToPoint:
    """What the `send` and `recv` of one group share."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks = group.transport
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lane: Transport | None = None
        self._torn = False  # whether an error has interrupted a change of what follows
        self._sent: list[Sending] = []  # not known to have arrived
        self._wanted: list[Receiving] = []  # in the order of the calls; nothing has come for them
        self._coming: list[Receiving] = []  # whose elements are under way
        self._arrived: list[Arrival] = []  # that nobody wants yet, in order
        self._behind: dict[int, deque[Arrival]] = defaultdict(deque)  # elements not yet taken
        self._ready: list[Transfer] = []  # to be handed over
        self._handed_over = 0  # so many so far
        self._spare: list[Array] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
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
        with self._lock:
            # Only two ranks make this call, so it gets no number of its own.
            record = group.begin(operation, {**peers, "tag": tag}, ours=4)
        failure: BaseException | None = None
        try:
            self._check_sent(operation)
            yield Deadline(operation, limit, group.settings.stall_warning)
        except BaseException as error:
            failure = error
            if self._torn:
                self._give_up(operation, error)
            raise
        finally:
            with self._lock:
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
        while behind := [s for s in self._sent if s.dest == dest and s.copy is not None]:
            if sum(sending.copied for sending in behind) <= AHEAD_BYTES:
                break
            self.finish(behind[0], deadline)
        flat, copy = host.raw_bytes(np.ascontiguousarray(array)), None
        if flat.size > heads.SHORT:
            copy = self._memory(flat.size)
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
        self._want(receiving)
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
        self._want(receiving)
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
            if self._torn:
                self._fail(transfer, error)
            raise

    def move(self) -> None:
        """Move all messages, and hand over what has come."""
        if self._group.unusable is not None:
            self._drop()
            return
        with self._lock:
            try:
                self._advance()
            except BaseException:
                self._torn = True
                raise
            ready, self._ready = self._ready, []
            self._handed_over += len(ready)
        for transfer in ready:
            transfer.deliver()

    def _advance(self) -> None:
        """Take heads, and poll what is under way; with the lock."""
        lane = self._lane
        assert lane is not None
        while (found := lane.collect()) is not None:
            source, data = found
            arrival = Arrival(heads.read(data, source, self._ranks))
            if arrival.memory is None:
                self._behind[source].append(arrival)
            for receiving in self._wanted:
                if receiving.wants(arrival):
                    self._wanted.remove(receiving)
                    self._bring(arrival, receiving)
                    break
            else:
                self._arrived.append(arrival)
        if self._coming:
            come = [receiving for receiving in self._coming if receiving.has_come()]
            self._coming = [receiving for receiving in self._coming if receiving not in come]
            self._ready += come
        if self._sent:
            gone = [sending for sending in self._sent if sending.has_gone()]
            self._sent = [sending for sending in self._sent if sending not in gone]
            self._ready += gone
            spare = [sending.copy for sending in gone if sending.copy is not None]
            self._spare = [*self._spare, *spare][-_KEPT_BUFFERS:]

    def _bring(self, arrival: Arrival, receiving: Receiving) -> None:
        """Let an array go where it is wanted; with the lock."""
        memory = receiving.accept(arrival)
        if arrival.memory is None:
            assert self._lane is not None
            source = arrival.head.envelope.source
            behind = self._behind[source]
            while arrival.memory is None:
                first = behind.popleft()
                first.memory = memory if first is arrival else np.empty(first.head.nbytes, np.uint8)
                first.message = self._lane.start_receive(first.memory, source)
        self._coming.append(receiving)

    def _want(self, receiving: Receiving) -> None:
        """Take the oldest array that fits, or wait for one."""
        self._open()
        with self._lock:
            try:
                for arrival in self._arrived:
                    if receiving.wants(arrival):
                        self._arrived.remove(arrival)
                        self._bring(arrival, receiving)
                        break
                else:
                    self._wanted.append(receiving)
            except BaseException:
                self._torn = True
                raise

    def _start(self, sending: Sending, head: Array, payload: Array | None) -> None:
        """Send a head and what follows it; no other thread's come between."""
        lane = self._open()
        with self._lock:
            try:
                sending.messages.append(lane.post(head, sending.dest))
                if payload is not None:
                    sending.messages.append(lane.start_send(payload, sending.dest))
                # Most short ones have gone by now, and need no other look.
                gone = all(lane.poll(m, sending.deadline.operation) for m in sending.messages)
                if not gone:
                    self._sent.append(sending)
            except BaseException:
                self._torn = True
                raise
        if gone:
            sending.deliver()

    def _look(self, receiving: Receiving) -> Envelope | None:
        """Return what is known of the oldest array that a receive would take."""
        self.move()
        with self._lock:
            fitting = (arrival for arrival in self._arrived if receiving.wants(arrival))
            return next((arrival.head.envelope for arrival in fitting), None)

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
            with self._lock:
                self._lane = self._lane or self._ranks.lane()
        return self._lane

    def _memory(self, nbytes: int) -> Array:
        """Return memory for a copy, used before if some fits."""
        with self._lock:
            for index, spare in enumerate(self._spare):
                if spare.size == nbytes:
                    return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)

    def _check_sent(self, operation: str) -> None:
        """Raise `CollectiveTimeout` if something sent before was not received in its time."""
        if not self._sent:
            return
        try:
            lane = self._open()
            for sending in list(self._sent):
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
        with self._lock:
            dropped = [*self._ready, *self._coming, *self._wanted, *self._sent]
            self._ready, self._coming, self._wanted, self._sent = [], [], [], []
        for transfer in dropped:
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
        with self._lock:
            if self._thread is None and not self._closed:
                try:
                    self._ranks.check_threads(transfer.deadline.operation)
                except LaunchError:
                    return  # it moves whenever this rank calls something here
                self._thread = threading.Thread(
                    target=self._work, name="unisono-messages", daemon=True
                )
                self._thread.start()
                _started.add(self)
            self._changed.notify_all()

    def _work(self) -> None:
        this_thread.stop = self._stop
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._stop.is_set() or self._requests())
            self._attend()

    def _requests(self) -> list[Transfer]:
        """Return the requests that are not over."""
        under_way: list[Transfer] = [*self._coming, *self._wanted, *self._sent]
        return [transfer for transfer in under_way if transfer.job is not None]

    def _attend(self) -> None:
        """Move messages until no request is open."""
        wait, handed_over = Wait(_NAP), self._handed_over
        while not self._stop.is_set() and (requests := self._requests()):
            self._drive(requests[0], 0)
            if handed_over != self._handed_over:
                wait, handed_over = Wait(_NAP), self._handed_over
            look = wait.pause()
            for transfer in requests:
                if not transfer.over:
                    self._look_after(transfer, look)

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
        if self._sent and self._group.unusable is None:
            try:
                self._open().wait(list(self._sent), Deadline("close", _DRAIN))
            except CollectiveTimeout as error:
                log.warning("what was sent has not been received: %s", error)
        self.end()

    def end(self) -> None:
        """End the thread, and the requests that are open."""
        self._closed = True
        self._stop.set()
        with self._lock:
            self._changed.notify_all()
            left = self._requests()
            self._coming, self._wanted, self._sent = [], [], []
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
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP)


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
