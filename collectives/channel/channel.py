"""Channel: multi-frame messages between any two ranks, for services in a thread.

A message is one head that holds its short frames, followed by its long frames as they are, see
`frames`. Nothing is copied but short frames. A rank that waits sleeps on its doorbell; what comes
from other nodes it has to look for, the less often the longer nothing has come.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from collectives.algorithms import ring
from collectives.arrays.host_arrays import Array, raw_bytes
from collectives.channel.buffer_pool import BufferPool
from collectives.channel.doorbell import Doorbell
from collectives.channel.frames import decode, encode
from collectives.core.errors import CollectiveError, PeerFailure
from collectives.transport.backoff import BackoffPolicy, Deadline, PendingMessage
from collectives.transport.mailbox import Mailbox
from collectives.transport.transport import Transport

__all__ = ["Channel", "ReceivedMessage", "open_channel"]

Bytes = bytes | Array

# After something has moved, look again after an eighth of the time that has passed since: an answer
# is noticed 12 % late. A rank that every other one can wake looks rarely, only to hear of deaths;
# one that cannot be woken, 250 times a second (0.5 % of a core; 500 times cost 1.0 %).
_ALONE = BackoffPolicy(yields=0.0002, share=1 / 8, shortest=0.00005, longest=0.004)
_WOKEN = _ALONE._replace(longest=0.1)

# What is under way may need many looks: MPI moves a piece of it at each, and both sides have to
# look. Intel MPI, five arrays of 2.8 MB through a queue of another rank: 20 s with naps of up to
# 0.1 s, 0.5 s so.
_UNDER_WAY = _ALONE._replace(share=1 / 64, longest=0.001)
_SHORTEST_BELL = 0.001  # seconds; what the kernel's wait for a pipe can count

# MPI notices what has come while it is asked, and says so when it is asked again.
_LOOKS = 2


class ReceivedMessage(NamedTuple):
    """A message that has arrived: who sent it, and its frames, shape (n,), uint8, our own."""

    source: int
    frames: list[Array]


def open_channel(
    transport: Transport,
    mailbox: Mailbox,
    leaders: Sequence[int],
    deadline: Deadline,
    dead_here: Callable[[], Collection[int]] = frozenset,
) -> Channel:
    """Make a channel; *collective*.

    Args:
        transport: between the same ranks, used for a moment.
        mailbox: the channel's own from now on.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.
        deadline: until when all ranks must come.
        dead_here: tells which ranks of this node have died, whatever MPI knows.
    """
    bell = Doorbell()
    size, rank = transport.size, transport.rank
    addresses = np.zeros((size, 4), np.uint64)
    addresses[rank] = bell.address
    ring.allgather(transport, addresses.reshape(-1), [4 * r for r in range(size + 1)], deadline)
    reached = np.zeros((size, size), np.uint8)
    for peer in range(size):
        near = peer != rank and leaders[peer] == leaders[rank]
        reached[rank, peer] = peer == rank or (
            near and bell.connect(peer, addresses[peer].tolist())
        )
    # Also says that all have opened what they found, so that nobody closes it too early.
    ring.allgather(transport, reached.reshape(-1), [size * r for r in range(size + 1)], deadline)
    return Channel(mailbox, bell, dead_here, woken_by_all=bool(reached[:, rank].all()))


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """Send nothing from a forked child, and leave mailbox and pipes to the parent."""
    for channel in list(_channels):
        channel._closed = True
        channel._lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """Sends messages from any thread, and receives them in one; see `open_channel`.

    Args:
        mailbox: carries heads and long frames.
        bell: this rank's doorbell.
        dead_here: tells which ranks of this node have died.
        woken_by_all: whether every other rank can ring it.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        bell: Doorbell,
        dead_here: Callable[[], Collection[int]],
        *,
        woken_by_all: bool,
    ) -> None:
        self.rank = mailbox.rank
        self.size = mailbox.size
        self._mailbox = mailbox
        self._bell = bell
        self._dead_here = dead_here
        self._woken = woken_by_all
        self._pace = _WOKEN if woken_by_all else _ALONE
        self._lock = threading.Lock()  # of what sending changes
        self._sent: deque[PendingMessage] = deque()  # not known to be done
        self._arriving: dict[int, deque[_PartialMessage]] = {}
        self._buffers = BufferPool()
        self._moved = time.monotonic()  # when something was sent or received
        self._closed = False
        _channels.add(self)

    @property
    def dead(self) -> frozenset[int]:
        """Ranks known to have died: those of this node, others if MPI survives their death."""
        return self._mailbox.dead().union(self._dead_here())

    def send(self, dest: int, frames: Sequence[Bytes]) -> None:
        """Start sending a message; does not wait for the other side. From any thread.

        Args:
            dest: a rank, not this one.
            frames: bytes or contiguous arrays, at most 65,536; long arrays must not change before
                the other side has answered. Nothing happens if it is dead.

        Raises:
            CollectiveError: the channel is closed.
            ValueError: too many frames.
        """
        head, long = encode(
            [np.frombuffer(f, np.uint8) if isinstance(f, bytes) else raw_bytes(f) for f in frames]
        )
        with self._lock:
            if self._closed:
                raise CollectiveError(f"send: the channel is closed (rank {self.rank})")
            if dest in self._mailbox.dead():
                return
            under_way = [self._mailbox.send_nowait(head, dest)]
            under_way += [self._mailbox.send(frame, dest) for frame in long]
            under_way = [delivery for delivery in under_way if not delivery.done()]
            self._sent.extend(under_way)
            self._moved = time.monotonic()
            self._bell.ring(dest)
            if under_way:
                self._bell.ring()  # our own thread has to keep MPI going

    def poll(self) -> ReceivedMessage | None:
        """Return a message that has arrived, or None. In the receiving thread.

        Messages of one rank come in the order in which it sent them.

        Raises:
            CollectiveError: what has arrived is not a message, or MPI reports an error.
        """
        for _ in range(_LOOKS):
            while (found := self._mailbox.poll()) is not None:
                source, head = found
                self._moved = time.monotonic()
                with contextlib.suppress(PeerFailure):  # what its sender did not live to finish
                    arriving = _PartialMessage(self._mailbox, source, head, self._buffers.take)
                    self._arriving.setdefault(source, deque()).append(arriving)
        with self._lock:
            while self._sent and self._sent[0].done():
                self._sent.popleft()
                self._moved = time.monotonic()
        for source in list(self._arriving):
            queue = self._arriving[source]
            try:
                if not queue[0].done():
                    continue
            except PeerFailure:
                del self._arriving[source]
                continue
            frames = queue.popleft().frames
            del self._arriving[source]
            if queue:
                self._arriving[source] = queue  # behind the others, so that each has its turn
            self._moved = time.monotonic()
            return ReceivedMessage(source, frames)
        return None

    def wait(self, seconds: float) -> None:
        """Sleep until a message may have come, `wake` is called, or the time is over."""
        idle = time.monotonic() - self._moved
        unfinished = bool(self._arriving or self._sent)
        if unfinished and idle < self._pace.yields:
            os.sched_yield()
            return
        pace = _UNDER_WAY if unfinished else self._pace
        nap = min(seconds, pace.nap(idle))
        if nap < _SHORTEST_BELL and (unfinished or not self._woken):
            time.sleep(nap)
        else:
            self._bell.wait(nap)

    def wake(self) -> None:
        """End the current or next `wait` of this rank; from any thread."""
        self._bell.ring()

    @property
    def idle(self) -> bool:
        """Whether everything sent has left this rank."""
        return not self._sent

    def close(self, *, all_together: bool = False) -> None:
        """Release the channel; harmless when repeated.

        Args:
            all_together: whether all ranks are known to close now, without a message left.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._mailbox.close(all_together=all_together)
                self._bell.close()


class _PartialMessage:
    """A message whose head has come, and whose long frames are coming."""

    def __init__(
        self, mailbox: Mailbox, source: int, head: Array, buffer: Callable[[int], Array]
    ) -> None:
        self.frames: list[Array] = []
        self._coming: deque[PendingMessage] = deque()
        for length, start in decode(head, source):
            if start is None:
                frame = buffer(length)
                self._coming.append(mailbox.receive(frame, source))
            else:
                frame = head[start : start + length]
            self.frames.append(frame)

    def done(self) -> bool:
        while self._coming:
            if not self._coming[0].done():
                return False
            self._coming.popleft()
        return True
