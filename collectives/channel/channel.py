"""Channel: multi-frame messages between any two ranks, for services in a thread.

A message is one header with its short frames, followed by its long frames; see `frames`. Only short
frames are copied. A waiting rank sleeps on its doorbell. It polls for messages from other nodes, at
intervals that grow while no message arrives.
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
from collectives.core.process_hooks import in_child
from collectives.transport.backoff import BackoffPolicy, Deadline, PendingMessage
from collectives.transport.mailbox import Mailbox
from collectives.transport.transport import Transport

__all__ = ["Channel", "ReceivedMessage", "open_channel"]

Bytes = bytes | Array

# After a transfer, poll at intervals of an eighth of the idle time, which delays an answer by at
# most 12 %. A rank that all other ranks can wake polls rarely, only to detect deaths; any other
# rank polls 250 times a second (0.5 % of a core; 500 times cost 1.0 %).
_ALONE = BackoffPolicy(yields=0.0002, share=1 / 8, shortest=0.00005, longest=0.004)
_WOKEN = _ALONE._replace(longest=0.1)

# A transfer may need many polls: MPI moves a piece in each poll, and both sides must poll. Intel
# MPI, five arrays of 2.8 MB through a queue of another rank: 20 s with sleeps of up to 0.1 s, 0.5 s
# with these.
_UNDER_WAY = _ALONE._replace(share=1 / 64, longest=0.001)
_SHORTEST_BELL = 0.001  # seconds; resolution of the kernel's wait on a pipe

# MPI detects an arrival in one poll and reports it in the next.
_LOOKS = 2


class ReceivedMessage(NamedTuple):
    """A message that has arrived: the sender, and owned frames of shape (n,), uint8."""

    source: int
    frames: list[Array]


def open_channel(
    transport: Transport,
    mailbox: Mailbox,
    leaders: Sequence[int],
    deadline: Deadline,
    dead_here: Callable[[], Collection[int]] = frozenset,
) -> Channel:
    """Create a channel; *collective*.

    Args:
        transport: between the same ranks, used only in this call.
        mailbox: owned by the channel from now on.
        leaders: one integer per rank, equal exactly for the ranks of one node.
        deadline: limit for all ranks.
        dead_here: returns the ranks of this node known to be dead without MPI.
    """
    bell = Doorbell()
    size, rank = transport.size, transport.rank
    addresses = np.zeros((size, 4), np.uint64)
    addresses[rank] = bell.address
    # By messages of the transport: the mailbox is not in use yet.
    ring.allgather(transport, addresses.reshape(-1), [4 * r for r in range(size + 1)], deadline)
    reached = np.zeros((size, size), np.uint8)
    for peer in range(size):
        near = peer != rank and leaders[peer] == leaders[rank]
        reached[rank, peer] = peer == rank or (
            near and bell.connect(peer, addresses[peer].tolist())
        )
    # Also a barrier: no rank may close its pipe before all ranks have opened it.
    ring.allgather(transport, reached.reshape(-1), [size * r for r in range(size + 1)], deadline)
    return Channel(mailbox, bell, dead_here, woken_by_all=bool(reached[:, rank].all()))


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close channels in a forked child, and leave mailbox and pipes to the parent."""
    for channel in list(_channels):
        # The threads that receive do not exist in the child.
        channel._closed = True
        channel._lock = threading.Lock()  # another thread of the parent may have held it


in_child(_close_in_child)


class Channel:
    """Sends messages from any thread, and receives messages in one thread; see `open_channel`.

    Args:
        mailbox: carries headers and long frames.
        bell: this rank's doorbell.
        dead_here: returns the dead ranks of this node.
        woken_by_all: whether every other rank can ring this rank's doorbell.
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
        # Several threads may send, and a mailbox takes sends of one thread at a time.
        self._lock = threading.Lock()  # guards the state that `send` changes
        self._sent: deque[PendingMessage] = deque()  # not known to be complete
        self._arriving: dict[int, deque[_PartialMessage]] = {}
        self._buffers = BufferPool()
        self._moved = time.monotonic()  # time of the last send or receive
        self._closed = False
        _channels.add(self)

    @property
    def dead(self) -> frozenset[int]:
        """Ranks known to be dead: on this node, and on other nodes if MPI survives dead ranks."""
        return self._mailbox.dead().union(self._dead_here())

    def send(self, dest: int, frames: Sequence[Bytes]) -> None:
        """Start sending a message without waiting for the receiver; from any thread.

        Args:
            dest: a rank, not this one.
            frames: bytes or contiguous arrays, at most 65,536. Do not change long arrays before the
                receiver has answered. Messages to a dead rank are dropped.

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
            # MPI would report an error for a dead rank.
            if dest in self._mailbox.dead():
                return
            # Header and frames without another message in between: the receiver pairs them by
            # order.
            under_way = [self._mailbox.send_nowait(head, dest)]
            under_way += [self._mailbox.send(frame, dest) for frame in long]
            # Short messages have gone by now, and need no poll.
            under_way = [delivery for delivery in under_way if not delivery.done()]
            self._sent.extend(under_way)
            self._moved = time.monotonic()
            # After the start, so that the receiver finds the message when it wakes up.
            self._bell.ring(dest)
            if under_way:
                self._bell.ring()  # the receiving thread must poll MPI until the message has gone

    def poll(self) -> ReceivedMessage | None:
        """Return a message that has arrived, or None; only in the receiving thread.

        Messages of one rank keep their order.

        Raises:
            CollectiveError: the data is not a message, or MPI reports an error.
        """
        for _ in range(_LOOKS):
            while (found := self._mailbox.poll()) is not None:
                source, head = found
                self._moved = time.monotonic()
                with contextlib.suppress(PeerFailure):  # the sender died during the message
                    arriving = _PartialMessage(self._mailbox, source, head, self._buffers.take)
                    self._arriving.setdefault(source, deque()).append(arriving)
        with self._lock:
            while self._sent and self._sent[0].done():
                self._sent.popleft()
                self._moved = time.monotonic()
        for source in list(self._arriving):
            queue = self._arriving[source]
            try:
                # Only the first message of a source: later ones must not overtake it.
                if not queue[0].done():
                    continue
            except PeerFailure:
                # The rest of the messages will never arrive.
                del self._arriving[source]
                continue
            frames = queue.popleft().frames
            # Removed and inserted again, which moves the source to the end.
            del self._arriving[source]
            if queue:
                self._arriving[source] = queue  # at the end, so that every source gets its turn
            self._moved = time.monotonic()
            return ReceivedMessage(source, frames)
        return None

    def wait(self, seconds: float) -> None:
        """Sleep until a message may have arrived, `wake` is called, or `seconds` have passed."""
        # Naps grow with the idle time, because an answer often follows a transfer.
        idle = time.monotonic() - self._moved
        # MPI moves pieces of long messages only while it is polled.
        unfinished = bool(self._arriving or self._sent)
        if unfinished and idle < self._pace.yields:
            os.sched_yield()
            return
        pace = _UNDER_WAY if unfinished else self._pace
        nap = min(seconds, pace.nap(idle))
        # The kernel rounds short waits on a pipe up, which would delay a transfer.
        if nap < _SHORTEST_BELL and (unfinished or not self._woken):
            time.sleep(nap)
        else:
            self._bell.wait(nap)

    def wake(self) -> None:
        """End the current or next `wait` of this rank; from any thread."""
        # The byte stays in the pipe, so a ring before the wait is not lost.
        self._bell.ring()

    @property
    def idle(self) -> bool:
        """Whether all sent data has left this rank."""
        return not self._sent

    def close(self, *, all_together: bool = False) -> None:
        """Release the channel; harmless when repeated.

        Args:
            all_together: whether all ranks close now, without pending messages.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._mailbox.close(all_together=all_together)
                self._bell.close()


class _PartialMessage:
    """A message whose header has arrived, and whose long frames are in transfer."""

    def __init__(
        self, mailbox: Mailbox, source: int, head: Array, buffer: Callable[[int], Array]
    ) -> None:
        self.frames: list[Array] = []
        self._coming: deque[PendingMessage] = deque()
        # Receives are posted at once, in the order of the frames.
        for length, start in decode(head, source):
            if start is None:
                frame = buffer(length)
                self._coming.append(mailbox.receive(frame, source))
            else:
                # A view: the frame keeps the header's memory alive.
                frame = head[start : start + length]
            self.frames.append(frame)

    def done(self) -> bool:
        while self._coming:
            if not self._coming[0].done():
                return False
            self._coming.popleft()
        return True
