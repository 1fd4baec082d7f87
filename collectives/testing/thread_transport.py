"""Transport between ranks that are threads of one process.

`eager` sends are complete at once, as small MPI messages are; `synchronous` ones only when the
receiver has taken them, as large MPI messages are. A schedule that sends before it receives passes
with the first and hangs with the second.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

from collectives.arrays.host_arrays import Array, raw_bytes
from collectives.core.errors import CollectiveTimeout, MismatchError, PeerFailure
from collectives.transport.mailbox import Mailbox
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = ["Failure", "Sends", "ThreadGroup", "ThreadJob", "ThreadMailbox", "ThreadTransport"]

Sends = Literal["eager", "synchronous"]

# Seconds between two looks at the other ranks' failures.
_INTERVAL = 0.05

# Seconds that `split` waits for the other ranks.
_SPLIT_TIMEOUT = 20.0


class Failure(NamedTuple):
    """First failure of a job: the rank, and its error."""

    rank: int
    error: BaseException


class ThreadJob:
    """State of all ranks that were started together: the first failure, which ends all waits."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._lock = threading.Lock()

    def fail(self, rank: int, error: BaseException) -> None:
        """Record that a rank has failed; later failures are consequences."""
        with self._lock:
            self.failure = self.failure or Failure(rank, error)


class ThreadGroup:
    """Memory shared by the threads of one group.

    Args:
        size: number of ranks.
        sends: when a send is complete.
        memory_of: views an array as bytes of the host.
        job: state of all ranks; None for a new job.
    """

    def __init__(
        self,
        size: int,
        sends: Sends,
        memory_of: Callable[[Array], Array] = raw_bytes,
        job: ThreadJob | None = None,
    ) -> None:
        self.size = size
        self.sends = sends
        self.memory_of = memory_of
        self.job = job or ThreadJob()
        lock = threading.RLock()
        self.lock = threading.Condition(lock)
        # By rank: threads that all wake whenever two of them exchange a message do little else.
        self.moved = [threading.Condition(lock) for _ in range(size)]
        self.events = [0] * size  # messages for a rank, and taken from it, so far
        # (kind, source, dest) -> messages in order
        self.boxes: defaultdict[Hashable, deque[Any]] = defaultdict(deque)
        # number of the split -> rank -> (color, key)
        self.splits: defaultdict[int, dict[int, tuple[int | None, int]]] = defaultdict(dict)
        self.parts: dict[Hashable, ThreadGroup] = {}  # (number of the split, color) -> group
        # ranks and tag -> groups, and the ranks that have joined each
        self.members: defaultdict[Hashable, list[tuple[ThreadGroup, set[int]]]] = defaultdict(list)

    def part(self, size: int) -> ThreadGroup:
        """Return a new group of the same job."""
        return ThreadGroup(size, self.sends, self.memory_of, self.job)

    def event(self, rank: int) -> None:
        """Wake a rank; the lock is held."""
        self.events[rank] += 1
        self.moved[rank].notify_all()


class _Send:
    def __init__(self, group: ThreadGroup, data: Array, peer: str, dest: int) -> None:
        self.taken = group.sends == "eager"
        self.data = group.memory_of(data).copy() if self.taken else group.memory_of(data)
        self.peer = peer
        self.peers: Sequence[int] = (dest,)

    def done(self) -> bool:
        return self.taken

    def describe(self) -> str:
        return f"{self.peer} to receive {self.data.size} bytes"


class _Receive:
    def __init__(
        self, group: ThreadGroup, box: tuple[str, int, int], into: Array, peer: str
    ) -> None:
        self.group = group
        self.box = box
        self.into = group.memory_of(into)
        self.peer = peer
        self.peers: Sequence[int] = (box[1],)
        self.finished = False
        self.error: MismatchError | None = None
        self.queue = group.boxes["receives", box]
        self.queue.append(self)

    def done(self) -> bool:
        with self.group.lock:
            box = self.group.boxes[self.box]
            # As MPI does: also for the receives before this one.
            while box and self.queue and not self.finished:
                self.queue.popleft().take(box.popleft())
        if self.error is not None:
            raise self.error
        return self.finished

    def take(self, send: _Send) -> None:
        self.finished = True
        if send.data.size == self.into.size:
            self.into[...] = send.data
        else:
            self.error = MismatchError(
                f"receive: {self.peer} sent an array of another length, expected "
                f"{self.into.size} bytes, got {send.data.size}"
            )
        send.taken = True  # its memory may change from now on
        self.group.event(self.box[1])

    def describe(self) -> str:
        return f"{self.peer} to send {self.into.size} bytes"


class ThreadTransport(Transport):
    """Messages of one rank of a group of threads."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size
        self.number_of_splits = 0

    def send_as(self, kind: str, data: Array, dest: int) -> PendingMessage:
        """Start sending a message that matches receives of its kind."""
        send = _Send(self.group, data, self.name([dest]), dest)
        with self.group.lock:
            self.group.boxes[(kind, self.rank, dest)].append(send)
            self.group.event(dest)
        return send

    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        return self.send_as("data", data, dest)

    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        with self.group.lock:
            return _Receive(self.group, ("data", source, self.rank), into, self.name([source]))

    def check_peers(self, operation: str, peers: Sequence[int] = ()) -> None:
        """Raise `PeerFailure` if any rank of the job has failed."""
        failure = self.group.job.failure
        if failure is not None:
            kind = type(failure.error).__name__
            raise PeerFailure(
                f"{operation}: rank {failure.rank} has failed by {kind} ({self.where})"
            ) from failure.error

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        """Wait until every message is complete; errors as in the interface."""
        # Threads that poll take the interpreter from each other: sleep until something happens.
        pending, began = list(messages), time.monotonic_ns()
        events, moved = self.group.events, self.group.moved[self.rank]
        while True:
            seen = events[self.rank]
            pending = [m for m in pending if not m.done()]
            if not pending:
                if deadline.waits is not None:
                    deadline.waits.waited(began, messages)
                return
            self.check_peers(deadline.operation)
            deadline.check(self, pending)
            with moved:
                if events[self.rank] == seen:
                    moved.wait(_INTERVAL)

    def split(self, color: int | None, key: int) -> ThreadTransport | None:
        """Return a transport for the ranks of one color; *collective*."""
        number = self.number_of_splits
        self.number_of_splits += 1
        give_up = time.monotonic() + _SPLIT_TIMEOUT
        with self.group.lock:
            wishes = self.group.splits[number]
            wishes[self.rank] = (color, key)
            self.group.lock.notify_all()
            while not self.group.lock.wait_for(lambda: len(wishes) == self.size, _INTERVAL):
                self.check_peers("split")
                if time.monotonic() > give_up:
                    missing = self.name([r for r in range(self.size) if r not in wishes])
                    raise CollectiveTimeout(
                        f"split: no answer within {_SPLIT_TIMEOUT:g} s, still waiting for {missing}"
                        f" ({self.where})"
                    )
            if color is None:
                return None
            members = sorted(
                (r for r in wishes if wishes[r][0] == color), key=lambda r: (wishes[r][1], r)
            )
            part = self.group.parts.setdefault((number, color), self.group.part(len(members)))
        return ThreadTransport(part, members.index(self.rank))

    def members(self, ranks: Sequence[int], tag: int) -> ThreadTransport:
        """Return a transport for some ranks, in this order."""
        with self.group.lock:
            made = self.group.members[tuple(ranks), tag]
            if not made or self.rank in made[-1][1]:  # a later one with the same tag
                made.append((self.group.part(len(ranks)), set()))
            group, came = made[0]
            came.add(self.rank)
            if len(came) == len(ranks):
                made.pop(0)
        return ThreadTransport(group, list(ranks).index(self.rank))

    def channel(self, number: int | None = None) -> ThreadTransport:
        """Return a transport for the same ranks whose messages never match those of this one."""
        with self.group.lock:
            name = ("channel", number)
            group = self.group.parts.setdefault(name, self.group.part(self.size))
        return ThreadTransport(group, self.rank)

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending an unsolicited message."""
        return self.send_as("head", head, dest)

    def poll_mailbox(self) -> tuple[int, Array] | None:
        """Return the next unsolicited message, as (source, bytes)."""
        with self.group.lock:
            for source in range(self.size):
                if box := self.group.boxes[("head", source, self.rank)]:
                    send = box.popleft()
                    send.taken = True
                    self.group.event(source)
                    return source, send.data.copy()
        return None

    def open_mailbox(self) -> ThreadMailbox:
        """Open a mailbox for the same ranks; *collective*."""
        transport = self.split(0, self.rank)
        assert transport is not None
        return ThreadMailbox(transport)


class ThreadMailbox(Mailbox):
    """Heads and long frames between ranks that are threads."""

    def __init__(self, transport: ThreadTransport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending a head."""
        return self.transport.send_as("head", head, dest)

    def send(self, frame: Array, dest: int) -> PendingMessage:
        """Start sending a frame."""
        return self.transport.send_as("frame", frame, dest)

    def poll(self) -> tuple[int, Array] | None:
        """Return the next head, or None."""
        return self.transport.poll_mailbox()

    def receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving a frame of exactly this length."""
        box = "frame", source, self.rank
        return _Receive(self.transport.group, box, into, f"rank {source}")

    def dead(self) -> frozenset[int]:
        """Return no rank: threads do not die alone."""
        return frozenset()

    def close(self, *, all_together: bool) -> None:
        """Release nothing: the memory is Python's."""
