"""Functions for libraries built on `collectives`; programs do not need them.

`strategies` is such a library. The functions take a communicator, and show of it what errors,
services and wrappers of other frameworks have to know.

Example:
    >>> import collectives as cc
    >>> from collectives import extend
    >>> extend.describe_ranks(cc.init(), 0)
    'rank 0'
"""

from __future__ import annotations

from typing import TypeVar

from collectives.calls.call import begin_call
from collectives.channel import channel
from collectives.channel.channel import Channel
from collectives.communicator import Communicator, group_of
from collectives.core.errors import LaunchError, in_turn
from collectives.launch.launcher import launched_processes
from collectives.tracing.call_sites import calls_from_here

__all__ = [
    "Channel",
    "calls_from_here",
    "check_usable",
    "collective_error",
    "describe_ranks",
    "launched_processes",
    "node_leaders",
    "open_channel",
    "supports_threads",
    "uses_messages",
]

E = TypeVar("E", bound=BaseException)


def open_channel(comm: Communicator) -> Channel:
    """Make a channel: messages between any two ranks at any time; *collective*.

    For services that answer whoever asks. It does not disturb operations and is not disturbed by
    them: it goes on when ranks die, also where the communicator does not.

    Raises:
        LaunchError: MPI was started without support for several threads.
    """
    group = group_of(comm)
    with begin_call(group, "open_channel") as call:
        call.describe()
        call.agree()
        mailbox = group.transport.open_mailbox()
        return channel.open_channel(
            group.transport, mailbox, group.leaders, call.deadline, group.dead_here
        )


def describe_ranks(comm: Communicator, *ranks: int) -> str:
    """Return how errors name ranks: of a group by their numbers in the world, too."""
    return group_of(comm).transport.name(ranks)


def collective_error(comm: Communicator, error: E, first: int = 0) -> E:
    """Mark an error as one that all ranks raise, so that one of them prints its traceback.

    Only where nobody catches it. The others wait a moment, and print it if they are still there
    then: the one before them has caught it.

    Args:
        comm: of the ranks that raise it.
        error: about to be raised; the same words on all ranks.
        first: the rank that prints it.

    Returns:
        The error.
    """
    return in_turn(error, (comm.rank - first) % comm.size)


def check_usable(comm: Communicator, operation: str) -> None:
    """Refuse an operation as the communicator's own do.

    Raises:
        CollectiveError: an earlier one failed, or the communicator was closed.
    """
    group_of(comm).check_usable(operation)


def supports_threads(comm: Communicator) -> bool:
    """Tell whether several threads may send messages: MPI_THREAD_MULTIPLE."""
    try:
        group_of(comm).transport.check_threads("supports_threads")
    except LaunchError:
        return False
    return True


def uses_messages(comm: Communicator) -> bool:
    """Tell whether operations send messages; not where all ranks share memory, or there is one.

    Known after the first operation.
    """
    return group_of(comm).uses_messages


def node_leaders(comm: Communicator) -> list[int]:
    """Return for every rank an integer that is the same exactly for the ranks of one node."""
    return list(group_of(comm).leaders)
