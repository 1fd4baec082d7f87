"""World communicator, and its operations as functions of the package."""

from __future__ import annotations

import copyreg
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from collectives.communicator import (
    Communicator,
    from_mpi,
    group_of,
    open_communicators,
    this_thread,
)
from collectives.core import other_projects, oversubscription, settings
from collectives.launch import abort_hook, processes
from collectives.launch.open_mpi import is_fault_tolerant
from collectives.operations import timeline_control
from collectives.tracing import recorder
from collectives.transport import failure_detector

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "exscan",
    "exscan_async",
    "gather",
    "gather_async",
    "gather_object",
    "group",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_broadcast",
    "grouped_broadcast_async",
    "grouped_reduce_scatter",
    "grouped_reduce_scatter_async",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "local_rank",
    "local_size",
    "neighbours",
    "node_rank",
    "num_nodes",
    "plan_allgather",
    "plan_allreduce",
    "plan_broadcast",
    "plan_buckets",
    "plan_reduce_scatter",
    "probe",
    "rank",
    "recv",
    "recv_object",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scan",
    "scan_async",
    "scatter",
    "scatter_async",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "shared_empty",
    "shrink",
    "shutdown",
    "size",
    "sparse_allreduce",
    "split",
    "start_timeline",
    "stop_timeline",
]

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_world: Communicator | None = None
_starting = threading.RLock()  # several threads may call `init` at first; it may call `shutdown`
_members: list[int] = []  # processes of the world, by their numbers in MPI_COMM_WORLD


def init(comm: MPI.Comm | Sequence[int] | None = None) -> Communicator:
    """Start MPI if needed, and return the communicator of all or some processes of the job.

    The first call is *collective* over the processes of the world; later calls return the same
    object. `init` checks the launch (see `collectives.launch.launcher`). From here on, an uncaught
    exception on one rank aborts the whole job. Rank 0 warns of unknown environment variables that
    resemble settings, and of other projects with the names of these packages. One rank of each node
    warns of more threads than cores (see `collectives.core.oversubscription`).

    Args:
        comm: processes of the world: an mpi4py communicator, which remains the caller's, or process
            numbers in `MPI.COMM_WORLD`, in their new order; then only these processes call `init`.
            None for all processes.

    Raises:
        LaunchError: a launcher started several processes, but MPI sees one; or no MPI library is
            installed; or this process is a child of a rank; or settings that must be equal differ
            (on all ranks).
        TypeError: `comm` is neither an mpi4py communicator nor a sequence of integers.
        ValueError: an environment variable of Unisono is invalid, or the file of
            `python -m collectives tune` is damaged; or this process is not in `comm`; or a world of
            other processes exists.
        OSError: a file of `UNISONO_TIMELINE` cannot be written; the other ranks raise
            `MismatchError`, and no world exists afterwards.
    """
    if this_thread.world is not None:
        if comm is not None:
            raise ValueError(
                "init: there is a world already, of the ranks of collectives.testing; split it"
            )
        return this_thread.world
    with _starting:
        return _init_once(comm)


def _init_once(comm: MPI.Comm | Sequence[int] | None) -> Communicator:
    """Return the world, after creating it in the first call; arguments and errors as `init`."""
    global _world, _members
    # Later calls must name the same processes, or none.
    if _world is not None:
        if comm is not None and (given := processes.checked_ranks(comm)) != _members:
            raise ValueError(
                f"init: there is a world already, of the processes {_members}, got {given}; call "
                "shutdown() first"
            )
        return _world
    # Before MPI starts, so that a wrong variable is found at once.
    configuration = settings.from_environment()
    all_processes = processes.start_mpi(configuration)
    # The caller's communicator, or one of these processes.
    ranks = all_processes if comm is None else processes.sub_communicator(comm)
    _members = processes.checked_ranks(ranks)
    # The detector needs all processes: it uses messages among them.
    if len(_members) == all_processes.Get_size():
        failure_detector.install(all_processes, recorder.last_call, is_fault_tolerant())
    # Set before the steps below, which need a world.
    _world = from_mpi(ranks, configuration)
    if failure_detector.current is not None and (
        _world.num_nodes > 1 or _world.settings.shared_memory is None
    ):  # otherwise notes in shared memory show it
        failure_detector.current.answer_while_compiling()
    # By the number among all processes, because worlds of other processes may write files beside
    # it.
    recorder.install(all_processes.Get_rank(), all_processes.Get_size(), configuration.recorder_dir)
    if configuration.abort_on_exception:
        abort_hook.abort_on_exception(all_processes, configuration.traceback)
    # One rank warns, because all ranks have the same environment as a rule.
    warnings = []
    if _world.rank == 0:
        warnings += settings.unknown_variables(os.environ)
        warnings += [f"init: {text}" for text in other_projects.conflicts()]
    # Collective inside each node, so all ranks call it.
    for text in filter(None, [*warnings, oversubscription.warning_for(ranks, os.environ)]):
        log.warning("[%d/%d] %s", _world.rank, _world.size, text)
    # Negotiated: either all ranks start a timeline or none.
    if _world.settings.timeline is not None:
        try:
            timeline_control.start(group_of(_world), _world.settings.timeline)
        except BaseException:
            # Otherwise the next `init` would return a world without the timeline.
            shutdown()
            raise
    return _world


def _reduce(comm: Communicator) -> tuple[Callable[..., Communicator], tuple[Any, ...]]:
    """Pickle the world as `init()`, and other communicators as name and ranks."""
    # The world of another process is created by its own `init`.
    if comm is _find():
        return init, ()
    return _find_open, _name_and_ranks(comm)


def _name_and_ranks(comm: Communicator) -> tuple[str, list[int]]:
    group = group_of(comm)
    return group.recorder.name, list(group.world_ranks)


def _find_open(name: str, ranks: list[int]) -> Communicator:
    """Return the open communicator of this process with this name and these ranks.

    Raises:
        ValueError: none matches, as in another job, or several match.
    """
    found = [
        comm
        for comm in open_communicators()
        # The world is pickled as `init()`, never by its name.
        if comm is not _find() and _name_and_ranks(comm) == (name, ranks)
    ]
    if len(found) != 1:
        raise ValueError(
            "unpickle: a communicator of a group can be loaded in its own job only, while it is "
            f"open, expected one of the ranks {ranks} named {name!r}, got {len(found)}"
        )
    return found[0]


# By `copyreg`, because `__reduce__` in `communicator` could not know the world.
copyreg.pickle(Communicator, _reduce)


def shutdown() -> None:
    """Close the world communicator; *collective*, harmless without a world.

    MPI runs until the process ends, so you may call `init` again.
    """
    global _world
    if this_thread.world is None and _world is not None:
        # First None, so that an error below leaves no half-closed world.
        world, _world = _world, None
        # Before the group closes, because the clocks are compared once more.
        timeline_control.stop(group_of(world))
        world.close()


def is_initialized() -> bool:
    """Return whether a world exists."""
    return _find() is not None


def _find() -> Communicator | None:
    """Return the world of this thread, if it is a rank, else that of the process."""
    return _world if this_thread.world is None else this_thread.world


def _current() -> Communicator:
    world = _find()
    if world is None:
        raise RuntimeError("collectives: not initialized; call collectives.init() first")
    return world


def rank() -> int:
    """Return the number of this process in the world."""
    return _current().rank


def size() -> int:
    """Return the number of processes in the world."""
    return _current().size


def local_rank() -> int:
    """Return the number of this process among those of its node."""
    return _current().local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return _current().local_size


def node_rank() -> int:
    """Return the number of this node."""
    return _current().node_rank


def num_nodes() -> int:
    """Return the number of nodes."""
    return _current().num_nodes


def start_timeline(directory: str | os.PathLike[str]) -> None:
    """Record the start, waits, reductions, copies and end of every rank's calls.

    *Collective*: all ranks of the world. Perfetto and Chrome show the files `rank-0.json` and so
    on. `python -m collectives timeline DIRECTORY` merges the files, and prints which rank waited
    for which. Files of an earlier timeline in the directory are overwritten.

    Args:
        directory: created if missing; preferably shared by all nodes.

    Raises:
        RuntimeError: `init` was not called.
        ValueError: a timeline is already running.
        OSError: a file cannot be written; the other ranks raise `MismatchError`.

    Cost: 7 to 30 us and 400 to 1,100 bytes per call (`docs/timeline.md`).
    """
    timeline_control.start(group_of(_current()), os.fspath(directory))


def stop_timeline() -> None:
    """Stop the timelines that `start_timeline` or `UNISONO_TIMELINE` has started.

    *Collective*: all ranks of the world; harmless without a timeline. `shutdown` also does it. If
    the program ends without either, the files are complete, but clocks of nodes are less well
    aligned.
    """
    timeline_control.stop(group_of(_current()))


def _on_world(method: Callable[Concatenate[Communicator, P], R]) -> Callable[P, R]:
    name = method.__name__

    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        # Looked up in each call, because the world may be replaced.
        bound: Callable[P, R] = getattr(_current(), name)
        return bound(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = method.__doc__
    # For help(), editors and notebooks: the signature of the method without `self`.
    signature = inspect.signature(method)
    own = list(signature.parameters.values())[1:]
    vars(function)["__signature__"] = signature.replace(parameters=own)
    return function


_shrink = _on_world(Communicator.shrink)


# `wraps` gives the signature of the method; the body must also replace the world.
@functools.wraps(_shrink)
def shrink(*, timeout: float | None = None) -> Communicator:  # noqa: D103  (the method's)
    global _world, _members
    _world = _shrink(timeout=timeout)
    # By the world numbers, which `init` compares.
    _members = list(group_of(_world).world_ranks)
    return _world


allreduce = _on_world(Communicator.allreduce)
reduce = _on_world(Communicator.reduce)
scatter = _on_world(Communicator.scatter)
alltoall = _on_world(Communicator.alltoall)
reduce_scatter = _on_world(Communicator.reduce_scatter)
broadcast = _on_world(Communicator.broadcast)
gather = _on_world(Communicator.gather)
allgather = _on_world(Communicator.allgather)
barrier = _on_world(Communicator.barrier)
send = _on_world(Communicator.send)
isend = _on_world(Communicator.isend)
recv = _on_world(Communicator.recv)
irecv = _on_world(Communicator.irecv)
sendrecv = _on_world(Communicator.sendrecv)
probe = _on_world(Communicator.probe)
send_object = _on_world(Communicator.send_object)
recv_object = _on_world(Communicator.recv_object)
broadcast_object = _on_world(Communicator.broadcast_object)
allgather_object = _on_world(Communicator.allgather_object)
gather_object = _on_world(Communicator.gather_object)
scatter_object = _on_world(Communicator.scatter_object)
scan = _on_world(Communicator.scan)
exscan = _on_world(Communicator.exscan)
scan_async = _on_world(Communicator.scan_async)
exscan_async = _on_world(Communicator.exscan_async)
split = _on_world(Communicator.split)
group = _on_world(Communicator.group)
allreduce_async = _on_world(Communicator.allreduce_async)
reduce_async = _on_world(Communicator.reduce_async)
reduce_scatter_async = _on_world(Communicator.reduce_scatter_async)
broadcast_async = _on_world(Communicator.broadcast_async)
gather_async = _on_world(Communicator.gather_async)
allgather_async = _on_world(Communicator.allgather_async)
scatter_async = _on_world(Communicator.scatter_async)
alltoall_async = _on_world(Communicator.alltoall_async)
barrier_async = _on_world(Communicator.barrier_async)
grouped_allreduce = _on_world(Communicator.grouped_allreduce)
grouped_allreduce_async = _on_world(Communicator.grouped_allreduce_async)
grouped_allgather = _on_world(Communicator.grouped_allgather)
grouped_allgather_async = _on_world(Communicator.grouped_allgather_async)
grouped_broadcast = _on_world(Communicator.grouped_broadcast)
grouped_broadcast_async = _on_world(Communicator.grouped_broadcast_async)
grouped_reduce_scatter = _on_world(Communicator.grouped_reduce_scatter)
grouped_reduce_scatter_async = _on_world(Communicator.grouped_reduce_scatter_async)
sparse_allreduce = _on_world(Communicator.sparse_allreduce)
shared_empty = _on_world(Communicator.shared_empty)
plan_allreduce = _on_world(Communicator.plan_allreduce)
plan_broadcast = _on_world(Communicator.plan_broadcast)
plan_allgather = _on_world(Communicator.plan_allgather)
plan_reduce_scatter = _on_world(Communicator.plan_reduce_scatter)
neighbours = _on_world(Communicator.neighbours)
plan_buckets = _on_world(Communicator.plan_buckets)
