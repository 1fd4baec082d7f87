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
    deadline = Deadline("shrink", limit, group.settings.stall_warning)
    record = group.begin("shrink")
    try:
        transport, members = group.transport.shrink(deadline)
    except BaseException as error:
        group.mark_failed("shrink", error)
        group.end(record, error)
        raise
    group.end(record, None)
    _release(group)
    transport.world = [group.world_ranks[rank] for rank in members]
    leaders = [group.leaders[rank] for rank in members]
    return Group(transport, leaders, group.settings, f"{group.recorder.name}.shrunk")


def agree(group: Group, flag: bool, *, timeout: float | None = None) -> bool:
    """Tell whether all ranks say yes, and none has died; the same answer on all that live.

    *Collective* over these. For what must not be done by some and left undone by others, such as to
    leave a part of a program in which the others may still need this rank. `allreduce` is faster,
    but when a rank dies meanwhile some may have its result and others its error.

    Args:
        flag: what this rank says.
        timeout: seconds within which all have to come; the setting's if None. `math.inf` for ranks
            in reserve, in a job that outlives its ranks: without a word, and with fewer looks. Then
            a death ends the wait, and a rank that ends its program, but for a world of some
            processes only (`init(comm)`), whose ranks cannot be asked.

    Returns:
        False, too, if the communicator is of no use any more.

    Raises:
        CollectiveTimeout: a rank that lives has not come.
        PeerFailure: a rank has ended its program, or died where the job does not outlive its ranks.

    Example:
        >>> import collectives as cc
        >>> cc.init().agree(True)
        True
    """
    if not is_fault_tolerant() or group.size == 1:
        return bool(allreduce(group, int(flag), op=MIN, timeout=timeout))
    limit = group.settings.timeout if timeout is None else timeout
    warn_after = group.settings.stall_warning if limit < math.inf else limit
    deadline = Deadline("agree", limit, warn_after)
    record = group.begin("agree")
    try:
        answer = group.transport.agree(flag and group.unusable is None, deadline)
    except BaseException as error:
        group.mark_failed("agree", error)
        group.end(record, error)
        raise
    group.end(record, None)
    return answer


def _release(group: Group) -> None:
    """End the threads of a communicator with dead ranks; its memory goes with its last user."""
    group.refuse_calls("it was shrunk")
    group.close_state_of(request_thread)
    group.close_state_of(P2PEndpoint)
    if group.node_engine is not None:
        group.node_engine.peers.close()
