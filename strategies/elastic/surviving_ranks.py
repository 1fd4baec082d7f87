"""Retries collective calls with the surviving ranks."""

from __future__ import annotations

from collections.abc import Callable

import collectives as cc

__all__ = ["shrink", "retry_on_survivors"]


def shrink(comm: cc.Communicator) -> cc.Communicator:
    """Return a communicator of the surviving ranks, for the world the new world; *collective*.

    Raises:
        LaunchError: a dead rank ends this job.
        CollectiveTimeout: a surviving rank does not respond.
    """
    return cc.shrink() if comm is cc.init() else comm.shrink()


def retry_on_survivors(
    comm: cc.Communicator, call: Callable[[cc.Communicator], object]
) -> cc.Communicator:
    """Repeat a collective call until all surviving ranks complete it; *collective* over them.

    Args:
        comm: the ranks.
        call: collective call; may be repeated.

    Returns:
        The surviving ranks.

    Raises:
        PeerFailure: a rank has died, but the job does not outlive its ranks.
        CollectiveTimeout: a surviving rank does not respond.
    """
    # Without ULFM a death ends the job, so there is nothing to repeat.
    if not cc.is_fault_tolerant():
        call(comm)
        return comm
    while True:
        done = False
        try:
            call(comm)
            done = True
        except cc.CollectiveTimeout:
            raise  # the rank that does not respond would also be missing in `agree`
        except cc.CollectiveError:
            # The communicator still works: an error of the call on all ranks, not a death.
            if comm.failure is None:
                raise
        # `call` may succeed on some ranks and fail on others, so the ranks must agree.
        if comm.agree(done):
            return comm
        comm = shrink(comm)
