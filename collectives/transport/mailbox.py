"""Messages that the receiver has not asked for, among ranks of which some may die.

Collective operations know who sends what and when. A service does not: it takes *letters* of
unknown length from anybody. Long arrays follow a letter that announces them. The death of a rank is
news here and no error: the others go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from collectives.arrays.host import Array
from collectives.errors import CollectiveError, LaunchError, PeerFailure
from collectives.transport import liveness

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Delivery", "Mail", "MpiMail"]

_LETTER, _PARCEL = 2, 3  # tags

# MPI counts are ints in many builds; longer arrays go as several messages.
_MESSAGE_BYTES = 1 << 30


class Delivery(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Make progress and tell whether the memory may be used again.

        Raises:
            PeerFailure: this receives from a rank that is dead. What was sent to one is done.
        """


class Mail(ABC):
    """Messages among `size` ranks, of which this one is `rank`.

    Arrays are contiguous bytes, shape (n,), uint8. Letters, and parcels, arrive from one rank in
    the order in which they were sent. One thread at a time sends, one thread receives.
    """

    rank: int
    size: int

    @abstractmethod
    def post(self, letter: Array, dest: int) -> Delivery:
        """Start sending at least one byte, of which the other side does not know."""

    @abstractmethod
    def collect(self) -> tuple[int, Array] | None:
        """Return the next letter that has arrived and its source."""

    @abstractmethod
    def send(self, parcel: Array, dest: int) -> Delivery:
        """Start sending at least one byte, which the other side will `receive`."""

    @abstractmethod
    def receive(self, into: Array, source: int) -> Delivery:
        """Start receiving a parcel of exactly this length."""

    @abstractmethod
    def dead(self) -> frozenset[int]:
        """Return the ranks that are known to have died, which is noticed by `collect`."""

    @abstractmethod
    def close(self, *, all_together: bool) -> None:
        """Release what this holds, if nothing is under way.

        Args:
            all_together: whether all ranks are known to close now, without a message left.
        """


# Messages that nobody waits for any more although MPI may still read or write their memory: it is
# never released.
_abandoned: list[set[_MpiDelivery]] = []


class MpiMail(Mail):
    """Mail over a private duplicate of an MPI communicator.

    Args:
        comm: the ranks that take part. *Collective*: all of them construct it together.

    Raises:
        LaunchError: MPI was started without support for several threads.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise LaunchError(
                "open_channel: several threads cannot use this MPI, expected thread level "
                f"{MPI.THREAD_MULTIPLE} (multiple), got {MPI.Query_thread()}"
            )
        self._mpi = comm.Dup()
        self.rank = self._mpi.Get_rank()
        self.size = self._mpi.Get_size()
        self._status = MPI.Status()
        self._any = MPI.ANY_SOURCE
        self._byte = MPI.BYTE
        self._dead: frozenset[int] = frozenset()
        self._live: set[_MpiDelivery] = set()
        # A library without these classes has the same number in their place.
        deaths = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
        self._deaths = deaths - {MPI.ERR_UNKNOWN}

    def post(self, letter: Array, dest: int) -> Delivery:
        """Start sending a letter."""
        return _MpiDelivery(self, self._mpi.Isend, letter, dest, _LETTER)

    def collect(self) -> tuple[int, Array] | None:
        """Return the next letter; MPI hears of a death while it is asked."""
        try:
            found = self._mpi.Improbe(self._any, _LETTER, self._status)
            if found is None:
                return None
            letter = np.empty(self._status.count, np.uint8)
            source = self._status.source
            found.Recv((letter, letter.size, self._byte))
        except RuntimeError as error:
            self._learn(error)
            return None
        return source, letter

    def send(self, parcel: Array, dest: int) -> Delivery:
        """Start sending a parcel."""
        return _MpiDelivery(self, self._mpi.Isend, parcel, dest, _PARCEL)

    def receive(self, into: Array, source: int) -> Delivery:
        """Start receiving a parcel."""
        return _MpiDelivery(self, self._mpi.Irecv, into, source, _PARCEL)

    def dead(self) -> frozenset[int]:
        """Return who died; nobody where MPI does not tolerate it."""
        return self._dead

    def close(self, *, all_together: bool) -> None:
        """Free the communicator, unless that might wait for somebody, or MPI has ended."""
        from mpi4py import MPI

        if self._live:
            _abandoned.append(self._live)
        elif all_together and not self._dead and not MPI.Is_finalized():
            self._mpi.Free()

    def _learn(self, error: RuntimeError) -> None:
        """Note who died, if that is the error; others are raised in our words."""
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            raise error
        if error.Get_error_class() not in self._deaths:
            where = f"(rank {self.rank} of {self.size})"
            raise CollectiveError(f"channel: MPI reports an error: {error} {where}") from error
        failed = self._mpi.Get_failed()
        if failed.Get_size():
            liveness.limit_exit()
            # Acknowledged deaths do not keep MPI from receiving from anybody else.
            self._mpi.Ack_failed()
            group = self._mpi.Get_group()
            ranks = failed.Translate_ranks(list(range(failed.Get_size())), group)
            self._dead = frozenset(rank for rank in ranks if rank != MPI.UNDEFINED)
            group.Free()


class _MpiDelivery:
    """One array as one or several MPI messages of bytes."""

    def __init__(self, mail: MpiMail, start: Any, memory: Array, peer: int, tag: int) -> None:
        self._mail = mail
        self._memory = memory
        self._peer = peer
        self._receives = start == mail._mpi.Irecv
        self._requests: list[MPI.Request] = []
        mail._live.add(self)
        try:
            for at in range(0, memory.size, _MESSAGE_BYTES):
                part = memory[at : at + _MESSAGE_BYTES]
                self._requests.append(start((part, part.size, mail._byte), peer, tag))
        except RuntimeError as error:
            self._end(error)

    def done(self) -> bool:
        try:
            while self._requests:
                if not self._requests[0].Test():
                    return False
                del self._requests[0]
        except RuntimeError as error:
            self._end(error)
        self._mail._live.discard(self)
        return True

    def _end(self, error: RuntimeError) -> None:
        """Give up; what is under way to or from the dead keeps its memory."""
        self._mail._learn(error)
        if self._requests:
            _abandoned.append({self})
        self._requests = []
        self._mail._live.discard(self)
        if self._receives:
            raise PeerFailure(f"channel: rank {self._peer} died") from error
