"""Who is left when ranks have died: those that live meet, and go on by themselves.

Only where the MPI library outlives its ranks: Open MPI >= 5 under `mpirun --with-ft ulfm`.

    rank 0             rank 1      rank 2
    revoke              dead       revoke            whoever waits leaves its operation
    "here" -> 2                    "here" -> 0       within a limit, beside the communicator
    Shrink                         Shrink            MPI agrees on the dead, and leaves them out
    Dup, ...                       Dup, ...          the private communicator of the new group
    Agree                          Agree             did all come through? else once more

MPI's own calls, but the last two lines of which have no limit, are made when all that live have
come: they wait for nobody who computes. `Ishrink`, which could be given up, fails with an internal
error in Open MPI 5.0.11. A rank that dies meanwhile is left out by the next attempt.

Cost: P messages of 16 bytes to and from each rank, and three agreements: milliseconds.

Source: W. Bland et al., "Post-failure recovery of MPI communication capability: design and
rationale", IJHPCA 27(3), 2013; MPIX_Comm_revoke, MPIX_Comm_shrink and MPIX_Comm_agree of Open MPI.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from collectives.errors import CollectiveError, PeerFailure
from collectives.transport import liveness, whereabouts
from collectives.transport.waiting import IN_RESERVE, Deadline, Known, Ranks, Wait, named

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["agree", "form", "is_revoked", "meet", "revoke"]

T = TypeVar("T")

# Seconds between the news that a rank has given a communicator up and the end of the wait for it:
# that it has come may be known later, since it takes another way.
_GRACE = 0.5

# Of a key: those of communicators are counted.
_KEY_BITS = 40

# Communicators of attempts during which a rank has died. MPI may still have calls on them.
_given_up: list[object] = []


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


def meet(
    ranks: Ranks,
    numbers: Sequence[int],
    key: int,
    deadline: Deadline,
    number: int = 0,
    is_given_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until every rank has come or died; tell whether they have come to this meeting.

    Args:
        ranks: the group, as errors name it.
        numbers: of its ranks in the world.
        key: of the communicator (`whereabouts.next_key`).
        deadline: the limit.
        number: of the meeting, of those that a communicator has; its last one is number 0, and
            who has come to that one will come to no other.
        is_given_up: whether a rank will make no more calls: it comes to no later meeting.

    Raises:
        CollectiveTimeout: a rank that lives has not come; names it.
        PeerFailure: one has ended its program, and will not come.
    """
    world = whereabouts.current
    if world is None:  # a world of some processes only: MPI's own waits have to do
        return True
    own = key | number << _KEY_BITS
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    world.come(own, [numbers[rank] for rank in others])
    wait = Wait(pace=IN_RESERVE) if deadline.limit == math.inf else Wait()
    give_up_at = math.inf
    while True:
        dead, come = world.here(own)
        missing = [rank for rank in others if numbers[rank] not in dead | come]
        if not missing:
            return True
        if number and not world.here(key).come.isdisjoint(numbers):
            return False
        if time.monotonic() > give_up_at:
            return False
        absent = [Known(f"{ranks.name([rank])} to come", (rank,), False) for rank in missing]
        deadline.check(ranks, absent)
        if not wait.pause():
            continue
        if give_up_at == math.inf and is_given_up():
            give_up_at = time.monotonic() + _GRACE
        if (news := world.look(own, [numbers[rank] for rank in missing])) is not None:
            who = named([news.rank])
            raise PeerFailure(f"{deadline.operation}: world {who} {news.text} ({ranks.where})")


def agree(comm: MPI.Comm, flag: bool) -> bool:
    """Tell whether all say yes, and none is dead: the same on all that live; *collective*."""
    from mpi4py import MPI

    try:
        return bool(comm.Agree(int(flag)))
    except MPI.Exception:  # that a rank has died: on all of them
        return False


def form(comm: MPI.Comm, make: Callable[[MPI.Comm], T]) -> tuple[T, list[int]]:
    """Make something of a communicator of the ranks that live; *collective* over these.

    Args:
        comm: revoked, or not.
        make: collective over the ranks of what it is given; raises MPI's errors, or ours, where
            one of them dies.

    Returns:
        What was made, and the numbers that its ranks have in `comm`.
    """
    from mpi4py import MPI

    while True:
        part = comm.Shrink()
        made = None
        try:
            made = make(part)
        except (MPI.Exception, CollectiveError):
            revoke(part)  # others may wait for this rank
        if agree(part, made is not None) and made is not None:
            own, before = part.Get_group(), comm.Get_group()
            numbers = list(own.Translate_ranks(None, before))
            own.Free()
            before.Free()
            part.Free()
            liveness.lift_limit()
            return made, numbers
        _given_up.append((part, made))
