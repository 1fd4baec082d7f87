"""Transport interface: send and receive one array, with a deadline.

Algorithms see a `Transport`: two operations start a message (`start_send`, `start_receive`), and
one waits for some messages. A started message holds a reference to its memory until it is
complete, even if a wait raises.
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


# A message of no bytes is complete at once, because both sides know its length.
_NOTHING = CompletedWait("nothing", (), has_come=True)


class NativeMpi(NamedTuple):
    """Addresses and handles with which compiled code sends MPI messages.

    Attributes:
        isend: address of `MPI_Isend`.
        irecv: address of `MPI_Irecv`.
        test: address of `MPI_Test`.
        comm: MPI handle of the communicator, as a number.
        byte: MPI handle of the datatype `MPI_BYTE`, as a number.
        tag: tag of all messages of the transport.
    """

    isend: int
    irecv: int
    test: int
    comm: int
    byte: int
    tag: int


class Transport(RankSet, ABC):
    """Messages among `size` ranks; this process is `rank`.

    Messages between two ranks arrive in the order in which they were started. Arrays are
    contiguous, and both sides must name the same number of bytes. A transport is used by one thread
    at a time.
    """

    @property
    def parent(self) -> Transport:
        """The group whose rank numbers errors use: the larger group if this is a part of one."""
        return self

    def parent_rank(self, rank: int) -> int:
        """Return the number of a rank of this transport in the parent group."""
        return rank

    @property
    def native_mpi(self) -> NativeMpi | None:
        """MPI functions and handles for compiled code; None if this transport has none.

        Compiled messages match Python's. All ranks return None, or none does.

        Raises:
            LaunchError: MPI was started without support for calls of this thread.
        """
        return None

    def error_of(self, code: int, operation: str) -> RuntimeError:
        """Return the exception for an MPI error code that compiled code has received."""
        raise NotImplementedError(f"error_of: {type(self).__name__} has no compiled messages")

    def retain(self, memory: object) -> None:
        """Keep memory for the life of the process, as compiled messages may still access it."""
        raise NotImplementedError(f"retain: {type(self).__name__} has no compiled messages")

    @abstractmethod
    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        """Start sending a contiguous array of at least one byte."""

    @abstractmethod
    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving into a contiguous array of at least one byte."""

    def split(self, color: int | None, key: int) -> Transport | None:
        """Return a transport for the ranks of one color, ordered by key, then rank; *collective*.

        Returns None to a rank whose color is None.
        """
        raise NotImplementedError(f"split: {type(self).__name__} has one group only")

    def members(self, ranks: Sequence[int], tag: int) -> Transport:
        """Return a transport for some ranks, in this order; *collective* over these ranks alone."""
        raise NotImplementedError(f"members: {type(self).__name__} is only a part of a transport")

    def shrink(self, deadline: Deadline) -> tuple[Transport, list[int]]:
        """Return a transport for the surviving ranks; *collective* over these.

        Returns:
            the transport, and the old number of each of its ranks.

        Raises:
            CollectiveTimeout: a surviving rank did not enter the call in time.
            LaunchError: the job does not survive the death of a rank.
        """
        kind = type(self).__name__
        raise LaunchError(f"shrink: ranks of {kind} do not outlive each other")

    def agree(self, flag: bool, deadline: Deadline) -> bool:
        """Return whether all ranks passed True and none is dead; *collective* over survivors.

        All surviving ranks return the same. Raises the errors of `shrink`.
        """
        raise LaunchError(f"agree: ranks of {type(self).__name__} do not outlive each other")

    def revoke(self) -> None:  # noqa: B027  (not every transport can do that)
        """Abort pending operations of all ranks with `PeerFailure`; the transport is unusable."""

    def channel(self, number: int | None = None) -> Transport:
        """Return a transport for the same ranks under another tag; sends nothing.

        Its messages never match those of this transport. Both share the communicator and its
        closing.

        Args:
            number: channel number, at most 16,383; None for the channel of `send` and `recv`.
        """
        raise NotImplementedError(f"channel: {type(self).__name__} is only a part of a transport")

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending an unsolicited message of at least one byte; only on a channel."""
        name = type(self).__name__
        raise NotImplementedError(f"send_nowait: {name} is only a part of a transport")

    def poll_mailbox(self) -> tuple[int, Array] | None:
        """Return the next unsolicited message of any rank, as (source, bytes); only on a channel.

        Messages of one rank arrive in the order of their sends. Raises the errors of `wait`.
        """
        name = type(self).__name__
        raise NotImplementedError(f"poll_mailbox: {name} is only a part of a transport")

    def open_mailbox(self) -> Mailbox:
        """Open a mailbox for the same ranks, independent of this transport; *collective*."""
        kind = type(self).__name__
        raise NotImplementedError(f"open_mailbox: {kind} is only a part of a transport")

    def to_mpi(self) -> Any:
        """Return an mpi4py communicator of the same ranks; *collective*.

        Raises:
            TypeError: the ranks are not MPI processes.
        """
        raise TypeError(f"to_mpi: the ranks are not processes of MPI, but of {type(self).__name__}")

    def close(self) -> None:  # noqa: B027  (parts of a transport own nothing)
        """Release the resources of the transport; closing twice is harmless."""

    def check_peers(  # noqa: B027  (not every transport can tell)
        self, operation: str, peers: Sequence[int] = ()
    ) -> None:
        """Raise `PeerFailure` if any rank is known to be dead, or a peer has ended its program.

        `wait` does this by itself. A wait without messages must call it several times a second.

        Args:
            operation: name of the operation, for the error.
            peers: the ranks that this one waits for.
        """

    def propagate_failure(self, rank: int, how: str) -> None:  # noqa: B027  (not every transport can tell)
        """Propagate the failure of `rank` to the ranks that wait for this one.

        Args:
            rank: the rank that has left.
            how: reason, in the words of the errors.
        """

    def blocking_rank(self, pending: Sequence[PendingMessage]) -> str | None:
        """Return the rank that all wait for; "" if it owes one of `pending`, None if unknown."""
        return None

    def check_threads(self, operation: str) -> None:  # noqa: B027  (most transports do not mind)
        """Raise unless several threads may use MPI at a time.

        Raises:
            LaunchError: MPI was started without support for that.
        """

    def progress(self) -> None:  # noqa: B027  (not every transport needs it)
        """Progress pending messages while this rank waits for something else."""

    def _explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return the library's exception for an error of MPI."""
        return error

    def start_send(self, data: Array, dest: int) -> PendingMessage:
        """Start sending `data`; it must not change until the message is complete."""
        # Host memory needs no synchronization; this test saves NumPy arrays 0.1 us per message.
        if type(data) is not np.ndarray:
            device.synchronize(data)
        return self._start_send(data, dest) if data.size else _NOTHING

    def start_receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving exactly `into.nbytes` bytes; `into` is undefined until complete."""
        if type(into) is not np.ndarray:
            device.synchronize(into)
        return self._start_receive(into, source) if into.size else _NOTHING

    def poll(self, message: PendingMessage, operation: str) -> bool:
        """Return whether a message is complete, without waiting; raises the errors of `wait`."""
        try:
            return message.done()
        except RuntimeError as error:
            meaning = self._explain(error, operation)
            if meaning is error:
                raise
            raise meaning from error

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        """Wait until every message is complete.

        Raises:
            CollectiveTimeout: the deadline has passed; names the missing ranks.
            PeerFailure: a rank is dead, whether or not this one waits for it.
            MismatchError: a rank sent another number of bytes.
        """
        waits = deadline.waits
        began = 0 if waits is None else time.monotonic_ns()
        try:
            # In order, without a look at all: each poll progresses all pending messages.
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
        """Wait with backoff, and check regularly whether the other ranks are alive."""
        wait = Backoff()
        # Tests all messages, which progresses each of them, and keeps the incomplete ones for
        # errors.
        while pending := [message for message in messages if not message.done()]:
            deadline.check(self, pending, self.blocking_rank)
            if wait.pause():
                peers = [rank for message in pending for rank in message.peers]
                self.check_peers(deadline.operation, list(dict.fromkeys(peers)))

    def send(self, data: Array, dest: int, deadline: Deadline) -> None:
        """Send `data`, and wait until its memory may be reused."""
        self.wait((self.start_send(data, dest),), deadline)

    def receive(self, into: Array, source: int, deadline: Deadline) -> None:
        """Receive exactly `into.nbytes` bytes."""
        self.wait((self.start_receive(into, source),), deadline)

    def exchange(
        self, data: Array, dest: int, into: Array, source: int, deadline: Deadline
    ) -> None:
        """Send to one rank while receiving from another, or the same one."""
        # The receive is posted first, so that MPI needs no buffer for data that arrives early.
        receive = self.start_receive(into, source)
        self.wait((receive, self.start_send(data, dest)), deadline)
