"""MPI messages on a private communicator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from collectives.arrays.host_arrays import Array, raw_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

from collectives.core.errors import MismatchError

__all__ = ["MpiEndpoint", "MpiRequest", "MessageOwner", "is_death"]

# MPI counts are ints in many builds; longer arrays go as several messages.
_MESSAGE_BYTES = 1 << 30

# Communicators that are closed, and how many of them are kept before the first is freed. MPI gives
# the number of one that was freed to a new one: a message that nobody has received, and that comes
# only then, or in MPICH has come before, would be taken for one of the new communicator.
_closed: deque[MPI.Comm] = deque()
_MOST_CLOSED = 16

# Every MPI sends so few bytes at once, so that receiving what has come waits for nobody.
_AT_ONCE_BYTES = 1024

# Messages that nobody waits for any more although MPI may still read or write their memory, and
# communicators that may still get some: never released.
_abandoned: list[object] = []


def is_death(error: RuntimeError) -> bool:
    """Tell whether MPI says by an error that a rank is dead."""
    from mpi4py import MPI

    codes = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
    codes -= {MPI.ERR_UNKNOWN}  # what a library without these classes has in their place
    return isinstance(error, MPI.Exception) and error.Get_error_class() in codes


class MessageOwner(Protocol):
    """Who sends and receives messages."""

    endpoint: MpiEndpoint

    # For the lengths of what arrives; None where several threads look, or nobody minds.
    status: MPI.Status | None

    def name(self, ranks: Sequence[int]) -> str:
        """Name ranks."""

    @property
    def where(self) -> str:
        """This rank, as the last words of an error."""

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Raise what MPI's error means, or give the message up: then it counts as done."""


class MpiRequest:
    """One array as one or several messages of MPI, or an operation of MPI's own.

    Args:
        owner: whose it is.
        memory: what MPI reads or writes, kept until it has done so.
        peer: the rank on the other side.
        verb: what that one does: "send", "receive", or "enter" an operation of MPI's own.
    """

    __slots__ = ("_left", "_memory", "_owner", "_peer", "_requests", "verb")

    def __init__(self, owner: MessageOwner, memory: Any, peer: int, verb: str) -> None:
        self._owner = owner
        self._memory = memory
        self._peer = peer
        self.verb = verb
        self._requests: list[MPI.Request] = []
        self._left = 0  # bytes of the parts that are not done

    def start(self, begin: Callable[..., MPI.Request], tag: int) -> MpiRequest:
        """Send or receive the memory by `Isend` or `Irecv`; returns the message."""
        array: Array = self._memory
        endpoint = self._owner.endpoint
        self._left = nbytes = array.nbytes
        try:
            if nbytes <= _MESSAGE_BYTES:  # nearly always: a microsecond here is one per message
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
        """Wait for this request, too."""
        self._requests.append(request)
        self._owner.endpoint.live.add(self)

    def done(self) -> bool:
        """Make progress and tell whether the memory may be used again."""
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
            if status is not None and self.verb == "send":
                expected = self._left if self._left < _MESSAGE_BYTES else _MESSAGE_BYTES
                self._left -= expected
                if status.count != expected:
                    raise self._wrong_length(expected, status.count)
        return True

    def give_up(self) -> bool:
        """Count as done; what may still be under way keeps its memory."""
        if self._requests:
            _abandoned.append({self})
            self._requests = []
        self._owner.endpoint.live.discard(self)
        return True

    def describe(self) -> str:
        """Say whom this waits for."""
        if self.verb == "enter":
            return "the other ranks to enter MPI's own operation"
        return f"{self._owner.name([self._peer])} to {self.verb} {self._memory.nbytes} bytes"

    @property
    def peers(self) -> Sequence[int]:
        """The rank that this waits for."""
        return (self._peer,)

    def _wrong_length(self, expected: int, got: int) -> MismatchError:
        return MismatchError(
            f"receive: {self._owner.name([self._peer])} sent an array of another length, "
            f"expected {expected} bytes, got {got} ({self._owner.where})"
        )


class MpiEndpoint:
    """A private communicator, and the messages under way on it.

    Args:
        comm: the ranks that take part. Collective: all of them must construct it together.
        owned: whether `comm` was made for this endpoint alone, and needs no duplicate.
    """

    def __init__(self, comm: MPI.Comm, owned: bool = False) -> None:
        from mpi4py import MPI

        self.mpi = comm if owned else comm.Dup()
        self.byte = MPI.BYTE
        # Their memory must not be released as long as MPI may touch it.
        self.live: set[MpiRequest] = set()
        self.kept: list[object] = []  # the same of messages that compiled code has begun
        self._found = MPI.Status()
        self._any = MPI.ANY_SOURCE

    @property
    def handles(self) -> tuple[int, int]:
        """MPI's handles of the communicator and of bytes, as numbers."""
        from mpi4py import MPI

        return MPI._handleof(self.mpi), MPI._handleof(self.byte)

    def take(self, tag: int) -> tuple[int, Array] | None:
        """Return a message that nobody has asked for, if one has come, and its source."""
        message = self.mpi.Improbe(self._any, tag, self._found)
        if message is None:
            return None
        source, data = self._found.source, np.empty(self._found.count, np.uint8)
        message.Recv((data, data.size, self.byte))
        return source, data

    def dead(self) -> list[int]:
        """Return the ranks that MPI knows to be dead; none where it does not tell."""
        from mpi4py import MPI

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
        """Let go of the communicator, unless messages are under way or MPI has ended."""
        from mpi4py import MPI

        # With messages under way, freeing would wait for what never becomes complete.
        under_way = self.live or self.kept
        if self.mpi != MPI.COMM_NULL and not MPI.Is_finalized() and not under_way:
            _closed.append(self.mpi)
            self.mpi = MPI.COMM_NULL
            while len(_closed) > _MOST_CLOSED:
                self._free_closed(_closed.popleft())

    def _free_closed(self, closed: MPI.Comm) -> None:
        """Free a communicator after what nobody has received; keep it where that might wait."""
        from mpi4py import MPI

        try:
            while closed.Iprobe(self._any, MPI.ANY_TAG, self._found):
                if self._found.count > _AT_ONCE_BYTES:
                    _abandoned.append(closed)
                    return
                data = np.empty(self._found.count, np.uint8)
                closed.Recv((data, self.byte), self._found.source, self._found.tag)
            closed.Free()
        except MPI.Exception:  # a rank of it has died, of which this call is not about
            _abandoned.append(closed)

    def __del__(self) -> None:
        # Messages are dropped unfinished when an error or Ctrl-C ended the operation.
        for memory in (getattr(self, "live", None), getattr(self, "kept", None)):
            if memory:
                _abandoned.append(memory)
