"""Send and receive one array between two ranks, never waiting without a limit.

Algorithms see a `Transport`: two operations that start a message (`start_send`, `start_receive`)
and one that waits for some of them. A message that has been started holds a reference to its
memory until it is complete, also when a wait ends with an error.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from collectives.arrays import Array, raw_bytes
from collectives.errors import CollectiveError, CollectiveTimeout, MismatchError, PeerFailure

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Deadline", "Message", "MpiTransport", "Transport"]

log = logging.getLogger(__name__)

# A wait polls without a pause this often (about 0.5 us each: the time in which an answer to a
# small message comes), then gives its core away after each poll, and, once a call is older than
# `_DROWSY` seconds, sleeps `_NAP` seconds between polls: a rank that waits for a slow one must not
# take the core that the slow one needs.
_SPINS = 200
_DROWSY = 0.02
_NAP = 0.0005

# MPI counts are ints in many builds; longer arrays go as several messages.
_MESSAGE_BYTES = 1 << 30

_TAG = 1


class Deadline:
    """When one call of one operation has waited long enough.

    Args:
        operation: the name that errors and log lines carry.
        limit: seconds from now.
        warn_after: seconds from now after which a wait is reported once.
    """

    def __init__(self, operation: str, limit: float, warn_after: float = float("inf")) -> None:
        self.operation = operation
        self.limit = limit
        self._warn_after = warn_after
        self._start = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._start

    def check(self, rank: int, size: int, pending: Sequence[Message]) -> None:
        """Report a stall once, and raise `CollectiveTimeout` when the time is over."""
        waited = self.waited
        if waited > self.limit:
            raise CollectiveTimeout(
                f"{self.operation}: no answer within {self.limit:g} s, still waiting for "
                f"{_describe(pending)} (rank {rank} of {size})"
            )
        if waited > self._warn_after:
            self._warn_after = float("inf")
            log.warning(
                "[%d/%d] %s has waited %.0f s for %s",
                rank, size, self.operation, waited, _describe(pending),
            )  # fmt: skip


class Message(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Make progress and tell whether the memory may be used again.

        Raises:
            MismatchError: the other side sent another number of bytes.
            PeerFailure: the other side is dead.
        """

    def describe(self) -> str:
        """Say whom this waits for: "rank 3 to send 8 bytes"."""


def _describe(pending: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(message.describe() for message in pending))


class _Nothing:
    """A message of no bytes: both sides know that nothing has to be sent."""

    def done(self) -> bool:
        return True

    def describe(self) -> str:
        return "nothing"


class Transport(ABC):
    """Messages among `size` ranks, of which this one is `rank`.

    Messages between two ranks arrive in the order in which they were started. Arrays are
    contiguous; both sides must name the same number of bytes.
    """

    rank: int
    size: int

    @abstractmethod
    def _start_send(self, data: Array, dest: int) -> Message:
        """Start sending a contiguous array of at least one byte."""

    @abstractmethod
    def _start_receive(self, into: Array, source: int) -> Message:
        """Start receiving into a contiguous array of at least one byte."""

    @abstractmethod
    def _abandon(self) -> None:
        """Keep the memory of every message under way for the rest of the process's life."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """Make a transport for the ranks that name the same color, ordered by key, then rank."""

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; closing twice is harmless."""

    def start_send(self, data: Array, dest: int) -> Message:
        """Start sending `data`; it must not change until the message is done."""
        return self._start_send(data, dest) if data.size else _Nothing()

    def start_receive(self, into: Array, source: int) -> Message:
        """Start receiving exactly `into.nbytes` bytes; `into` is undefined until done."""
        return self._start_receive(into, source) if into.size else _Nothing()

    def wait(self, messages: Sequence[Message], deadline: Deadline) -> None:
        """Wait until every message is done.

        Raises:
            CollectiveTimeout: the deadline has passed; names the ranks that are missing.
            PeerFailure: a rank is dead.
            MismatchError: a rank sent another number of bytes.
        """
        pending = list(messages)
        polls = 0
        try:
            while pending := [m for m in pending if not m.done()]:
                polls += 1
                if polls > _SPINS:
                    deadline.check(self.rank, self.size, pending)
                    self._pause(deadline)
        except BaseException:
            self._abandon()
            raise

    def _pause(self, deadline: Deadline) -> None:
        """Let others have the core between two polls."""
        if deadline.waited < _DROWSY:
            os.sched_yield()
        else:
            time.sleep(_NAP)

    def send(self, data: Array, dest: int, deadline: Deadline) -> None:
        """Send `data` and wait until its memory may be used again."""
        self.wait([self.start_send(data, dest)], deadline)

    def receive(self, into: Array, source: int, deadline: Deadline) -> None:
        """Receive exactly `into.nbytes` bytes."""
        self.wait([self.start_receive(into, source)], deadline)

    def exchange(
        self, data: Array, dest: int, into: Array, source: int, deadline: Deadline
    ) -> None:
        """Send to one rank while receiving from another, or the same one."""
        # The receive is posted first, so that data arrives where it belongs without a detour.
        receive = self.start_receive(into, source)
        self.wait([receive, self.start_send(data, dest)], deadline)


# Memory of messages that were under way when a wait ended with an error: MPI may still read or
# write it, so it is never released.
_abandoned: list[set[Message]] = []


class MpiTransport(Transport):
    """Messages over a private duplicate of an MPI communicator.

    Args:
        comm: the ranks that take part. Collective: all of them must construct it together.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.mpi = comm.Dup()
        self.rank = self.mpi.Get_rank()
        self.size = self.mpi.Get_size()
        self._live: set[Message] = set()

    def _start_send(self, data: Array, dest: int) -> Message:
        with _errors_of(self):
            return _MpiMessage(self, self.mpi.Isend, data, dest, "receive")

    def _start_receive(self, into: Array, source: int) -> Message:
        with _errors_of(self):
            return _MpiMessage(self, self.mpi.Irecv, into, source, "send")

    def watch(self, start: Callable[..., MPI.Request], *arguments: Any) -> Message:
        """Start an operation of MPI's own, such as a non-blocking collective, as a message."""
        with _errors_of(self):
            return _MpiRequest(self, start(*arguments), arguments)

    def _abandon(self) -> None:
        if self._live not in _abandoned:
            _abandoned.append(self._live)

    def split(self, color: int | None, key: int) -> MpiTransport | None:
        """Make a transport over MPI for the ranks that name the same color."""
        from mpi4py import MPI

        part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        transport = MpiTransport(part)
        part.Free()
        return transport

    def close(self) -> None:
        """Free the communicator, unless messages are under way or MPI has ended."""
        from mpi4py import MPI

        # With messages under way, freeing would wait for what never becomes complete.
        if self.mpi != MPI.COMM_NULL and not MPI.Is_finalized() and not self._live:
            self.mpi.Free()


class _MpiMessage:
    """One array as one or several MPI messages of bytes."""

    def __init__(
        self, transport: MpiTransport, start: Any, array: Array, peer: int, verb: str
    ) -> None:
        from mpi4py import MPI

        self._transport = transport
        self._peer = peer
        self._verb = verb
        self._array = raw_bytes(array)
        self._status = MPI.Status()
        self._requests: list[tuple[MPI.Request, int]] = []
        transport._live.add(self)
        for at in range(0, self._array.size, _MESSAGE_BYTES):
            part = self._array[at : at + _MESSAGE_BYTES]
            self._requests.append((start([part, part.size, MPI.BYTE], peer, _TAG), part.size))

    def done(self) -> bool:
        while self._requests:
            request, expected = self._requests[0]
            with _errors_of(self._transport):
                if not request.Test(self._status):
                    return False
            del self._requests[0]
            got = self._status.count
            if self._verb == "send" and got != expected:
                self._transport._live.discard(self)
                raise self._wrong_length(expected, got)
        self._transport._live.discard(self)
        return True

    def describe(self) -> str:
        return f"rank {self._peer} to {self._verb} {self._array.size} bytes"

    def _wrong_length(self, expected: int, got: int) -> MismatchError:
        return MismatchError(
            f"receive: rank {self._peer} sent an array of another length, expected {expected} "
            f"bytes, got {got} (rank {self._transport.rank} of {self._transport.size})"
        )


class _MpiRequest:
    """A request of MPI's own, with the memory that it uses."""

    def __init__(
        self, transport: MpiTransport, request: MPI.Request, memory: tuple[Any, ...]
    ) -> None:
        self._transport = transport
        self._request = request
        self._memory = memory
        transport._live.add(self)

    def done(self) -> bool:
        with _errors_of(self._transport):
            finished = bool(self._request.Test())
        if finished:
            self._transport._live.discard(self)
        return finished

    def describe(self) -> str:
        return "the other ranks to enter MPI's own operation"


class _errors_of:  # noqa: N801  (reads as a clause: with _errors_of(transport))
    """Turn MPI's exceptions into ours.

    A class and not a generator: entering costs 0.1 us instead of 1 us, on a path that is taken
    several times for every message.
    """

    __slots__ = ("_transport",)

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            return
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            return
        where = f"(rank {self._transport.rank} of {self._transport.size})"
        code = error.Get_error_class()
        if code in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED):
            raise PeerFailure(f"message: a rank is dead: {error} {where}") from error
        if code == MPI.ERR_TRUNCATE:
            raise MismatchError(
                f"receive: the other rank sent an array that is longer than expected {where}"
            ) from error
        raise CollectiveError(f"message: MPI reports an error: {error} {where}") from error
