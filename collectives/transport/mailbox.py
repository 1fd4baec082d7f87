"""Mailbox for unsolicited messages, among ranks that may die.

Collective operations know who sends what and when. A service does not: it takes *heads* of unknown
length from anybody. Long frames follow the head that announces them. The death of a rank is news
here and no error: the others go on.
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

__all__ = ["Mailbox", "MpiMailbox"]

_HEAD, _FRAME = 2, 3  # tags


class Mailbox(RankSet, ABC):
    """Messages among `size` ranks, of which this one is `rank`.

    Arrays are contiguous bytes, shape (n,), uint8. Heads, and frames, arrive from one rank in the
    order in which they were sent. One thread at a time sends, one thread receives.

    What was sent to a rank that is dead is done; to receive from one raises `PeerFailure`.
    """

    @abstractmethod
    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending at least one byte, of which the other side does not know."""

    @abstractmethod
    def poll(self) -> tuple[int, Array] | None:
        """Return the next head that has arrived and its source."""

    @abstractmethod
    def send(self, frame: Array, dest: int) -> PendingMessage:
        """Start sending at least one byte, which the other side will `receive`."""

    @abstractmethod
    def receive(self, into: Array, source: int) -> PendingMessage:
        """Start receiving a frame of exactly this length."""

    @abstractmethod
    def dead(self) -> frozenset[int]:
        """Return the ranks that are known to have died, which is noticed by `poll`."""

    @abstractmethod
    def close(self, *, all_together: bool) -> None:
        """Release what this holds, if nothing is under way.

        Args:
            all_together: whether all ranks are known to close now, without a message left.
        """


class MpiMailbox(Mailbox):
    """A mailbox over a private duplicate of an MPI communicator.

    Args:
        comm: the ranks that take part. *Collective*: all of them construct it together.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.endpoint = MpiEndpoint(comm)
        self.status: MPI.Status | None = None  # two threads look at messages
        self._mpi = self.endpoint.mpi
        self.rank = self._mpi.Get_rank()
        self.size = self._mpi.Get_size()
        self._dead: frozenset[int] = frozenset()

    def send_nowait(self, head: Array, dest: int) -> PendingMessage:
        """Start sending a head."""
        return MpiRequest(self, head, dest, "receive").start(self._mpi.Isend, _HEAD)

    def poll(self) -> tuple[int, Array] | None:
        """Return the next head; MPI hears of a death while it is asked."""
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
        """Return who died; nobody where MPI does not tolerate it."""
        return self._dead

    def close(self, *, all_together: bool) -> None:
        """Free the communicator, unless that might wait for somebody, or MPI has ended."""
        if all_together and not self._dead:
            self.endpoint.free()

    def lost(self, message: MpiRequest, error: RuntimeError) -> bool:
        """Give up what goes to the dead, or raise `PeerFailure` for what was to come from them."""
        self._learn(error)
        message.give_up()
        if message.verb == "send":
            raise PeerFailure(f"channel: {self.name(message.peers)} died") from error
        return True

    def _learn(self, error: RuntimeError) -> None:
        """Note who died, if that is the error; others are raised in our words."""
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            raise error
        if not is_death(error):
            raise CollectiveError(
                f"channel: MPI reports an error: {error} ({self.where})"
            ) from error
        if dead := self.endpoint.dead():
            liveness.arm()
            # Acknowledged deaths do not keep MPI from receiving from anybody else.
            self._mpi.Ack_failed()
            self._dead = frozenset(dead)
