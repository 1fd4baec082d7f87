"""ULFM: the surviving ranks agree on who is left and form a new communicator.

Only where the MPI library outlives its ranks: Open MPI >= 5 under `mpirun --with-ft ulfm`.

    rank 0             rank 1      rank 2
    revoke              dead       revoke            whoever waits leaves its operation
    "here" -> 2                    "here" -> 0       within a limit, beside the communicator
    Shrink                         Shrink            MPI agrees on the dead, and leaves them out
    Agree                          Agree             complete on all: it may be revoked from here on
    Iallreduce                     Iallreduce        the number of the new communicator
    Agree                          Agree             did all come through? else once more

MPI's own calls have no limit. They are made once all surviving ranks are here, so they wait for no
rank that computes. In a world of some processes only, which have no messages beside their
communicators, ranks meet by an agreement that is given up at the limit, and wait for each other at
the end of their programs by another one. `Ishrink`, which could be given up, fails with an internal
error in Open MPI 5.0.11. A rank that dies meanwhile is left out by the next attempt.

Cost: P messages of 16 bytes to and from each rank, and four agreements: milliseconds.

Source: W. Bland et al., "Post-failure recovery of MPI communication capability: design and
rationale", IJHPCA 27(3), 2013; MPIX_Comm_revoke, MPIX_Comm_shrink and MPIX_Comm_agree of Open MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from collectives.core.errors import CollectiveError, PeerFailure
from collectives.transport import failure_detector, liveness
from collectives.transport.backoff import IN_RESERVE, Backoff, CompletedWait, Deadline, RankSet

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["agree", "shrink_and_make", "is_revoked", "rendezvous", "revoke"]

T = TypeVar("T")

# Seconds between the news that a rank has given a communicator up and the end of the wait for it:
# that it has come may be known later, since it takes another way.
_GRACE = 0.5

# Of a key: those of communicators are counted.
_KEY_BITS = 40

# Two kinds of meetings, as bits: the last one of a communicator, and those before.
_MEETING, _LAST_MEETING = 1, 2

# Communicators of attempts during which a rank has died, and agreements to which not all have come.
# MPI may still have calls on them.
_given_up: list[object] = []

# In a world of some processes only: of those with which this one has gone on.
_parts: list[MPI.Comm] = []
os.register_at_fork(after_in_child=_parts.clear)  # a forked child is not a rank


def is_revoked(comm: MPI.Comm) -> bool:
    """Tell whether a rank has revoked a communicator, as far as this one knows."""
    from mpi4py import MPI

    with contextlib.suppress(MPI.Exception):
        comm.Iprobe()  # MPI hears of anything only while it is called
    try:
        return comm.Is_revoked()
    except (NotImplementedError, MPI.Exception):
        return False


def revoke(comm: MPI.Comm) -> None:
    """Let all ranks leave what they do on a communicator, where MPI can do that."""
    from mpi4py import MPI

    with contextlib.suppress(NotImplementedError, MPI.Exception):
        # Revoking twice can disturb the other ranks' way out.
        if not comm.Is_revoked():
            comm.Revoke()


def rendezvous(
    ranks: RankSet,
    comm: MPI.Comm,
    numbers: Sequence[int],
    key: int,
    deadline: Deadline,
    number: int = 0,
) -> bool:
    """Wait until every rank has come or died; tell whether they have come to this meeting.

    Args:
        ranks: the group, as errors name it.
        comm: of these ranks; a rank that has revoked it comes to its last meeting only.
        numbers: of its ranks in the world.
        key: of the communicator (`failure_detector.next_key`).
        deadline: the limit.
        number: of the meeting, of those that a communicator has; its last one is number 0, and
            who has come to that one will come to no other.

    Raises:
        CollectiveTimeout: a rank that lives has not come; names it, but for a world of some
            processes only.
        PeerFailure: one has ended its program, and will not come.
    """
    world = failure_detector.current
    if world is None:  # a world of some processes only
        return _meet_by_agreement(ranks, comm, deadline, number)
    own = key | number << _KEY_BITS
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    world.join_meeting(own, [numbers[rank] for rank in others])
    wait = _wait(deadline)
    give_up_at = math.inf
    while True:
        dead, come = world.meeting_state(own)
        # First, because a rank may have died after it went to the last meeting. A rank that saw it
        # there calls Shrink and waits for this rank, which would wait for that one in Agree.
        if number and not world.meeting_state(key).come.isdisjoint(numbers):
            return False
        missing = [rank for rank in others if numbers[rank] not in dead | come]
        if not missing:
            return True
        if time.monotonic() > give_up_at:
            return False
        absent = [
            CompletedWait(f"{ranks.name([rank])} to come", (rank,), False) for rank in missing
        ]
        deadline.check(ranks, absent)
        if not wait.pause():
            continue
        if number and give_up_at == math.inf and is_revoked(comm):
            give_up_at = time.monotonic() + _GRACE
        if news := world.probe(own, [numbers[rank] for rank in missing]):
            who = ranks.name_of_world([news.rank], numbers)
            raise PeerFailure(f"{deadline.operation}: {who} {news.text} ({ranks.where})")


def _meet_by_agreement(ranks: RankSet, comm: MPI.Comm, deadline: Deadline, number: int) -> bool:
    """Do so where ranks cannot be asked: one that has ended its program is not seen."""
    while True:
        come = _meeting_kinds(ranks, comm, deadline, _MEETING if number else _LAST_MEETING)
        if come or number:
            return bool(come)
        # Some were at another meeting, which has ended for them, and come to this one.


def _meeting_kinds(ranks: RankSet, comm: MPI.Comm, deadline: Deadline, kind: int) -> int:
    """Return the kind of the meeting to which all that live have come; 0 if to several."""
    from mpi4py import MPI

    bits = np.array([kind], np.intc)  # that of all: bit by bit
    others = tuple(rank for rank in range(ranks.size) if rank != ranks.rank)
    absent = [CompletedWait("other ranks to come", others, False)]
    wait = _wait(deadline)
    coming = comm.Iagree(bits)
    try:
        while not coming.Test():
            deadline.check(ranks, absent)
            wait.pause()
    except MPI.Exception:  # that a rank has died: they have agreed
        pass
    except BaseException:
        _given_up.append((coming, bits))
        raise
    return int(bits[0])


def _wait(deadline: Deadline) -> Backoff:
    return Backoff(pace=IN_RESERVE) if deadline.limit == math.inf else Backoff()


def agree(comm: MPI.Comm, flag: bool) -> bool:
    """Tell whether all say yes, and none is dead: the same on all that live; *collective*."""
    from mpi4py import MPI

    try:
        return bool(comm.Agree(int(flag)))
    except MPI.Exception:  # that a rank has died: on all of them
        return False


def shrink_and_make(
    comm: MPI.Comm, make: Callable[[MPI.Comm, MPI.Comm | None], T]
) -> tuple[T, list[int]]:
    """Make something of a communicator of the ranks that live; *collective* over these.

    Args:
        comm: revoked, or not.
        make: called with a communicator of these ranks, and with the one to revoke on errors or
            None, as `MpiTransport`. Raises `MPI.Exception` or `CollectiveError` if a rank dies.

    Returns:
        What was made, and the numbers that its ranks have in `comm`.
    """
    from mpi4py import MPI

    is_whole = failure_detector.current is not None
    while True:
        _forget_failed_creation()
        part = comm.Shrink()
        agree(part, True)  # complete on all ranks: it may be revoked from here on
        made = None
        try:
            made = make(part, part if is_whole else None)
        except (MPI.Exception, CollectiveError):
            revoke(part)  # others may wait for this rank
        if agree(part, made is not None) and made is not None:
            own, before = part.Get_group(), comm.Get_group()
            numbers = list(own.Translate_ranks(None, before))
            own.Free()
            before.Free()
            if not is_whole:
                _parts.append(part)
            liveness.disarm()
            return made, numbers
        _given_up.append((part, made))


def _forget_failed_creation() -> None:
    """Unblock the creation of communicators after one that failed because a rank died.

    Open MPI 5.0.11 makes one communicator at a time, in the order of their parents' numbers. A
    creation that fails keeps its turn, and creations from parents with higher numbers wait for
    ever. `MPI_COMM_SELF` has nearly the lowest number, so a duplicate of it releases the turn.
    """
    from mpi4py import MPI

    MPI.COMM_SELF.Dup().Free()


# Called before what `failure_detector` registers, which waits in a world of all processes.
@atexit.register
def _meet_at_end() -> None:
    """Wait until those with which this process has gone on have ended their programs, or died."""
    if not _parts:
        return
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    liveness.prepare_exit()
    wait = Backoff()
    for coming in [part.Iagree(np.array([1], np.intc)) for part in _parts]:
        with contextlib.suppress(MPI.Exception):  # that a rank has died: they have agreed
            while not coming.Test():
                wait.pause()
    liveness.fire_soon()
