"""Transport interface: send and receive one array, with a deadline.

Algorithms see a `Transport`: two operations that start a message (`start_send`, `start_receive`)
and one that waits for some of them. A message that has been started holds a reference to its
memory until it is complete, also when a wait ends with an error.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import device
from collectives.arrays.host_arrays import Array
from collectives.core.errors import LaunchError
from collectives.transport.backoff import (
    POLLS,
    Backoff,
    CompletedWait,
    Deadline,
    PendingMessage,
    RankSet,
    describe_ranks,
    this_thread,
)
from collectives.transport.mailbox import Mailbox

__all__ = ["Deadline", "NativeMpi", "PendingMessage", "Transport", "describe_ranks", "this_thread"]


# A message of no bytes: both sides know that nothing has to be sent.
_NOTHING = CompletedWait("nothing", (), has_come=True)


class NativeMpi(NamedTuple):
    """What compiled code needs to send messages by MPI.

    Attributes:
        isend: address of `MPI_Isend`; the next two likewise.
        comm: MPI's handle as a number; the next one likewise.
        tag: of all messages of the transport.
    """

    isend: int
    irecv: int
    test: int
    comm: int
    byte: int
    tag: int


class Transport(RankSet, ABC):
    """Messages among `size` ranks, of which this one is `rank`.

    Messages between two ranks arrive in the order in which they were started. Arrays are
    contiguous; both sides must name the same number of bytes. One thread at a time uses it.
    """

    @property
    def parent(self) -> Transport:
        """The group by whose numbers errors name ranks: another one if this is a part of it."""
        return self

    def parent_rank(self, rank: int) -> int:
        """Return the number that a rank of this transport has in the whole group."""
        return rank

    @property
    def native_mpi(self) -> NativeMpi | None:
        """How compiled code sends messages here, which meet those of Python; None if it cannot.

        Equal on all ranks, but for the numbers.

        Raises:
            LaunchError: MPI was started without support for calls of this thread.
        """
        return None

    def error_of(self, code: int, operation: str) -> RuntimeError:
        """Return what an error means that MPI has told compiled code."""
        raise NotImplementedError(f"error_of: {type(self).__name__} has no compiled messages")

    def retain(self, memory: object) -> None:
        """Never release what messages of compiled code may still read or write."""
        raise NotImplementedError(f"keep: {type(self).__name__} has no compiled messages")

    @abstractmethod
    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        """Start sending a contiguous array of at least one byte."""

    @abstractmethod
    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving into a contiguous array of at least one byte."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """Make a transport for the ranks that name the same color, ordered by key, then rank."""

    def members(self, ranks: Sequence[int], tag: int) -> Transport:
        """Make a transport for some ranks, in this order, which alone call this, with one tag."""
        raise NotImplementedError(f"members: {type(self).__name__} is only a part of a transport")

    def shrink(self, deadline: Deadline) -> tuple[Transport, list[int]]:
        """Make a transport for the ranks that live; *collective* over these.

        Returns:
            It, and the numbers that its ranks have here.

        Raises:
            CollectiveTimeout: a rank that lives has not come.
            LaunchError: the ranks cannot outlive each other.
        """
        kind = type(self).__name__
        raise LaunchError(f"shrink: ranks of {kind} do not outlive each other")

    def agree(self, flag: bool, deadline: Deadline) -> bool:
        """Tell whether all say yes, and none is dead: the same on all that live; *collective*.

        Errors as `shrink`.
        """
        raise LaunchError(f"agree: ranks of {type(self).__name__} do not outlive each other")

    def revoke(self) -> None:  # noqa: B027  (not every transport can do that)
        """Let all ranks leave what they do here, with `PeerFailure`; nothing can follow."""

    def channel(self, number: int | None = None) -> Transport:
        """Return messages among the same ranks that never meet those of this; sends nothing.

        It is the same transport under another tag, and closes with it.

        Args:
            number: of the lane, up to 16,383; None for the one of `send` and `recv`.
        """
        raise NotImplementedError(f"lane: {type(self).__name__} is only a part of a transport")

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending at least one byte of which the other side does not know; on a lane."""
        raise NotImplementedError(f"post: {type(self).__name__} is only a part of a transport")

    def poll_mailbox(self) -> tuple[int, Array] | None:
        """Return the next head that has come, from whomever, and its source; on a lane.

        Those of one rank come in the order in which it has posted them; errors as `wait`.
        """
        raise NotImplementedError(f"collect: {type(self).__name__} is only a part of a transport")

    def open_mailbox(self) -> Mailbox:
        """Make a mailbox for the same ranks, independent of this transport; *collective*."""
        kind = type(self).__name__
        raise NotImplementedError(f"open_mailbox: {kind} is only a part of a transport")

    def to_mpi(self) -> Any:
        """Make a communicator of mpi4py with the same ranks; *collective*.

        Raises:
            TypeError: the ranks are not processes of MPI.
        """
        raise TypeError(f"to_mpi: the ranks are not processes of MPI, but of {type(self).__name__}")

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; closing twice is harmless."""

    def check_peers(  # noqa: B027  (not every transport can tell)
        self, operation: str, peers: Sequence[int] = ()
    ) -> None:
        """Raise `PeerFailure` if any rank is known to be dead, also one that nothing is due from.

        Also if one that something is due from is known to have ended its program. A wait does this
        by itself; who waits without messages has to call it, some times a second.

        Args:
            operation: the name that the error carries.
            peers: the ranks that this one waits for.
        """

    def propagate_failure(self, rank: int, how: str) -> None:  # noqa: B027  (not every transport can tell)
        """Tell ranks that wait for this one why it fails: another one of the group has left.

        Args:
            rank: who has left.
            how: as errors say it.
        """

    def blocking_rank(self, pending: Sequence[PendingMessage]) -> str | None:
        """Name the rank that all wait for; "" if it owes one of `pending`, None if unknown."""
        return None

    def check_threads(self, operation: str) -> None:  # noqa: B027  (most transports do not mind)
        """Refuse to be used by several threads at a time, this transport and others like it.

        Raises:
            LaunchError: MPI was started without support for that.
        """

    def progress(self) -> None:  # noqa: B027  (not every transport needs it)
        """Move on messages that are under way while this rank waits for something else."""

    def _explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return what an error means to callers, who know nothing of how messages travel."""
        return error

    def start_send(self, data: Array, dest: int) -> PendingMessage:
        """Start sending `data`; it must not change until the message is done."""
        if type(data) is not np.ndarray:  # whose memory needs no look: 0.1 us
            device.synchronize(data)
        return self._start_send(data, dest) if data.size else _NOTHING

    def start_receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving exactly `into.nbytes` bytes; `into` is undefined until done."""
        if type(into) is not np.ndarray:
            device.synchronize(into)
        return self._start_receive(into, source) if into.size else _NOTHING

    def poll(self, message: PendingMessage, operation: str) -> bool:
        """Tell whether a message is done, without waiting; errors as those of `wait`."""
        try:
            return message.done()
        except RuntimeError as error:
            meaning = self._explain(error, operation)
            if meaning is error:
                raise
            raise meaning from error

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        """Wait until every message is done.

        Raises:
            CollectiveTimeout: the deadline has passed; names the ranks that are missing.
            PeerFailure: a rank is dead, whether or not this one waits for it.
            MismatchError: a rank sent another number of bytes.
        """
        waits = deadline.waits
        began = 0 if waits is None else time.monotonic_ns()
        try:
            # One after the other: each poll moves all messages that are under way.
            for message in messages:
                polls = 0
                while not message.done():
                    polls += 1
                    if polls > POLLS:
                        self._wait_long(messages, deadline)
        except RuntimeError as error:
            meaning = self._explain(error, deadline.operation)
            if meaning is error:
                raise
            raise meaning from error
        if waits is not None:
            waits.waited(began, messages)

    def _wait_long(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        """Wait while leaving the core to others, and look after the other ranks."""
        wait = Backoff()
        while pending := [message for message in messages if not message.done()]:
            deadline.check(self, pending, self.blocking_rank)
            if wait.pause():
                peers = [rank for message in pending for rank in message.peers]
                self.check_peers(deadline.operation, list(dict.fromkeys(peers)))

    def send(self, data: Array, dest: int, deadline: Deadline) -> None:
        """Send `data` and wait until its memory may be used again."""
        self.wait((self.start_send(data, dest),), deadline)

    def receive(self, into: Array, source: int, deadline: Deadline) -> None:
        """Receive exactly `into.nbytes` bytes."""
        self.wait((self.start_receive(into, source),), deadline)

    def exchange(
        self, data: Array, dest: int, into: Array, source: int, deadline: Deadline
    ) -> None:
        """Send to one rank while receiving from another, or the same one."""
        # The receive is posted first, so that data arrives where it belongs without a detour.
        receive = self.start_receive(into, source)
        self.wait((receive, self.start_send(data, dest)), deadline)
