"""`Communicator`: the user's handle of a group, with all operations as methods."""

from __future__ import annotations

import functools
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
from collectives.operations import reduce as reductions
from collectives.operations import scan as scans
from collectives.operations import split as groups
from collectives.operations.nonblocking import nonblocking_twin, request_thread
from collectives.p2p import send_recv
from collectives.p2p.endpoint import P2PEndpoint
from collectives.transport.mpi import MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Communicator", "from_mpi", "group_of", "open_communicators"]

P = ParamSpec("P")
R = TypeVar("R")

# All of this process.
_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def from_mpi(comm: MPI.Comm, configuration: settings.Settings | None = None) -> Communicator:
    """Make a communicator of an `mpi4py.MPI.Comm`, which stays the caller's own.

    *Collective*: every rank of `comm`. The two share no message, so calls of MPI's own on `comm`
    may come between; `comm` may be freed afterwards. Where `init` was not called, nothing ends the
    job on an uncaught exception, and who waits for a rank of another node that has ended its
    program finds out by the limit.

    Args:
        comm: of the processes of one group.
        configuration: the settings; from the environment if None.

    Raises:
        LaunchError: settings that must be equal differ; on all ranks.
        TypeError: `comm` is not one of mpi4py.
        ValueError: `comm` is of two groups, or of none; or what rank 0 knows of the links cannot be
            read, on all ranks.

    Example:
        >>> from mpi4py import MPI
        >>> import collectives as cc
        >>> with cc.from_mpi(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() % 2)) as half:
        ...     mean = half.allreduce(1.0)
    """
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"from_mpi: expected a communicator of mpi4py, got {comm!r}")
    numbers = processes.checked_ranks(comm, "from_mpi")
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    leader = np.array([comm.Get_rank()])
    node.Bcast(leader, 0)
    node.Free()
    leaders = np.empty(comm.Get_size(), leader.dtype)
    comm.Allgather(leader, leaders)
    processes.mark_children()
    transport = MpiTransport(comm)
    if numbers != list(range(len(numbers))):
        transport.world = numbers
    settled = negotiate(configuration or settings.from_environment(), transport, leaders.tolist())
    return Communicator(Group(transport, leaders.tolist(), settled))


def group_of(comm: Communicator) -> Group:
    """Return the group of a communicator, for the modules of this package."""
    return comm._group


def open_communicators() -> list[Communicator]:
    """Return the communicators of this process that can still be used."""
    return [comm for comm in list(_communicators) if comm.failure is None]


class _Operation(Generic[P, R]):
    """A method that is a function of the communicator's group.

    The bound method is stored in the communicator at its first use. From then on a call looks it up
    there, and costs no frame more than a call of the function: a method that calls it would add
    0.3 us to calls of 2 us.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], R]) -> None:
        self._function = function

        @functools.wraps(function)
        def on_communicator(comm: Communicator, /, *args: P.args, **options: P.kwargs) -> R:
            return function(comm._group, *args, **options)

        self._unbound = on_communicator

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, comm: Communicator | None, owner: type) -> Any:
        if comm is None:
            return self._unbound
        bound = vars(comm)[self._name] = MethodType(self._function, comm._group)
        return bound


def _operation(
    function: Callable[Concatenate[Group, P], R],
) -> Callable[Concatenate[Communicator, P], R]:
    """Make a method of a function of groups; for type checkers, too."""
    return cast("Callable[Concatenate[Communicator, P], R]", _Operation(function))


class Communicator:
    """A group of ranks and the operations among them.

    Every operation is *collective*: all ranks of the group call it, in the same order, with the
    same op, dtype, root and, unless stated otherwise, shape. Results are new arrays unless `out`
    is given. `timeout` is in seconds and defaults to the setting `UNISONO_TIMEOUT`.

    After a `CollectiveTimeout` or a `PeerFailure` messages may still be under way, so every later
    call raises `CollectiveError` at once; `shrink` may make another one of the ranks that live.

    A copy is the communicator itself. Pickled, it is a name: loading it in the same job returns the
    communicator of the same ranks. In another job a communicator of all ranks loads as `init()`,
    and one of a group raises `ValueError`.

    Made by `init`, `from_mpi`, `split`, `group` and `shrink`.

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
        _communicators.add(self)

    @property
    def settings(self) -> settings.Settings:
        """The settings of this job; those that must be equal are so on all ranks."""
        return self._group.settings

    @property
    def failure(self) -> str | None:
        """Why every later call raises `CollectiveError`; None while there is no reason."""
        return self._group.unusable

    def __copy__(self) -> Communicator:
        """Return this communicator: it belongs to the process, not to what holds it."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Communicator:
        """Return this communicator, so that a model that holds one can be copied."""
        return self

    if not TYPE_CHECKING:

        def __dir__(self) -> list[str]:
            return [name for name in super().__dir__() if name not in suggestions.FOREIGN_NAMES]

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    allreduce = _operation(reductions.allreduce)
    reduce = _operation(reductions.reduce)
    reduce_scatter = _operation(reductions.reduce_scatter)
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
    agree = _operation(shrink.agree)

    allreduce_async = _operation(nonblocking_twin(reductions.allreduce))
    reduce_async = _operation(nonblocking_twin(reductions.reduce))
    reduce_scatter_async = _operation(nonblocking_twin(reductions.reduce_scatter))
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
        """Make communicators of the ranks that name the same color.

        Args:
            color: an integer from 0 to 2^63 - 1, or None to belong to no group.
            key: the order in the new group, an integer of 64 bits; ties by rank.

        Returns:
            The new group's communicator, None where color is None.

        Raises:
            TypeError: color or key is not an integer; MismatchError on the other ranks.
            ValueError: color or key is out of range; MismatchError on the other ranks.
        """
        part = groups.split(self._group, color, key)
        return None if part is None else Communicator(part)

    def group(self, ranks: Sequence[int], *, tag: int | None = None) -> Communicator | None:
        """Make a communicator of some ranks, numbered in the order given.

        *Collective*: all ranks of this communicator, also those that are not listed; with a `tag`
        only those that are listed.

        Args:
            ranks: each at most once.
            tag: an integer from 0 to 16,383, the same on all ranks of the new group, and another
                one than that of any group that is made of this communicator at the same time.

        Returns:
            The new group's communicator, None on ranks that are not listed.

        Raises:
            ValueError: a rank does not exist, or is listed twice; there is no such tag, or this
                rank, which gives one, is not listed.
            MismatchError: listed ranks list others; on all that list the first of these.
            CollectiveTimeout: some rank did not come in time.
        """
        part = groups.create_group(self._group, ranks, tag=tag)
        return None if part is None else Communicator(part)

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """Make a communicator of the ranks that live, in their order, and close this one.

        *Collective* over the ranks that live: each calls it once it has got a `PeerFailure`, and
        those that have not yet get theirs, since nobody can go on here. What was made of this
        communicator (plans, buckets, groups, strategies, optimizers) is of no use any more and is
        made anew. Without a death the result has the same ranks. After `collectives.shrink()` the
        result is the world: of `init`, and of the package's functions.

        The job has to be one that outlives its ranks: Open MPI >= 5 under `mpirun --with-ft ulfm`.
        A death sets a limit for the end of the program; this lifts it: those that live wait for
        each other there.

        Args:
            timeout: seconds within which all of them have to come; the setting's if None.

        Returns:
            A communicator, numbered from 0. Errors name its ranks by their numbers in the world,
            too.

        Raises:
            LaunchError: ranks of this job do not outlive each other; nothing has changed.
            CollectiveTimeout: a rank that lives has not come; it is named.

        Cost: some milliseconds, and the first call makes the node engine anew.

        Example:
            >>> import collectives as cc
            >>> def sum_of_those_that_live(comm, x):
            ...     try:
            ...         return comm, comm.allreduce(x, op=cc.SUM)
            ...     except cc.PeerFailure:
            ...         return sum_of_those_that_live(comm.shrink(), x)
        """
        return Communicator(shrink.shrink(self._group, timeout=timeout))

    def revoke(self, reason: str) -> None:
        """Refuse later calls for a reason, alone, and let the other ranks leave theirs.

        Where the MPI library outlives its ranks, they get `PeerFailure`, and may `shrink`; where it
        does not, they wait for this rank until they see that it has ended.

        Args:
            reason: for the errors of later calls.
        """
        self._group.revoke(reason)

    def to_mpi(self) -> MPI.Intracomm:
        """Return a communicator of mpi4py with the same ranks, for whatever else MPI can do.

        *Collective* at the first call; later ones return the same. It shares no message with this
        one, and is freed when this one is closed, unless the caller has done so. What mpi4py does
        with it has no limit: it waits for ever for a rank that does not come.

        Raises:
            TypeError: the ranks are not processes of MPI.

        Example:
            >>> import collectives as cc
            >>> comm = cc.init()
            >>> comm.to_mpi().Get_size() == comm.size
            True
        """
        group = self._group
        own = group.state_of(_OfMpi)
        if not own.comm:
            with call.begin_call(group, "to_mpi") as calling:
                calling.describe()
                calling.agree()
                own.comm = group.transport.to_mpi()
        return own.comm

    def close(self) -> None:
        """Release the communicator; *collective*. Closing twice is harmless."""
        group = self._group
        if group.unusable is None:
            group.check_free("close")
        group.close_state_of(request_thread)
        group.close_state_of(P2PEndpoint)
        if group.unusable is None:
            group.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


for _name in suggestions.FOREIGN_NAMES:
    setattr(Communicator, _name, suggestions.ForeignName(_name))


class _OfMpi:
    """What `to_mpi` has returned, if anything."""

    def __init__(self, group: Group) -> None:
        self.comm: MPI.Intracomm | None = None

    def close(self) -> None:
        """Free it, unless its owner has, or MPI has ended; *collective*."""
        from mpi4py import MPI

        if self.comm and not MPI.Is_finalized():  # false where it was freed
            self.comm.Free()
        self.comm = None
