"""Retries collective calls with the surviving ranks."""

from __future__ import annotations

from collections.abc import Callable

import collectives as cc

__all__ = ["shrink", "retry_on_survivors"]


def shrink(comm: cc.Communicator) -> cc.Communicator:
    """Make a communicator of the ranks that live; of the world, it is the new world; *collective*.

    Raises:
        LaunchError: a dead rank ends this job.
        CollectiveTimeout: a rank that lives has not come.
    """
    return cc.shrink() if comm is cc.init() else comm.shrink()


def retry_on_survivors(
    comm: cc.Communicator, call: Callable[[cc.Communicator], object]
) -> cc.Communicator:
    """Make a collective call until all that live have made it; *collective* over these.

    Args:
        comm: the ranks.
        call: to be made, possibly more than once.

    Returns:
        Those that live.

    Raises:
        PeerFailure: a rank has died, where the job does not outlive its ranks.
        CollectiveTimeout: a rank that lives has not come.
    """
    if not cc.is_fault_tolerant():
        call(comm)
        return comm
    while True:
        done = False
        try:
            call(comm)
            done = True
        except cc.CollectiveTimeout:
            raise
        except cc.CollectiveError:
            if comm.failure is None:
                raise
        if comm.agree(done):
            return comm
        comm = shrink(comm)
