"""ULFM: the surviving ranks agree on who is left and form a new communicator.

Only where the MPI library survives the death of a rank: Open MPI >= 5 under `mpirun --with-ft
ulfm`.

    rank 0             rank 1      rank 2
    revoke              dead       revoke            aborts pending operations
    "here" -> 2                    "here" -> 0       within a limit, beside the communicator
    Shrink                         Shrink            MPI agrees on the dead, and leaves them out
    Agree                          Agree             complete on all: it may be revoked from here on
    Iallreduce                     Iallreduce        the number of the new communicator
    Agree                          Agree             did all ranks succeed? else once more

MPI's own calls have no limit. They start once all surviving ranks have arrived, so they do not wait
for a rank that computes. A world of only some processes has no messages beside its communicators.
There ranks synchronize by an agreement that they abandon at the limit. A second agreement
synchronizes the ends of their programs. `Ishrink`, which a rank could abandon, fails with an
internal error in Open MPI 5.0.11. If a rank dies meanwhile, the next attempt leaves it out.

Cost: P messages of 16 bytes to and from each rank, and four agreements: milliseconds.

Source: W. Bland et al., "Post-failure recovery of MPI communication capability: design and
rationale", IJHPCA 27(3), 2013; MPIX_Comm_revoke, MPIX_Comm_shrink and MPIX_Comm_agree of Open MPI.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from collectives.core.errors import CollectiveError, PeerFailure
from collectives.core.process_hooks import ExitStage, at_exit, in_child
from collectives.transport import failure_detector, liveness
from collectives.transport.backoff import IN_RESERVE, Backoff, CompletedWait, Deadline, RankSet

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["agree", "shrink_and_make", "is_revoked", "rendezvous", "revoke"]

T = TypeVar("T")

# Seconds from seeing that a communicator is revoked to the end of the wait for other ranks: the
# news that a rank has arrived takes another path, and may be late.
_GRACE = 0.5

# Bits of a communicator's key; the number of a meeting is above them.
_KEY_BITS = 40

# Kinds of meetings, as bits: any but the last one of a communicator, and the last one.
_MEETING, _LAST_MEETING = 1, 2

# Communicators of attempts during which a rank died, and abandoned agreements. MPI may still have
# pending calls on them.
_given_up: list[object] = []

# In a world of only some processes: communicators of survivors with which this process resumed.
_parts: list[MPI.Comm] = []
in_child(_parts.clear)  # a forked child is not a rank


def is_revoked(comm: MPI.Comm) -> bool:
    """Return whether a rank has revoked a communicator, as far as this rank knows."""
    with contextlib.suppress(MPI.Exception):
        comm.Iprobe()  # MPI learns of revocations and deaths only while it is called
    try:
        return comm.Is_revoked()
    except (NotImplementedError, MPI.Exception):
        return False


def revoke(comm: MPI.Comm) -> None:
    """Revoke a communicator, which aborts all ranks' operations on it, if MPI supports that."""
    with contextlib.suppress(NotImplementedError, MPI.Exception):
        # Revoking twice can disturb ranks that are leaving their operations.
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
    """Wait until every rank has arrived or died; return whether they came to this meeting.

    Args:
        ranks: the group, for the names in errors.
        comm: communicator of these ranks; a rank that has revoked it goes to the last meeting only.
        numbers: world ranks of the group.
        key: key of the communicator (`failure_detector.next_key`).
        deadline: limit of the wait.
        number: number of the meeting in its communicator. 0 is the last meeting: a rank that has
            gone to it goes to no other.

    Raises:
        CollectiveTimeout: a surviving rank has not arrived; names the rank, except in a world of
            only some processes.
        PeerFailure: a rank has ended its program, and cannot arrive.
    """
    world = failure_detector.current
    if world is None:  # a world of only some processes
        return _meet_by_agreement(ranks, comm, deadline, number)
    own = key | number << _KEY_BITS
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    world.join_meeting(own, [numbers[rank] for rank in others])
    wait = _wait(deadline)
    give_up_at = math.inf
    while True:
        dead, come = world.meeting_state(own)
        # Check this first, because a rank may have died after it went to the last meeting. Another
        # rank that saw it there calls Shrink and waits for this rank, which would wait for that one
        # in Agree.
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
    """Run `rendezvous` without queries; cannot detect that a rank has ended its program."""
    while True:
        come = _meeting_kinds(ranks, comm, deadline, _MEETING if number else _LAST_MEETING)
        if come or number:
            return bool(come)
        # Some ranks were at another meeting, which has ended for them; they join this one next.


def _meeting_kinds(ranks: RankSet, comm: MPI.Comm, deadline: Deadline, kind: int) -> int:
    """Return the kind of meeting of all surviving ranks; 0 if the kinds differ."""
    bits = np.array([kind], np.intc)  # the agreement is a bitwise AND
    others = tuple(rank for rank in range(ranks.size) if rank != ranks.rank)
    absent = [CompletedWait("other ranks to come", others, False)]
    wait = _wait(deadline)
    coming = comm.Iagree(bits)
    try:
        while not coming.Test():
            deadline.check(ranks, absent)
            wait.pause()
    except MPI.Exception:  # a rank has died; the survivors have agreed
        pass
    except BaseException:
        _given_up.append((coming, bits))
        raise
    return int(bits[0])


def _wait(deadline: Deadline) -> Backoff:
    return Backoff(pace=IN_RESERVE) if deadline.limit == math.inf else Backoff()


def agree(comm: MPI.Comm, flag: bool) -> bool:
    """Return whether all ranks passed True and none is dead; *collective*.

    All surviving ranks return the same.
    """
    try:
        return bool(comm.Agree(int(flag)))
    except MPI.Exception:  # a rank has died; raised on all survivors
        return False


def shrink_and_make(
    comm: MPI.Comm, make: Callable[[MPI.Comm, MPI.Comm | None], T]
) -> tuple[T, list[int]]:
    """Build an object on a communicator of the surviving ranks; *collective* over these.

    Args:
        comm: the old communicator, revoked or not.
        make: called with the new communicator, and with the one to revoke on errors or None, as
            `MpiTransport`. Raises `MPI.Exception` or `CollectiveError` if a rank dies.

    Returns:
        the object, and the old number of each of its ranks in `comm`.
    """
    is_whole = failure_detector.current is not None
    while True:
        _forget_failed_creation()
        part = comm.Shrink()
        agree(part, True)  # complete on all ranks: from here on it may be revoked
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

    Open MPI 5.0.11 creates one communicator at a time, in the order of their parents' numbers. A
    failed creation keeps its turn, and creations from parents with higher numbers block forever.
    `MPI_COMM_SELF` has nearly the lowest number, so duplicating it releases the turn.
    """
    MPI.COMM_SELF.Dup().Free()


def _wait_for_survivors() -> None:
    """Wait until the surviving ranks that this process resumed with have ended or died."""
    if not _parts:
        return
    if MPI.Is_finalized():
        return
    liveness.prepare_exit()
    wait = Backoff()
    for coming in [part.Iagree(np.array([1], np.intc)) for part in _parts]:
        with contextlib.suppress(MPI.Exception):  # a rank has died; the survivors have agreed
            while not coming.Test():
                wait.pause()
    liveness.fire_soon()


at_exit(ExitStage.SURVIVORS, _wait_for_survivors)
