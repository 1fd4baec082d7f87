"""`shrink` and `agree`: continue with the surviving ranks."""

from __future__ import annotations

import math

from collectives.arrays.reduction import MIN
from collectives.calls.group import Group
from collectives.core.errors import LaunchError
from collectives.launch import processes
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.operations.nonblocking import request_thread
from collectives.operations.reduce import allreduce
from collectives.p2p.endpoint import P2PEndpoint
from collectives.transport.transport import Deadline

__all__ = ["agree", "shrink"]


def shrink(group: Group, *, timeout: float | None = None) -> Group:
    """Create a group of the surviving ranks, and release this one; see `Communicator.shrink`."""
    if not is_fault_tolerant():
        library = processes.library().partition(",")[0]
        raise LaunchError(
            f"shrink: a dead rank ends this job, expected Open MPI >= 5 started by `mpirun "
            f"--with-ft ulfm`, got {library}; start the job again, from its last "
            f"checkpoint ({group.transport.where})"
        )
    limit = group.settings.timeout if timeout is None else timeout
    # Not `begin_call`, which refuses an unusable group and compares the call with all ranks.
    deadline = Deadline("shrink", limit, group.settings.stall_warning)
    record = group.begin("shrink")
    try:
        transport, members = group.transport.shrink(deadline)
    except BaseException as error:
        group.mark_failed("shrink", error)
        group.end(record, error)
        raise
    group.end(record, None)
    # Only after the new transport exists: until then an error leaves the group to the caller.
    _release(group)
    # The new group's numbers in the world, through the numbers of the old group.
    transport.world = [group.world_ranks[rank] for rank in members]
    leaders = [group.leaders[rank] for rank in members]
    return Group(transport, leaders, group.settings, f"{group.recorder.name}.shrunk")


def agree(group: Group, flag: bool, *, timeout: float | None = None) -> bool:
    """Return whether all ranks pass True and no rank has died; equal on all surviving ranks.

    *Collective*: all surviving ranks. Use it before a step that all ranks or no rank must take,
    such as leaving a phase in which other ranks may still need this rank. `allreduce` is faster,
    but if a rank dies during the call, some ranks may return and other ranks raise.

    Args:
        flag: vote of this rank.
        timeout: seconds to wait for all ranks; None uses UNISONO_TIMEOUT. `math.inf` suits spare
            ranks in a job that survives dead ranks: no warnings, and fewer polls. Then a death or
            the end of a rank's program ends the wait. The end of a program is not detected in a
            world of some processes only (`init(comm)`).

    Returns:
        The result; False also if the communicator is unusable.

    Raises:
        CollectiveTimeout: a living rank is missing at the deadline.
        PeerFailure: the program of a rank has ended; or a rank has died, in a job that does not
            survive dead ranks.

    Example:
        >>> import collectives as cc
        >>> cc.init().agree(True)
        True
    """
    # Without fault tolerance a death ends the job, so an all-reduce gives the same answer on all
    # ranks.
    if not is_fault_tolerant() or group.size == 1:
        return bool(allreduce(group, int(flag), op=MIN, timeout=timeout))
    limit = group.settings.timeout if timeout is None else timeout
    warn_after = group.settings.stall_warning if limit < math.inf else limit
    deadline = Deadline("agree", limit, warn_after)
    record = group.begin("agree")
    try:
        # A rank with an unusable group votes False, because it cannot take the step.
        answer = group.transport.agree(flag and group.unusable is None, deadline)
    except BaseException as error:
        group.mark_failed("agree", error)
        group.end(record, error)
        raise
    group.end(record, None)
    return answer


def _release(group: Group) -> None:
    """End the threads of a communicator with dead ranks; its memory is freed with the object."""
    # A group with dead ranks cannot be closed together, so only its threads end.
    group.refuse_calls("it was shrunk")
    group.close_state_of(request_thread)
    group.close_state_of(P2PEndpoint)
    if group.node_engine is not None:
        group.node_engine.peers.close()
