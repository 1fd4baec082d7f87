"""Messages over MPI: the transport of real jobs.

What MPI reports as errors becomes ours: a dead rank, an array that is too long, a message from a
thread that MPI was not started for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays.host import Array, raw_bytes
from collectives.errors import CollectiveError, LaunchError, MismatchError, PeerFailure
from collectives.transport import liveness, whereabouts
from collectives.transport.mailbox import MpiMail
from collectives.transport.transport import Message, Transport, named, this_thread

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport"]

# Seconds within which it becomes known who died, once it is known that somebody did.
_NAME_WITHIN = 1.0
_ASK_EVERY = 0.005

# MPI counts are ints in many builds; longer arrays go as several messages.
_MESSAGE_BYTES = 1 << 30

_TAG, _LANE_TAG = 1, 4  # mail has a communicator of its own, and tags 2 and 3

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
        # Of the messages by which ranks tell each other where they are.
        self._key = whereabouts.next_key(self._largest)
        self._byte = MPI.BYTE
        self._status = MPI.Status()
        self._tag = _TAG
        # Whether threads of ours may call MPI while others do.
        self._any_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE

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
        if not self._any_thread and this_thread.stop is not None:
            self.check_threads(f"message to or from {self.name([peer])}")
        try:
            request = start((array, array.nbytes, self._byte), peer, self._tag)
        except RuntimeError as error:
            raise self._explain(error, f"message to or from {self.name([peer])}") from error
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

    def check_threads(self, operation: str) -> None:
        """Refuse threads that MPI was not started for."""
        from mpi4py import MPI

        if not self._any_thread:
            raise LaunchError(
                f"{operation}: several threads cannot use this MPI, expected thread level "
                f"{MPI.THREAD_MULTIPLE} (multiple), got {MPI.Query_thread()}; with mpi4py, leave "
                "MPI4PY_RC_THREAD_LEVEL at multiple"
            )

    def lane(self) -> MpiTransport:
        """Return messages over the same communicator with another tag."""
        from mpi4py import MPI

        lane = copy.copy(self)  # shares the set of messages under way
        lane._tag = _LANE_TAG
        lane._status = MPI.Status()  # another thread may complete messages of the lane
        return lane

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

    def _largest(self, number: int) -> int:
        """Return the largest of the numbers that the ranks bring."""
        from mpi4py import MPI

        largest = np.array([number])
        self.mpi.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        return int(largest[0])

    def look_around(self, operation: str, peers: Sequence[int] = ()) -> None:
        """Ask MPI whether a rank has died, and ranks that this one waits for where they are."""
        if not self._any_thread and this_thread.stop is not None:
            return
        try:
            self.mpi.Iprobe()  # MPI hears of anything only while it is called
        except RuntimeError as error:
            raise self._explain(error, operation) from error
        dead = self._dead()
        if dead:
            raise self._peer_failure(operation, dead)
        if whereabouts.current is not None:
            news = whereabouts.current.look(self._key, [self._numbers[0][rank] for rank in peers])
            if news is not None:
                raise PeerFailure(
                    f"{operation}: {self._named([news.rank])} {news.text} ({self.where})"
                )

    def pass_on(self, rank: int, how: str) -> None:
        """Tell those who ask that this rank fails, since another one has left."""
        may_send = self._any_thread or this_thread.stop is None
        if whereabouts.current is not None and may_send:
            whereabouts.current.fail(self._key, self._numbers[0][rank], how)

    def culprit(self, pending: Sequence[Message]) -> str:
        """Follow the ranks that wait for each other to the one that waits for nobody."""
        asked = whereabouts.current
        if asked is None or (not self._any_thread and this_thread.stop is not None):
            return ""
        due = dict.fromkeys(rank for message in pending for rank in message.peers)
        chain = asked.chain(self._key, [self._numbers[0][rank] for rank in due])
        if len(chain) < 2:
            return ""
        *others, last = chain
        waits = "waits" if len(others) == 1 else "wait"
        return f"{self._named([last])}, for which {self._named(others)} {waits}, too"

    @functools.cached_property
    def _numbers(self) -> tuple[list[int], dict[int, int]]:
        """The ranks' numbers in the world, and the way back."""
        from mpi4py import MPI

        group, world = self.mpi.Get_group(), MPI.COMM_WORLD.Get_group()
        numbers = group.Translate_ranks(None, world)
        group.Free()
        world.Free()
        return numbers, {number: rank for rank, number in enumerate(numbers)}

    def _named(self, world_ranks: Sequence[int]) -> str:
        """Name ranks that are given by their numbers in the world."""
        numbers = self._numbers[1]
        if all(rank in numbers for rank in world_ranks):
            return self.name([numbers[rank] for rank in world_ranks])
        return f"world {named(world_ranks)}"

    def progress(self) -> None:
        """Let MPI, which does nothing unless it is called, send what it has kept for later."""
        from mpi4py import MPI

        MPI.COMM_SELF.Iprobe()

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
        where = f"({self.where})"
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
        names = self.name(dead) if dead else "some rank"
        return PeerFailure(f"{operation}: {names} died ({self.where})")

    def _dead_soon(self) -> list[int]:
        """Return who died; the news that somebody did may come before the news who."""
        from mpi4py import MPI

        give_up = time.monotonic() + _NAME_WITHIN
        while not (dead := self._dead()) and time.monotonic() < give_up:
            MPI.COMM_SELF.Iprobe()  # as in look_around; the group's own communicator only raises
            time.sleep(_ASK_EVERY)
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
        return f"{self._transport.name([self._peer])} to {self._verb} {self._memory.nbytes} bytes"

    @property
    def peers(self) -> Sequence[int]:
        return (self._peer,)

    def _wrong_length(self, got: int) -> MismatchError:
        return MismatchError(
            f"receive: {self._transport.name([self._peer])} sent an array of another length, "
            f"expected {self._memory.nbytes} bytes, got {got} ({self._transport.where})"
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

    @property
    def peers(self) -> Sequence[int]:
        return self._parts[0].peers if self._parts else ()


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

    @property
    def peers(self) -> Sequence[int]:
        # MPI does not say which have not. Along this ring the news reaches all that wait.
        return ((self._transport.rank + 1) % self._transport.size,)
