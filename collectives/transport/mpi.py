"""Transport over MPI.

MPI's errors become errors of this library: a dead rank, an array of the wrong length, a call from a
thread that MPI was not started for.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.core.errors import CollectiveError, LaunchError, MismatchError, PeerFailure
from collectives.transport import backoff, failure_detector, liveness, ulfm
from collectives.transport.backoff import Backoff, Deadline, PendingMessage, this_thread
from collectives.transport.mailbox import MpiMailbox
from collectives.transport.mpi_messages import MpiEndpoint, MpiRequest, is_death
from collectives.transport.transport import NativeMpi, Transport

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["MpiTransport"]

# Seconds to wait for the names of dead ranks, once a death is known.
_NAME_WITHIN = 1.0
_ASK_EVERY = 0.005

# Tags: unsolicited messages have one of their own, and so has a channel, because another thread may
# use it.
_TAG, _LANE_TAG, _HEAD_TAG = 1, 4, 5
_FIRST_NUMBERED = 1 << 14  # the tag of channel number 0


def _functions() -> tuple[int, int, int] | None:
    """Return the addresses of MPI_Isend, MPI_Irecv and MPI_Test; None if they are hidden."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # also searches the MPI library that mpi4py is linked with

    def found(name: str) -> int:
        return ctypes.cast(library[name], ctypes.c_void_p).value or 0

    try:
        return found("MPI_Isend"), found("MPI_Irecv"), found("MPI_Test")
    except AttributeError:  # mpi4py is linked statically
        return None


class MpiTransport(Transport):
    """Messages over a private MPI communicator.

    Args:
        comm: the ranks. *Collective*: all of them must construct the transport.
        parent: the communicator from which `comm` was made for this transport alone; a rank
            that fails here revokes it. None to use a duplicate of `comm`.
    """

    def __init__(self, comm: MPI.Comm, parent: MPI.Comm | None = None) -> None:
        self.endpoint = MpiEndpoint(comm, owned=parent is not None)
        self.mpi = self.endpoint.mpi
        self.rank = self.mpi.Get_rank()
        self.size = self.mpi.Get_size()
        self.status: MPI.Status | None = MPI.Status()
        # Identifies the communicator in the failure detector's messages.
        self._key = failure_detector.next_key(lambda own: self._largest(own, parent or self.mpi))
        self._tag = _TAG
        self._meetings = 0  # meetings before agreements, so far
        # Whether background threads may call MPI while other threads do.
        self._any_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE

    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        return self._start(self.mpi.Isend, data, dest, "receive", self._tag)

    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        return self._start(self.mpi.Irecv, into, source, "send", self._tag)

    def _start(self, begin: Any, array: Array, peer: int, verb: str, tag: int) -> PendingMessage:
        # A background thread may call MPI only at thread level multiple.
        if not self._any_thread and not self._may_call_mpi:
            self.check_threads(f"message to or from {self.name([peer])}")
        try:
            return MpiRequest(self, array, peer, verb).start(begin, tag)
        except RuntimeError as error:
            raise self._explain(error, f"message to or from {self.name([peer])}") from error

    @property
    def _may_call_mpi(self) -> bool:
        """Whether this thread may call MPI: a background thread needs MPI_THREAD_MULTIPLE."""
        return self._any_thread or this_thread.stop is None

    @property
    def native_mpi(self) -> NativeMpi | None:
        """MPI functions and handles for compiled code; None if mpi4py hides the functions."""
        if not self._any_thread and not self._may_call_mpi:
            self.check_threads("message")
        functions = _functions()
        return (
            None if functions is None else NativeMpi(*functions, *self.endpoint.handles, self._tag)
        )

    def error_of(self, code: int, operation: str) -> RuntimeError:
        """Return the exception for an MPI error code."""
        return self._explain(MPI.Exception(code), operation)

    def retain(self, memory: object) -> None:
        """Keep memory for the life of the process, and so the communicator."""
        self.endpoint.kept.append(memory)

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Raise MPI's error, which `wait` translates; the message keeps its memory."""
        raise error

    def watch(self, start: Callable[..., MPI.Request], *arguments: Any) -> PendingMessage:
        """Start an operation of MPI, such as a non-blocking collective, as a message."""
        # MPI does not report who is missing, so each rank waits for its neighbour in a ring. A
        # failure propagates along the ring to all waiting ranks.
        message = MpiRequest(self, arguments, (self.rank + 1) % self.size, "enter")
        try:
            message.add(start(*arguments))
        except RuntimeError as error:
            raise self._explain(error, "native") from error
        return message

    def split(self, color: int | None, key: int) -> MpiTransport | None:
        """Return a transport for the ranks of one color, ordered by key; *collective*."""
        try:
            part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
            if part == MPI.COMM_NULL:
                return None
            # `part` was made for this transport alone, so the endpoint needs no duplicate.
            transport = MpiTransport(part, self.mpi)
        except RuntimeError as error:
            raise self._explain(error, "split") from error
        return transport

    def check_threads(self, operation: str) -> None:
        """Raise `LaunchError` if MPI was not started for several threads."""
        if not self._any_thread:
            raise LaunchError(
                f"{operation}: several threads cannot use this MPI, expected thread level "
                f"{MPI.THREAD_MULTIPLE} (multiple), got {MPI.Query_thread()}; with mpi4py, leave "
                "MPI4PY_RC_THREAD_LEVEL at multiple"
            )

    def members(self, ranks: Sequence[int], tag: int) -> MpiTransport:
        """Return a transport for some ranks; *collective* over these alone."""
        try:
            everyone = self.mpi.Get_group()
            chosen = everyone.Incl(ranks)
            part = cast("MPI.Intracomm", self.mpi).Create_group(chosen, tag)
            chosen.Free()
            everyone.Free()
            transport = MpiTransport(part, self.mpi)
        except RuntimeError as error:
            raise self._explain(error, "group") from error
        return transport

    def shrink(self, deadline: Deadline) -> tuple[MpiTransport, list[int]]:
        """Return a transport for the surviving ranks, and their old numbers."""
        numbers = self._numbers
        self.revoke()
        ulfm.rendezvous(self, self.mpi, numbers, self._key, deadline)
        try:
            return ulfm.shrink_and_make(self.mpi, MpiTransport)
        except NotImplementedError as error:
            raise LaunchError(f"{deadline.operation}: this MPI cannot do that: {error}") from error

    def agree(self, flag: bool, deadline: Deadline) -> bool:
        """Return whether all ranks passed True and none is dead."""
        self._meetings += 1
        met = ulfm.rendezvous(self, self.mpi, self._numbers, self._key, deadline, self._meetings)
        return met and ulfm.agree(self.mpi, flag)

    def revoke(self) -> None:
        """Revoke the communicator, which aborts all ranks' operations, if MPI supports that."""
        ulfm.revoke(self.mpi)

    def channel(self, number: int | None = None) -> MpiTransport:
        """Return a transport on the same communicator with another tag."""
        lane = copy.copy(self)  # shares the endpoint
        lane._tag = _LANE_TAG if number is None else _FIRST_NUMBERED + number
        lane.status = MPI.Status()  # another thread may complete messages of the channel
        return lane

    def to_mpi(self) -> MPI.Comm:
        """Return a duplicate of the communicator."""
        try:
            return self.mpi.Dup()
        except RuntimeError as error:
            raise self._explain(error, "to_mpi") from error

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending an unsolicited message."""
        return self._start(self.mpi.Isend, head, dest, "receive", _HEAD_TAG)

    def poll_mailbox(self) -> tuple[int, Array] | None:
        """Return the next unsolicited message, as (source, bytes)."""
        return self.endpoint.take(_HEAD_TAG)

    def open_mailbox(self) -> MpiMailbox:
        """Open a mailbox over MPI for the same ranks."""
        self.check_threads("open_channel")  # a service has a thread of its own
        return MpiMailbox(self.mpi)

    def close(self) -> None:
        """Free the communicator, unless messages are pending or MPI has ended."""
        self.endpoint.free()

    def _largest(self, number: int, parent: MPI.Comm) -> int:
        """Return the largest number of all ranks.

        A rank that fails revokes the parent, because other ranks may still be making the new
        communicator, and Open MPI 5.0.11 crashes if an incomplete one is revoked.
        """
        largest = np.array([number])
        wait = Backoff()
        try:
            coming = self.mpi.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)
            self.endpoint.kept.append((coming, largest))
            while not coming.Test():
                if wait.pause() and ulfm.is_revoked(parent):
                    raise MPI.Exception(MPI.ERR_REVOKED)
        except MPI.Exception:
            ulfm.revoke(parent)
            raise
        self.endpoint.kept.clear()
        return int(largest[0])

    def check_peers(self, operation: str, peers: Sequence[int] = ()) -> None:
        """Ask MPI for dead ranks, and the awaited ranks for their state."""
        if not self._may_call_mpi:
            return
        try:
            self.mpi.Iprobe()  # MPI learns of deaths only while it is called
        except RuntimeError as error:
            raise self._explain(error, operation) from error
        if dead := self.endpoint.dead():
            raise self._peer_failure(operation, dead)
        # MPI reports deaths only. A rank that has ended its program in good order reports
        # it when asked.
        if failure_detector.current is not None:
            news = failure_detector.current.probe(
                self._key, [self._numbers[rank] for rank in peers]
            )
            if news is not None:
                raise PeerFailure(
                    f"{operation}: {self._describe([news.rank])} {news.text} ({self.where})"
                )

    def propagate_failure(self, rank: int, how: str) -> None:
        """Propagate the failure of `rank` to the ranks that ask this one for its state."""
        if failure_detector.current is not None and self._may_call_mpi:
            failure_detector.current.fail(self._key, self._numbers[rank], how)

    def blocking_rank(self, pending: Sequence[PendingMessage]) -> str | None:
        """Follow the chain of waiting ranks to the rank that waits for none."""
        asked = failure_detector.current
        if asked is None or not self._may_call_mpi:
            return None
        due = dict.fromkeys(rank for message in pending for rank in message.peers)
        chain = asked.wait_chain(self._key, [self._numbers[rank] for rank in due])
        if len(chain) < 2:
            return ""
        *others, last = chain
        waits = "waits" if len(others) == 1 else "wait"
        return f"{self._describe([last])}, for which {self._describe(others)} also {waits}"

    def compiling(self) -> str:
        """Name the ranks that compile, as far as they have reported it."""
        if failure_detector.current is None or not self._may_call_mpi:
            return ""
        found = failure_detector.current.compile_seconds().items()
        return ", ".join(
            f"{self._describe([rank])} has compiled loops for {seconds} s"
            for rank, seconds in found
            if rank in self._numbers
        )

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """World rank of each rank."""
        group, world = self.mpi.Get_group(), MPI.COMM_WORLD.Get_group()
        numbers = list(group.Translate_ranks(None, world))
        group.Free()
        world.Free()
        return numbers

    def _describe(self, world_ranks: Sequence[int]) -> str:
        return self.name_of_world(world_ranks, self._numbers)

    def progress(self) -> None:
        """Call MPI once, because MPI sends pending data only while it is called."""
        MPI.COMM_SELF.Iprobe()

    def _explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        if not isinstance(error, MPI.Exception):
            return error
        if is_death(error):
            # A death may be known before MPI knows which rank died.
            backoff.poll_until(self._knows_who_died, _NAME_WITHIN, _ASK_EVERY)
            return self._peer_failure(operation, self.endpoint.dead())
        where = f"({self.where})"
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return MismatchError(
                f"{operation}: the other rank sent an array that is longer than expected {where}"
            )
        return CollectiveError(f"{operation}: MPI reports an error: {error} {where}")

    def _peer_failure(self, operation: str, dead: Sequence[int]) -> PeerFailure:
        """Abort all ranks' operations, and return the error for this rank."""
        liveness.arm()
        self.revoke()
        what = f"{self.name(dead)} died" if dead else "some rank died, or has given up"
        return PeerFailure(f"{operation}: {what} ({self.where})")

    def _knows_who_died(self) -> bool:
        MPI.COMM_SELF.Iprobe()  # not on `self.mpi`, which only raises after a death
        return bool(self.endpoint.dead())
