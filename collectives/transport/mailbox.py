"""Mailbox for unsolicited messages, among ranks that may die.

In collective operations both sides know when a message is sent. A service does not: it receives
*heads* of unknown length from any rank. Long frames follow the head that announces them. The death
of a rank is an event here, not an error: the other ranks continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from collectives.arrays.host_arrays import Array
from collectives.core.errors import CollectiveError, PeerFailure
from collectives.transport import liveness
from collectives.transport.backoff import PendingMessage, RankSet
from collectives.transport.mpi_messages import MpiEndpoint, MpiRequest, is_death

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["Mailbox", "MpiMailbox"]

_HEAD, _FRAME = 2, 3  # tags


class Mailbox(RankSet, ABC):
    """Unsolicited messages among `size` ranks; this process is `rank`.

    Arrays are contiguous bytes, shape (n,), uint8. Heads of one rank arrive in the order of their
    sends, and so do frames. One thread at a time sends, one thread receives.

    A send to a dead rank completes; a receive from one raises `PeerFailure`.
    """

    @abstractmethod
    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending an unsolicited head of at least one byte."""

    @abstractmethod
    def poll(self) -> tuple[int, Array] | None:
        """Return the next head that has arrived, as (source, bytes); None if there is none yet."""

    @abstractmethod
    def send(self, frame: Array, dest: int) -> PendingMessage:
        """Start sending a frame of at least one byte, for which the other side calls `receive`."""

    @abstractmethod
    def receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving a frame of exactly this length."""

    @abstractmethod
    def dead(self) -> frozenset[int]:
        """Return the ranks known to have died; `poll` detects deaths."""

    @abstractmethod
    def close(self, *, all_together: bool) -> None:
        """Release the resources, unless messages are pending.

        Args:
            all_together: whether all ranks are known to close now, with no message left.
        """


class MpiMailbox(Mailbox):
    """A mailbox over a private duplicate of an MPI communicator.

    Args:
        comm: the ranks. *Collective*: all of them must construct the mailbox.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.endpoint = MpiEndpoint(comm)
        self.status: MPI.Status | None = None  # none, because two threads poll messages
        self._mpi = self.endpoint.mpi
        self.rank = self._mpi.Get_rank()
        self.size = self._mpi.Get_size()
        self._dead: frozenset[int] = frozenset()

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending a head."""
        return MpiRequest(self, head, dest, "receive").start(self._mpi.Isend, _HEAD)

    def poll(self) -> tuple[int, Array] | None:
        """Return the next head, or None; MPI detects deaths only while it is called."""
        try:
            return self.endpoint.take(_HEAD)
        except RuntimeError as error:
            self._learn(error)
            return None

    def send(self, frame: Array, dest: int) -> PendingMessage:
        """Start sending a long frame."""
        return MpiRequest(self, frame, dest, "receive").start(self._mpi.Isend, _FRAME)

    def receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving a long frame."""
        return MpiRequest(self, into, source, "send").start(self._mpi.Irecv, _FRAME)

    def dead(self) -> frozenset[int]:
        """Return the dead ranks; empty if MPI does not tolerate deaths."""
        return self._dead

    def close(self, *, all_together: bool) -> None:
        """Free the communicator, unless that might block or MPI has ended."""
        # MPI may synchronize all ranks when it frees a communicator, so one rank alone might hang.
        if all_together and not self._dead:
            self.endpoint.free()

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Abandon a send to a dead rank, or raise `PeerFailure` for a receive from one."""
        self._learn(error)
        message.give_up()
        if message.verb == "send":
            raise PeerFailure(f"channel: {self.name(message.peers)} died") from error
        return True

    def _learn(self, error: RuntimeError) -> None:
        """Record the dead ranks; raise `CollectiveError` for any other MPI error."""
        if not isinstance(error, MPI.Exception):
            raise error
        if not is_death(error):
            raise CollectiveError(
                f"channel: MPI reports an error: {error} ({self.where})"
            ) from error
        if dead := self.endpoint.dead():
            liveness.arm()
            # ULFM fails receives from any source until a death is acknowledged.
            self._mpi.Ack_failed()
            self._dead = frozenset(dead)
