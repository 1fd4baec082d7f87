"""Send and receive one array between two ranks, never waiting without a limit.

Algorithms see a `Transport`: two operations that start a message (`start_send`, `start_receive`)
and one that waits for some of them. A message that has been started holds a reference to its
memory until it is complete, also when a wait ends with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from collectives import liveness
from collectives.arrays import Array, raw_bytes
from collectives.errors import CollectiveError, CollectiveTimeout, MismatchError, PeerFailure
from collectives.mail import Mail, MpiMail

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Deadline", "Message", "MpiTransport", "Transport", "this_thread"]

log = logging.getLogger(__name__)

# A wait polls without a pause this often (about 0.3 us each: the time in which an answer to a
# small message comes), then gives its core away after each poll, and after `_DROWSY` seconds sleeps
# between polls: a rank that waits for a slow one must not take the core that the slow one needs.
# A nap lasts a sixty-fourth of the time waited so far, so that it delays no operation by more than
# 2 %, and at most `_LONGEST_NAP` seconds: 200 polls per second cost 1 % of a core.
_SPINS = 200
_DROWSY = 0.02
_NAP_SHARE = 1 / 64
_LONGEST_NAP = 0.005

# Seconds between two looks at whether a rank that this one does not wait for has died.
_LOOK_EVERY = 0.1

# Seconds within which it becomes known who died, once it is known that somebody did.
_NAME_WITHIN = 1.0

# MPI counts are ints in many builds; longer arrays go as several messages.
_MESSAGE_BYTES = 1 << 30

_TAG = 1


class _Thread(threading.local):
    """What holds for the waits of one thread."""

    stop: threading.Event | None = None


# A thread that works for others puts an event here; when it is set, the thread's waits end.
this_thread = _Thread()


class Deadline:
    """When one call of one operation has waited long enough.

    Args:
        operation: the name that errors and log lines carry.
        limit: seconds from now.
        warn_after: seconds from now after which a wait is reported once.
        whereabouts: says which ranks have not come and what they last did, as far as is known.
    """

    def __init__(
        self,
        operation: str,
        limit: float,
        warn_after: float = float("inf"),
        whereabouts: Callable[[], str] = str,
    ) -> None:
        self.operation = operation
        self.limit = limit
        self._warn_after = warn_after
        self._whereabouts = whereabouts
        self._start = time.monotonic()
        self._stop = this_thread.stop

    @property
    def waited(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._start

    def check(self, rank: int, size: int, pending: Sequence[Message]) -> None:
        """Report a stall once, and raise `CollectiveTimeout` when the time is over.

        Raises:
            CollectiveError: this thread is told to stop.
        """
        if self._stop is not None and self._stop.is_set():
            raise CollectiveError(f"{self.operation}: stopped (rank {rank} of {size})")
        waited = self.waited
        if waited > self.limit:
            raise CollectiveTimeout(
                f"{self.operation}: no answer within {self.limit:g} s, still waiting for "
                f"{self._missing(pending)} (rank {rank} of {size})"
            )
        if waited > self._warn_after:
            self._warn_after = float("inf")
            log.warning(
                "[%d/%d] %s has waited %.0f s for %s",
                rank, size, self.operation, waited, self._missing(pending),
            )  # fmt: skip

    def _missing(self, pending: Sequence[Message]) -> str:
        due = ", ".join(dict.fromkeys(message.describe() for message in pending))
        known = self._whereabouts()
        return f"{due}; {known}" if known else due


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


class _Nothing:
    """A message of no bytes: both sides know that nothing has to be sent."""

    def done(self) -> bool:
        return True

    def describe(self) -> str:
        return "nothing"


class Transport(ABC):
    """Messages among `size` ranks, of which this one is `rank`.

    Messages between two ranks arrive in the order in which they were started. Arrays are
    contiguous; both sides must name the same number of bytes. One thread at a time uses it.
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
    def split(self, color: int | None, key: int) -> Transport | None:
        """Make a transport for the ranks that name the same color, ordered by key, then rank."""

    def open_mail(self) -> Mail:
        """Make mail between the same ranks, independent of this transport; *collective*."""
        raise NotImplementedError(f"open_mail: {type(self).__name__} is only a part of a transport")

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; closing twice is harmless."""

    def look_around(self, operation: str) -> None:  # noqa: B027  (not every transport can tell)
        """Raise `PeerFailure` if any rank is known to be dead, also one that nothing is due from.

        A wait does this by itself; who waits without messages has to call it, some times a second.

        Args:
            operation: the name that the error carries.
        """

    def _explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return what an error means to callers, who know nothing of how messages travel."""
        return error

    def start_send(self, data: Array, dest: int) -> Message:
        """Start sending `data`; it must not change until the message is done."""
        return self._start_send(data, dest) if data.size else _NOTHING

    def start_receive(self, into: Array, source: int) -> Message:
        """Start receiving exactly `into.nbytes` bytes; `into` is undefined until done."""
        return self._start_receive(into, source) if into.size else _NOTHING

    def wait(self, messages: Sequence[Message], deadline: Deadline) -> None:
        """Wait until every message is done.

        Raises:
            CollectiveTimeout: the deadline has passed; names the ranks that are missing.
            PeerFailure: a rank is dead, whether or not this one waits for it.
            MismatchError: a rank sent another number of bytes.
        """
        try:
            # One after the other: each poll moves all messages that are under way.
            for message in messages:
                polls = 0
                while not message.done():
                    polls += 1
                    if polls > _SPINS:
                        self._wait_long(messages, deadline)
        except RuntimeError as error:
            meaning = self._explain(error, deadline.operation)
            if meaning is error:
                raise
            raise meaning from error

    def _wait_long(self, messages: Sequence[Message], deadline: Deadline) -> None:
        """Wait while leaving the core to others, and look after the other ranks."""
        began = time.monotonic()
        look_at = began + _LOOK_EVERY
        while pending := [message for message in messages if not message.done()]:
            deadline.check(self.rank, self.size, pending)
            now = time.monotonic()
            if now > look_at:
                look_at = now + _LOOK_EVERY
                self.look_around(deadline.operation)
            if now - began < _DROWSY:
                os.sched_yield()
            else:
                time.sleep(min((now - began) * _NAP_SHARE, _LONGEST_NAP))

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


_NOTHING = _Nothing()


# Messages that nobody waits for any more although MPI may still read or write their memory: it is
# never released.
_abandoned: list[set[Message]] = []


class MpiTransport(Transport):
    """Messages over a private duplicate of an MPI communicator.

    Args:
        comm: the ranks that take part. Collective: all of them must construct it together.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        # Messages under way: their memory must not be released as long as MPI may touch it.
        self._live: set[Message] = set()
        self.mpi = comm.Dup()
        self.rank = self.mpi.Get_rank()
        self.size = self.mpi.Get_size()
        self._byte = MPI.BYTE
        self._status = MPI.Status()

    def _start_send(self, data: Array, dest: int) -> Message:
        return self._start(self.mpi.Isend, data, dest, "receive")

    def _start_receive(self, into: Array, source: int) -> Message:
        return self._start(self.mpi.Irecv, into, source, "send")

    def _start(self, start: Any, array: Array, peer: int, verb: str) -> Message:
        if array.nbytes > _MESSAGE_BYTES:
            flat = raw_bytes(array)
            cuts = range(0, flat.size, _MESSAGE_BYTES)
            return _Parts(
                [self._start(start, flat[at:][:_MESSAGE_BYTES], peer, verb) for at in cuts]
            )
        try:
            request = start((array, array.nbytes, self._byte), peer, _TAG)
        except RuntimeError as error:
            raise self._explain(error, f"message to or from rank {peer}") from error
        return _MpiMessage(self, request, array, peer, verb)

    def watch(self, start: Callable[..., MPI.Request], *arguments: Any) -> Message:
        """Start an operation of MPI's own, such as a non-blocking collective, as a message."""
        try:
            return _MpiRequest(self, start(*arguments), arguments)
        except RuntimeError as error:
            raise self._explain(error, "native") from error

    def split(self, color: int | None, key: int) -> MpiTransport | None:
        """Make a transport over MPI for the ranks that name the same color."""
        from mpi4py import MPI

        try:
            part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
            if part == MPI.COMM_NULL:
                return None
            transport = MpiTransport(part)
            part.Free()
        except RuntimeError as error:
            raise self._explain(error, "split") from error
        return transport

    def open_mail(self) -> MpiMail:
        """Make mail over MPI between the same ranks."""
        return MpiMail(self.mpi)

    def close(self) -> None:
        """Free the communicator, unless messages are under way or MPI has ended."""
        from mpi4py import MPI

        # With messages under way, freeing would wait for what never becomes complete.
        if self.mpi != MPI.COMM_NULL and not MPI.Is_finalized() and not self._live:
            self.mpi.Free()

    def __del__(self) -> None:
        # Messages are dropped unfinished when an error or Ctrl-C ended the operation.
        if self._live:
            _abandoned.append(self._live)

    def look_around(self, operation: str) -> None:
        """Ask MPI whether a rank has died, or another one has seen so."""
        try:
            self.mpi.Iprobe()  # MPI hears of anything only while it is called
        except RuntimeError as error:
            raise self._explain(error, operation) from error
        dead = self._dead()
        if dead:
            raise self._peer_failure(operation, dead)

    def _dead(self) -> list[int]:
        """Return the ranks of this transport that MPI knows to be dead."""
        from mpi4py import MPI

        try:
            failed = self.mpi.Get_failed()
        except (NotImplementedError, MPI.Exception):  # a library that does not tell
            return []
        count = failed.Get_size()
        ranks: list[int] = []
        if count:
            group = self.mpi.Get_group()
            ranks = failed.Translate_ranks(list(range(count)), group)
            group.Free()
        if failed != MPI.GROUP_EMPTY:
            failed.Free()
        return sorted(rank for rank in ranks if rank != MPI.UNDEFINED)

    def _explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            return error
        code = error.Get_error_class()
        if code in _death_codes():
            return self._peer_failure(operation, self._dead_soon())
        where = f"(rank {self.rank} of {self.size})"
        if code == MPI.ERR_TRUNCATE:
            return MismatchError(
                f"{operation}: the other rank sent an array that is longer than expected {where}"
            )
        return CollectiveError(f"{operation}: MPI reports an error: {error} {where}")

    def _peer_failure(self, operation: str, dead: Sequence[int]) -> PeerFailure:
        """Let all ranks leave their operations, and return the error for this one."""
        from mpi4py import MPI

        liveness.limit_exit()
        with contextlib.suppress(NotImplementedError, MPI.Exception):
            # Revoking twice can disturb the other ranks' way out.
            if not self.mpi.Is_revoked():
                self.mpi.Revoke()
        names = f"rank{'s' * (len(dead) > 1)} {' '.join(map(str, dead))}" if dead else "some rank"
        return PeerFailure(f"{operation}: {names} died (rank {self.rank} of {self.size})")

    def _dead_soon(self) -> list[int]:
        """Return who died; the news that somebody did may come before the news who."""
        from mpi4py import MPI

        give_up = time.monotonic() + _NAME_WITHIN
        while not (dead := self._dead()) and time.monotonic() < give_up:
            MPI.COMM_SELF.Iprobe()  # as in look_around; the group's own communicator only raises
            time.sleep(_LONGEST_NAP)
        return dead


def _death_codes() -> set[int]:
    """Return the error classes by which MPI says that a rank is dead."""
    from mpi4py import MPI

    codes = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
    return codes - {MPI.ERR_UNKNOWN}  # what a library without these classes has in their place


class _MpiMessage:
    """One array as one MPI message of bytes."""

    __slots__ = ("_memory", "_peer", "_request", "_transport", "_verb")

    def __init__(
        self, transport: MpiTransport, request: MPI.Request, memory: Array, peer: int, verb: str
    ) -> None:
        self._transport = transport
        self._request: MPI.Request | None = request
        self._memory = memory
        self._peer = peer
        self._verb = verb
        transport._live.add(self)

    def done(self) -> bool:
        request = self._request
        if request is None:
            return True
        transport = self._transport
        status = transport._status
        if not request.Test(status):
            return False
        self._request = None
        transport._live.discard(self)
        if self._verb == "send" and status.count != self._memory.nbytes:
            raise self._wrong_length(status.count)
        return True

    def describe(self) -> str:
        return f"rank {self._peer} to {self._verb} {self._memory.nbytes} bytes"

    def _wrong_length(self, got: int) -> MismatchError:
        return MismatchError(
            f"receive: rank {self._peer} sent an array of another length, expected "
            f"{self._memory.nbytes} bytes, got {got} (rank {self._transport.rank} of "
            f"{self._transport.size})"
        )


class _Parts:
    """One array as several messages, because its length is no count for MPI."""

    def __init__(self, parts: Sequence[Message]) -> None:
        self._parts = list(parts)

    def done(self) -> bool:
        while self._parts and self._parts[0].done():
            del self._parts[0]
        return not self._parts

    def describe(self) -> str:
        return self._parts[0].describe() if self._parts else "nothing"


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
        finished = bool(self._request.Test())
        if finished:
            self._transport._live.discard(self)
        return finished

    def describe(self) -> str:
        return "the other ranks to enter MPI's own operation"
