"""MPI messages on a private communicator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from collectives.arrays.host_arrays import Array, raw_bytes

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

from collectives.core.errors import MismatchError

__all__ = ["MpiEndpoint", "MpiRequest", "MessageOwner", "is_death"]

# MPI counts are C ints in many builds, so longer arrays are sent as several messages.
_MESSAGE_BYTES = 1 << 30

# Closed communicators, and how many are kept before the first is freed. MPI reuses the context id
# of a freed communicator. A message that was never received, and that arrives only then, or in
# MPICH earlier, would match a receive of the new communicator.
_closed: deque[MPI.Comm] = deque()
_MOST_CLOSED = 16

# Every MPI sends messages of this size eagerly, so receiving an arrived one does not block.
_AT_ONCE_BYTES = 1024

# Abandoned messages whose memory MPI may still read or write, and communicators that may still get
# messages: never released.
_abandoned: list[object] = []


def is_death(error: RuntimeError) -> bool:
    """Return whether an MPI error means that a rank is dead or the communicator is revoked."""
    codes = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
    codes -= {MPI.ERR_UNKNOWN}  # the value of these classes in a library without them
    return isinstance(error, MPI.Exception) and error.Get_error_class() in codes


class MessageOwner(Protocol):
    """Sender and receiver of messages: a transport or a mailbox."""

    endpoint: MpiEndpoint

    # For the lengths of received messages; None if several threads poll, or lengths are not
    # checked.
    status: MPI.Status | None

    def name(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, for errors."""

    @property
    def where(self) -> str:
        """This rank, for the end of an error."""

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Raise the library's error for MPI's error, or abandon the message and return True."""


class MpiRequest:
    """One array as one or several MPI messages, or an operation of MPI.

    Args:
        owner: transport or mailbox of the message.
        memory: memory that MPI reads or writes, kept until completion.
        peer: the rank on the other side.
        verb: the peer's action: "send", "receive", or "enter" an operation of MPI.
    """

    __slots__ = ("_left", "_memory", "_owner", "_peer", "_requests", "verb")

    def __init__(self, owner: MessageOwner, memory: Any, peer: int, verb: str) -> None:
        self._owner = owner
        self._memory = memory
        self._peer = peer
        self.verb = verb
        self._requests: list[MPI.Request] = []
        self._left = 0  # bytes of the incomplete parts

    def start(self, begin: Callable[..., MPI.Request], tag: int) -> MpiRequest:
        """Send or receive the memory by `Isend` or `Irecv`; return this message."""
        array: Array = self._memory
        endpoint = self._owner.endpoint
        self._left = nbytes = array.nbytes
        try:
            if nbytes <= _MESSAGE_BYTES:  # the common case, kept short for latency
                self._requests.append(begin((array, nbytes, endpoint.byte), self._peer, tag))
                endpoint.live.add(self)
                return self
            flat = raw_bytes(array)
            for at in range(0, nbytes, _MESSAGE_BYTES):
                part = flat[at:][:_MESSAGE_BYTES]
                self.add(begin((part, part.nbytes, endpoint.byte), self._peer, tag))
        except RuntimeError as error:
            self._owner.lost(self, error)
        return self

    def add(self, request: MPI.Request) -> None:
        """Add an MPI request, for which `done` then also waits."""
        self._requests.append(request)
        self._owner.endpoint.live.add(self)

    def done(self) -> bool:
        """Make progress, and return whether the memory may be reused."""
        requests = self._requests
        if not requests:
            return True
        owner = self._owner
        status = owner.status
        while requests:
            try:
                if not requests[0].Test(status):
                    return False
            except RuntimeError as error:
                return owner.lost(self, error)
            del requests[0]
            if not requests:
                owner.endpoint.live.discard(self)
            # The peer sends, so this is a receive: only there MPI reports the length of the data.
            if status is not None and self.verb == "send":
                expected = self._left if self._left < _MESSAGE_BYTES else _MESSAGE_BYTES
                self._left -= expected
                if status.count != expected:
                    raise self._wrong_length(expected, status.count)
        return True

    def give_up(self) -> bool:
        """Count as complete; requests that may still be pending keep their memory."""
        if self._requests:
            _abandoned.append({self})
            self._requests = []
        self._owner.endpoint.live.discard(self)
        return True

    def describe(self) -> str:
        """Return the event that this waits for."""
        if self.verb == "enter":
            return "the other ranks to enter MPI's own operation"
        return f"{self._owner.name([self._peer])} to {self.verb} {self._memory.nbytes} bytes"

    @property
    def peers(self) -> Sequence[int]:
        """The awaited rank."""
        return (self._peer,)

    def _wrong_length(self, expected: int, got: int) -> MismatchError:
        return MismatchError(
            f"receive: {self._owner.name([self._peer])} sent an array of another length, "
            f"expected {expected} bytes, got {got} ({self._owner.where})"
        )


class MpiEndpoint:
    """A private communicator, and its pending messages.

    Args:
        comm: the ranks. *Collective*: all of them must construct the endpoint.
        owned: whether `comm` was made for this endpoint alone, and needs no duplicate.
    """

    def __init__(self, comm: MPI.Comm, owned: bool = False) -> None:
        self.mpi = comm if owned else comm.Dup()
        self.byte = MPI.BYTE
        # Messages whose memory must not be released while MPI may access it.
        self.live: set[MpiRequest] = set()
        self.kept: list[object] = []  # the same for messages that compiled code has started
        self._found = MPI.Status()
        self._any = MPI.ANY_SOURCE

    @property
    def handles(self) -> tuple[int, int]:
        """MPI handles of the communicator and of MPI_BYTE, as numbers."""
        return MPI._handleof(self.mpi), MPI._handleof(self.byte)

    def take(self, tag: int) -> tuple[int, Array] | None:
        """Return an arrived unsolicited message and its source; None if there is none."""
        message = self.mpi.Improbe(self._any, tag, self._found)
        if message is None:
            return None
        source, data = self._found.source, np.empty(self._found.count, np.uint8)
        message.Recv((data, data.size, self.byte))
        return source, data

    def dead(self) -> list[int]:
        """Return the ranks that MPI knows to be dead; empty if MPI does not report deaths."""
        try:
            failed = self.mpi.Get_failed()
        except (NotImplementedError, MPI.Exception):
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

    def free(self) -> None:
        """Close the communicator, unless messages are pending or MPI has ended."""
        # With pending messages `Comm.Free` would wait for messages that never complete.
        under_way = self.live or self.kept
        if self.mpi != MPI.COMM_NULL and not MPI.Is_finalized() and not under_way:
            _closed.append(self.mpi)
            self.mpi = MPI.COMM_NULL
            while len(_closed) > _MOST_CLOSED:
                self._free_closed(_closed.popleft())

    def _free_closed(self, closed: MPI.Comm) -> None:
        """Receive leftover messages and free a communicator; keep it if that might block."""
        try:
            while closed.Iprobe(self._any, MPI.ANY_TAG, self._found):
                if self._found.count > _AT_ONCE_BYTES:
                    _abandoned.append(closed)
                    return
                data = np.empty(self._found.count, np.uint8)
                closed.Recv((data, self.byte), self._found.source, self._found.tag)
            closed.Free()
        except MPI.Exception:  # one of its ranks has died, which does not concern this call
            _abandoned.append(closed)

    def __del__(self) -> None:
        # An error or Ctrl-C that ended an operation leaves messages incomplete.
        for memory in (getattr(self, "live", None), getattr(self, "kept", None)):
            if memory:
                _abandoned.append(memory)
