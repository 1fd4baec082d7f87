"""Functions for libraries built on `collectives`; programs do not need them.

`strategies` is such a library. Most functions take a communicator and return facts about it that
services and wrappers of other frameworks need, such as thread support and node boundaries.

Example:
    >>> import collectives as cc
    >>> from collectives import extend
    >>> extend.describe_ranks(cc.init(), 0)
    'rank 0'
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from collectives import world
from collectives.arrays.host_arrays import Array
from collectives.arrays.torch_adapter import as_tensor, elements_of
from collectives.calls.call import begin_call
from collectives.calls.fast_path import Given
from collectives.calls.xla_handler import XlaHandler, create_xla_handler
from collectives.channel import channel
from collectives.channel.channel import Channel
from collectives.communicator import Communicator, group_of, open_communicators
from collectives.core.background_threads import BackgroundThread
from collectives.core.errors import LaunchError, in_turn
from collectives.core.process_hooks import in_child
from collectives.core.references import is_referenced_elsewhere
from collectives.core.visible_gpus import visible_gpus
from collectives.launch import processes
from collectives.launch.launcher import launcher_rank, launcher_world_size
from collectives.operations import plan_cache
from collectives.operations.broadcast import broadcast
from collectives.operations.gather_scatter import allgather
from collectives.operations.reduce import allreduce
from collectives.operations.reduce_scatter import reduce_scatter
from collectives.tracing.call_sites import (
    CallOrigin,
    caller,
    calls_from,
    current_origin,
    known_as,
)

__all__ = [
    "BackgroundThread",
    "CallOrigin",
    "Channel",
    "XlaHandler",
    "as_tensor",
    "caller",
    "calls_from",
    "check_usable",
    "collective_error",
    "comm_or_world",
    "create_xla_handler",
    "current_origin",
    "describe_ranks",
    "elements_of",
    "in_child",
    "is_referenced_elsewhere",
    "known_as",
    "launcher_rank",
    "launcher_world_size",
    "learn_call",
    "node_leaders",
    "open_channel",
    "run_on_elements",
    "supports_threads",
    "uses_messages",
    "visible_gpus",
]

E = TypeVar("E", bound=BaseException)


def open_channel(comm: Communicator) -> Channel:
    """Open a channel: messages between any two ranks at any time; *collective*.

    For services that handle requests from other ranks. A channel is independent of operations, and
    stays usable when ranks die, even if the communicator does not.

    Raises:
        LaunchError: MPI was started without support for several threads.
    """
    # A channel outlives the calls of the communicator.
    group = group_of(comm)
    with begin_call(group, "open_channel") as call:
        call.describe()
        call.agree()
        # After the agreement, because opening is collective.
        mailbox = group.transport.open_mailbox()
        return channel.open_channel(
            group.transport, mailbox, group.leaders, call.deadline, group.dead_here
        )


class _OnElements(NamedTuple):
    """An operation of `run_on_elements`: the key of its plans, and how it runs with and without."""

    key: Callable[[Any], plan_cache.Key]
    run_cached: Callable[..., Any]
    run: Callable[..., Any]


_ON_ELEMENTS = {
    "allreduce": _OnElements(
        functools.cache(lambda op: ("allreduce", op, "auto", None, 1, 1)),
        plan_cache.run_cached,
        lambda group, x, op, **how: allreduce(group, x, op=op, **how),
    ),
    "broadcast": _OnElements(
        functools.cache(lambda root: ("broadcast", root, "auto")),
        plan_cache.run_cached,
        broadcast,
    ),
    "allgather": _OnElements(
        functools.cache(lambda _: ("allgather", "auto")),
        plan_cache.run_cached_into,
        lambda group, x, _, **how: allgather(group, x, **how),
    ),
    "reduce_scatter": _OnElements(
        functools.cache(lambda op: ("reduce_scatter", op, "auto", 1, 1, None)),
        plan_cache.run_cached_into,
        lambda group, x, op, **how: reduce_scatter(group, x, op=op, **how),
    ),
}


def run_on_elements(
    comm: Communicator, operation: str, option: Any, x: Any, out: Any, timeout: float,
    view: Callable[[Any], Array | None],
) -> bool:  # fmt: skip
    """Run an operation on PyTorch tensors; autograd does not see that `out` was written.

    Args:
        comm: communicator.
        operation: "allreduce", "broadcast", "allgather" or "reduce_scatter".
        option: op of a reduction for its dtype, or root of a broadcast.
        x: a tensor on the host.
        out: a tensor for the result; may be `x`.
        timeout: seconds.
        view: returns the elements in C order, None if a copy is needed. Not called if the fast path
            knows the call.

    Returns:
        False if `view` has returned None; then nothing has happened.

    Raises:
        As the operation.
    """
    group, frame, how = group_of(comm), caller(), _ON_ELEMENTS[operation]
    key = how.key(option)
    if group.fast_path.repeat(x, out, frame, timeout, *key) is not None:
        return True
    array = view(x)
    target = array if out is x else view(out)
    if array is None or target is None:
        return False
    try:
        given = Given(x, out, marks=False)
        how.run_cached(group, key, array, target, timeout, frame, given)
    except plan_cache.NoPlan:
        how.run(group, array, option, out=target, timeout=timeout)
    return True


def describe_ranks(comm: Communicator, *ranks: int) -> str:
    """Return ranks as errors name them; in a group also by their ranks in the world."""
    return group_of(comm).transport.name(ranks)


def collective_error(comm: Communicator, error: E, first: int = 0) -> E:
    """Mark an error that all ranks raise, so that only one rank prints its traceback.

    If the error is uncaught, rank `first` prints the traceback and aborts the job. The other ranks
    wait their turn, and print it if the ranks before them have caught the error.

    Args:
        comm: communicator of the ranks that raise it.
        error: exception with the same text on all ranks.
        first: rank that prints first.

    Returns:
        The error.
    """
    # In the order of ranks, beginning with `first`.
    return in_turn(error, (comm.rank - first) % comm.size)


def check_usable(comm: Communicator, operation: str) -> None:
    """Raise the error that an operation of this communicator would raise if it is unusable.

    Raises:
        CollectiveError: an earlier operation failed, or the communicator was closed.
    """
    group_of(comm).check_usable(operation)


def comm_or_world(comm: Communicator | None, operation: str) -> Communicator:
    """Return `comm`; for None the communicator of all processes of the job.

    Raises:
        ValueError: `comm` is None, and the program has called `from_mpi` with some of the processes
            instead of `init`: it would silently get all of them, or wait for processes that do
            something else.
    """
    if comm is not None:
        return comm
    if not world.is_initialized():
        known = open_communicators()
        # Without a communicator MPI need not have started.
        if known and all(one.size < processes.number_of_processes() for one in known):
            raise ValueError(
                f"{operation}: comm is missing, expected comm=: the program has a communicator of "
                "some processes, by from_mpi, and has not called init() for all"
            )
    return world.init()


def learn_call(handler: XlaHandler, number: int, comm: Communicator, user: Communicator) -> bool:
    """Let a handler repeat the newest call of a communicator; see `XlaHandler.learn`."""
    return handler.learn(number, group_of(comm), group_of(user))


def supports_threads(comm: Communicator) -> bool:
    """Return whether several threads may send messages (MPI_THREAD_MULTIPLE)."""
    # By the error of the transport, which knows MPI's level.
    try:
        group_of(comm).transport.check_threads("supports_threads")
    except LaunchError:
        return False
    return True


def uses_messages(comm: Communicator) -> bool:
    """Return whether operations send messages, which ranks of one node need not.

    Valid after the first operation.
    """
    return group_of(comm).uses_messages


def node_leaders(comm: Communicator) -> list[int]:
    """Return one integer per rank; two ranks have the same integer if they share a node."""
    # A copy, because callers may change it.
    return list(group_of(comm).leaders)
