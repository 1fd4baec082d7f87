"""`Communicator`: the user's handle of a group, with all operations as methods."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import numpy as np

from collectives.calls import call, shared_arrays
from collectives.calls.group import Group
from collectives.calls.shared_settings import negotiate
from collectives.core import settings, suggestions
from collectives.fusion import allreduce as grouped
from collectives.fusion import gather as grouped_rows
from collectives.fusion import plan_buckets as plan
from collectives.launch import processes
from collectives.operations import broadcast as broadcasts
from collectives.operations import gather_scatter, objects, persistent, shrink, sparse
from collectives.operations import neighbours as neighbourhoods
from collectives.operations import reduce as reductions
from collectives.operations import reduce_scatter as reduce_scatters
from collectives.operations import scan as scans
from collectives.operations import split as groups
from collectives.operations.nonblocking import nonblocking_twin, request_thread
from collectives.p2p import send_recv
from collectives.p2p.endpoint import P2PEndpoint
from collectives.transport.mpi import MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = ["Communicator", "from_mpi", "group_of", "open_communicators", "this_thread"]

P = ParamSpec("P")
R = TypeVar("R")

# All communicators of this process.
_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def from_mpi(comm: MPI.Comm, configuration: settings.Settings | None = None) -> Communicator:
    """Create a communicator from an `mpi4py.MPI.Comm`, which remains the caller's.

    *Collective*: every rank of `comm`. The two communicators share no messages: MPI calls on `comm`
    may run in between, and `comm` may be freed afterwards. Without `init`, an uncaught exception
    does not abort the job, and a rank of another node that has exited is detected by the timeout.

    Args:
        comm: an intracommunicator.
        configuration: settings; None reads them from the environment.

    Raises:
        LaunchError: settings that must be equal differ; on all ranks.
        TypeError: `comm` is not a communicator of mpi4py.
        ValueError: `comm` is an intercommunicator or null; or rank 0 cannot read its file of
            measured links, on all ranks.

    Example:
        >>> from mpi4py import MPI
        >>> import collectives as cc
        >>> with cc.from_mpi(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() % 2)) as half:
        ...     mean = half.allreduce(1.0)
    """
    # Before any message, so that a mistake does not hang the other ranks.
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"from_mpi: expected a communicator of mpi4py, got {comm!r}")
    numbers = processes.checked_ranks(comm, "from_mpi")
    # The leader of a node is its lowest rank.
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    leader = np.array([comm.Get_rank()])
    node.Bcast(leader, 0)
    node.Free()
    leaders = np.empty(comm.Get_size(), leader.dtype)
    comm.Allgather(leader, leaders)
    # Children of this process inherit the mark, and must not call `init`.
    processes.mark_children()
    transport = MpiTransport(comm)
    # None means that the ranks are those of the world, in their order.
    if numbers != list(range(len(numbers))):
        transport.world = numbers
    settled = negotiate(configuration or settings.from_environment(), transport, leaders.tolist())
    # Not `init`: no exception hook and no failure detector.
    return Communicator(Group(transport, leaders.tolist(), settled))


def group_of(comm: Communicator) -> Group:
    """Return the group of a communicator, for the modules of this package."""
    return comm._group


class _ThisThread(threading.local):
    """State of one thread; `world` is its communicator of all ranks, if it is a rank itself."""

    world: Communicator | None = None


# `collectives.testing` sets it in threads that are ranks.
this_thread = _ThisThread()


def open_communicators() -> list[Communicator]:
    """Return the communicators of this process that can still be used."""
    # A copy, because communicators may be collected meanwhile.
    return [comm for comm in list(_communicators) if comm.failure is None]


class _Operation(Generic[P, R]):
    """Descriptor: a function of a `Group` as a method of `Communicator`.

    The first access stores the bound method in the communicator's `__dict__`, where later accesses
    find it. So a call has no extra Python frame, which would add 0.3 us to calls of 2 us.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], R]) -> None:
        self._function = function

        # For documentation, and for calls on the class.
        @functools.wraps(function)
        def on_communicator(comm: Communicator, /, *args: P.args, **options: P.kwargs) -> R:
            return function(comm._group, *args, **options)

        self._unbound = on_communicator

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, comm: Communicator | None, owner: type) -> Any:
        if comm is None:
            return self._unbound
        # In `__dict__`, so that later accesses find the bound method there.
        bound = vars(comm)[self._name] = MethodType(self._function, comm._group)
        return bound


def _operation(
    function: Callable[Concatenate[Group, P], R],
) -> Callable[Concatenate[Communicator, P], R]:
    """Make a method from a function of a group; type checkers see its signature."""
    return cast("Callable[Concatenate[Communicator, P], R]", _Operation(function))


class Communicator:
    """A group of ranks and the operations among them.

    `init`, `from_mpi`, `split`, `group` and `shrink` return one. Every operation is *collective*:
    all ranks of the group call it, in the same order, with the same op, dtype, root and, unless
    stated otherwise, shape. Results are new arrays unless `out` is given. `timeout` is in seconds
    and defaults to the setting `UNISONO_TIMEOUT`.

    After a `CollectiveTimeout` or a `PeerFailure`, messages may still be in flight, so every later
    call raises `CollectiveError` immediately. `shrink` can create a new communicator from the
    surviving ranks.

    Copying returns the same object. Pickling stores a name: within the job it loads as the
    communicator of the same ranks; in another job the world loads as `init()`, and a communicator
    of a group raises `ValueError`.

    Attributes:
        rank: number of this process in the group, `0 .. size - 1`.
        size: number of processes in the group.
        local_rank: number of this process among those of its node.
        local_size: number of the group's processes on this node.
        node_rank: number of this node, in the order of the nodes' lowest ranks.
        num_nodes: number of nodes that the group spans.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.local_rank, self.local_size = group.local_rank, group.local_size
        self.node_rank, self.num_nodes = group.node_rank, group.num_nodes
        # Weak, so that a dropped communicator is freed.
        _communicators.add(self)

    @property
    def settings(self) -> settings.Settings:
        """The settings of the job; settings that ranks must share are equal on all ranks."""
        return self._group.settings

    @property
    def failure(self) -> str | None:
        """Why later calls raise `CollectiveError`; None if the communicator is usable."""
        return self._group.unusable

    def __copy__(self) -> Communicator:
        """Return this communicator: it belongs to the process, not to the object that holds it."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Communicator:
        """Return this communicator, so that a model that holds one can be copied."""
        return self

    if not TYPE_CHECKING:

        def __dir__(self) -> list[str]:
            # Foreign names exist only to explain themselves.
            return [name for name in super().__dir__() if name not in suggestions.FOREIGN_NAMES]

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    allreduce = _operation(reductions.allreduce)
    reduce = _operation(reductions.reduce)
    reduce_scatter = _operation(reduce_scatters.reduce_scatter)
    grouped_allreduce = _operation(grouped.grouped_allreduce)
    grouped_allgather = _operation(grouped_rows.grouped_allgather)
    grouped_reduce_scatter = _operation(grouped_rows.grouped_reduce_scatter)
    grouped_broadcast = _operation(grouped_rows.grouped_broadcast)
    sparse_allreduce = _operation(sparse.sparse_allreduce)
    scan = _operation(scans.scan)
    exscan = _operation(scans.exscan)

    broadcast = _operation(broadcasts.broadcast)
    barrier = _operation(broadcasts.barrier)
    gather = _operation(gather_scatter.gather)
    allgather = _operation(gather_scatter.allgather)
    scatter = _operation(gather_scatter.scatter)
    alltoall = _operation(gather_scatter.alltoall)
    broadcast_object = _operation(objects.broadcast_object)
    allgather_object = _operation(objects.allgather_object)
    gather_object = _operation(objects.gather_object)
    scatter_object = _operation(objects.scatter_object)

    send = _operation(send_recv.send)
    isend = _operation(send_recv.isend)
    recv = _operation(send_recv.recv)
    irecv = _operation(send_recv.irecv)
    sendrecv = _operation(send_recv.sendrecv)
    probe = _operation(send_recv.probe)
    send_object = _operation(send_recv.send_object)
    recv_object = _operation(send_recv.recv_object)

    shared_empty = _operation(shared_arrays.shared_empty)
    plan_allreduce = _operation(persistent.plan_allreduce)
    plan_broadcast = _operation(persistent.plan_broadcast)
    plan_allgather = _operation(persistent.plan_allgather)
    plan_reduce_scatter = _operation(persistent.plan_reduce_scatter)
    plan_buckets = _operation(plan.plan_buckets)
    neighbours = _operation(neighbourhoods.neighbours)
    agree = _operation(shrink.agree)

    allreduce_async = _operation(nonblocking_twin(reductions.allreduce))
    reduce_async = _operation(nonblocking_twin(reductions.reduce))
    reduce_scatter_async = _operation(nonblocking_twin(reduce_scatters.reduce_scatter))
    scan_async = _operation(nonblocking_twin(scans.scan))
    exscan_async = _operation(nonblocking_twin(scans.exscan))
    broadcast_async = _operation(nonblocking_twin(broadcasts.broadcast))
    gather_async = _operation(nonblocking_twin(gather_scatter.gather))
    allgather_async = _operation(nonblocking_twin(gather_scatter.allgather))
    scatter_async = _operation(nonblocking_twin(gather_scatter.scatter))
    alltoall_async = _operation(nonblocking_twin(gather_scatter.alltoall))
    barrier_async = _operation(nonblocking_twin(broadcasts.barrier))
    grouped_allreduce_async = _operation(nonblocking_twin(grouped.grouped_allreduce))
    grouped_allgather_async = _operation(nonblocking_twin(grouped_rows.grouped_allgather))
    grouped_reduce_scatter_async = _operation(nonblocking_twin(grouped_rows.grouped_reduce_scatter))
    grouped_broadcast_async = _operation(nonblocking_twin(grouped_rows.grouped_broadcast))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Split the group: ranks that pass the same color form a new communicator; *collective*.

        Args:
            color: integer from 0 to 2^63 - 1; None joins no group.
            key: 64-bit integer that orders the new ranks; ties keep the order of the old ranks.

        Returns:
            The communicator of the new group; None without a color.

        Raises:
            TypeError: color or key is not an integer; MismatchError on the other ranks.
            ValueError: color or key is out of range; MismatchError on the other ranks.
        """
        part = groups.split(self._group, color, key)
        return None if part is None else Communicator(part)

    def group(self, ranks: Sequence[int], *, tag: int | None = None) -> Communicator | None:
        """Create a communicator of the listed ranks, numbered in the order of the list.

        *Collective* over all ranks of this communicator, including ranks that are not listed; with
        a `tag`, over the listed ranks only.

        Args:
            ranks: ranks of this communicator, without duplicates.
            tag: integer from 0 to 16,383, equal on all listed ranks and different from the tag of
                any other group that is being created from this communicator at the same time.

        Returns:
            The communicator of the new group; None on ranks that are not listed.

        Raises:
            ValueError: a rank does not exist or is listed twice; the tag is out of range; or this
                rank passes a tag but is not listed.
            MismatchError: the lists of the ranks differ.
            CollectiveTimeout: a listed rank did not call within the timeout.
        """
        part = groups.create_group(self._group, ranks, tag=tag)
        return None if part is None else Communicator(part)

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """Create a communicator of the surviving ranks, in their old order, and close this one.

        *Collective* over the surviving ranks: each rank calls it after its `PeerFailure`; pending
        calls of the other ranks fail with `PeerFailure`. Objects made from this communicator
        (plans, buckets, groups, strategies, optimizers) become unusable and must be recreated. If
        no rank has died, the new communicator has the same ranks. `collectives.shrink()` also
        replaces the world.

        The job must survive the death of a rank: Open MPI >= 5 under `mpirun --with-ft ulfm`. After
        a death, the end of the program has a deadline; `shrink` removes it, so that the surviving
        ranks wait for each other at exit.

        Args:
            timeout: seconds within which all surviving ranks must call; None uses the setting.

        Returns:
            A communicator whose ranks start at 0. Its errors also give ranks of the world.

        Raises:
            LaunchError: this job does not survive the death of a rank; nothing has changed.
            CollectiveTimeout: a surviving rank did not call; the error names it.

        Cost: some milliseconds; the next call recreates the node engine.

        Example:
            >>> import collectives as cc
            >>> def resilient_sum(comm, x):
            ...     try:
            ...         return comm, comm.allreduce(x, op=cc.SUM)
            ...     except cc.PeerFailure:
            ...         return resilient_sum(comm.shrink(), x)
        """
        return Communicator(shrink.shrink(self._group, timeout=timeout))

    def revoke(self, reason: str) -> None:
        """Make the communicator unusable, and interrupt the other ranks' calls; not collective.

        Under ULFM the other ranks get `PeerFailure` and can call `shrink`. Otherwise they wait
        until this rank exits or their calls time out.

        Args:
            reason: text for the errors of later calls on this rank.
        """
        self._group.revoke(reason)

    def to_mpi(self) -> MPI.Intracomm:
        """Return an mpi4py communicator of the same ranks, for other features of MPI.

        *Collective* at the first call; later calls return the same object. It shares no messages
        with this communicator, and `close` frees it unless the caller has done so. MPI calls on it
        have no timeout.

        Raises:
            TypeError: the ranks are not MPI processes.

        Example:
            >>> import collectives as cc
            >>> comm = cc.init()
            >>> comm.to_mpi().Get_size() == comm.size
            True
        """
        group = self._group
        own = group.state_of(_OfMpi)
        # A freed communicator of mpi4py is false.
        if not own.comm:
            # A call of its own, so that all ranks agree before MPI's collective `Dup`.
            with call.begin_call(group, "to_mpi") as calling:
                calling.describe()
                calling.agree()
                own.comm = group.transport.to_mpi()
        return own.comm

    def close(self) -> None:
        """Free the communicator; *collective*. Calling it again has no effect."""
        group = self._group
        # Another thread's call must end first.
        if group.unusable is None:
            group.check_free("close")
        # First the threads and requests, which use the group's messages.
        group.close_state_of(request_thread)
        group.close_state_of(P2PEndpoint)
        # `close` is collective, so an unusable group only ends its threads.
        if group.unusable is None:
            group.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Set after the class, because a loop inside would leave its variable as an attribute.
for _name in suggestions.FOREIGN_NAMES:
    setattr(Communicator, _name, suggestions.ForeignName(_name))


class _OfMpi:
    """The communicator that `to_mpi` returned."""

    def __init__(self, group: Group) -> None:
        self.comm: MPI.Intracomm | None = None

    def close(self) -> None:
        """Free it, unless the caller has freed it or MPI has finalized; *collective*."""
        if self.comm and not MPI.Is_finalized():  # a freed communicator is false
            self.comm.Free()
        self.comm = None
