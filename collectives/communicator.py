"""The object that users hold: operations on arrays among the ranks of one group."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from collectives.calls import call, shared_arrays
from collectives.calls.group import Group
from collectives.calls.shared_settings import negotiate
from collectives.channel import channel
from collectives.core import settings, suggestions
from collectives.core.errors import in_turn
from collectives.devices.staged import DeviceOperations
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

__all__ = ["Communicator", "from_mpi"]

E = TypeVar("E", bound=BaseException)


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
    return Communicator(transport, leaders.tolist(), settled)


class Communicator(Group):
    """A group of ranks and the operations among them.

    Every operation is *collective*: all ranks of the group call it, in the same order, with the
    same op, dtype, root and, unless stated otherwise, shape. Results are new arrays unless `out`
    is given. `timeout` is in seconds and defaults to the setting `UNISONO_TIMEOUT`.

    After a `CollectiveTimeout` or a `PeerFailure` messages may still be under way, so every later
    call raises `CollectiveError` at once; `shrink` may make another one of the ranks that live.

    A copy is the communicator itself. Pickled, it is a name: loading it in the same job returns the
    communicator of the same ranks. In another job a communicator of all ranks loads as `init()`,
    and one of a group raises `ValueError`.

    `rank`, `size`, `local_rank`, `local_size`, `node_rank` and `num_nodes` say where this process
    stands; these attributes, and the arguments, are those of `collectives.calls.group.Group`.
    """

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

    allreduce = reductions.allreduce
    reduce = reductions.reduce
    reduce_scatter = reductions.reduce_scatter
    grouped_allreduce = grouped.grouped_allreduce
    grouped_allgather = grouped_rows.grouped_allgather
    grouped_reduce_scatter = grouped_rows.grouped_reduce_scatter
    grouped_broadcast = grouped_rows.grouped_broadcast
    sparse_allreduce = sparse.sparse_allreduce
    scan = scans.scan
    exscan = scans.exscan

    broadcast = broadcasts.broadcast
    barrier = broadcasts.barrier
    gather = gather_scatter.gather
    allgather = gather_scatter.allgather
    scatter = gather_scatter.scatter
    alltoall = gather_scatter.alltoall
    broadcast_object = objects.broadcast_object
    allgather_object = objects.allgather_object
    gather_object = objects.gather_object
    scatter_object = objects.scatter_object

    send = send_recv.send
    isend = send_recv.isend
    recv = send_recv.recv
    irecv = send_recv.irecv
    sendrecv = send_recv.sendrecv
    probe = send_recv.probe
    send_object = send_recv.send_object
    recv_object = send_recv.recv_object

    shared_empty = shared_arrays.shared_empty
    plan_allreduce = persistent.plan_allreduce
    plan_broadcast = persistent.plan_broadcast
    plan_allgather = persistent.plan_allgather
    plan_reduce_scatter = persistent.plan_reduce_scatter
    plan_buckets = plan.plan_buckets
    split = groups.split
    group = groups.create_group
    agree = shrink.agree
    shrink = shrink.shrink

    allreduce_async = nonblocking_twin(allreduce)
    reduce_async = nonblocking_twin(reduce)
    reduce_scatter_async = nonblocking_twin(reduce_scatter)
    scan_async = nonblocking_twin(scan)
    exscan_async = nonblocking_twin(exscan)
    broadcast_async = nonblocking_twin(broadcast)
    gather_async = nonblocking_twin(gather)
    allgather_async = nonblocking_twin(allgather)
    scatter_async = nonblocking_twin(scatter)
    alltoall_async = nonblocking_twin(alltoall)
    barrier_async = nonblocking_twin(barrier)
    grouped_allreduce_async = nonblocking_twin(grouped_allreduce)
    grouped_allgather_async = nonblocking_twin(grouped_allgather)
    grouped_reduce_scatter_async = nonblocking_twin(grouped_reduce_scatter)
    grouped_broadcast_async = nonblocking_twin(grouped_broadcast)

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
        own = self.state_of(_OfMpi)
        if not own.comm:
            with call.begin_call(self, "to_mpi") as calling:
                calling.describe()
                calling.agree()
                own.comm = self.transport.to_mpi()
        return own.comm

    def open_channel(self) -> channel.Channel:
        """Make a channel: messages between any two ranks at any time; *collective*.

        For services that answer whoever asks. It does not disturb operations and is not disturbed
        by them: it goes on when ranks die, also where this communicator does not.

        Raises:
            LaunchError: MPI was started without support for several threads.
        """
        with call.begin_call(self, "open_channel") as opening:
            opening.describe()
            opening.agree()
            mailbox = self.transport.open_mailbox()
            return channel.open_channel(
                self.transport, mailbox, self.leaders, opening.deadline, self.dead_here
            )

    def raised_by_all(self, error: E, first: int = 0) -> E:
        """Note that all ranks raise this error, so that one of them prints its traceback.

        Only where nobody catches it. The others wait a moment, and print it if they are still there
        then: the one before them has caught it.

        Args:
            error: about to be raised; the same words on all ranks.
            first: the rank that prints it.

        Returns:
            The error.
        """
        return in_turn(error, (self.rank - first) % self.size)

    def name(self, *ranks: int) -> str:
        """Name ranks as errors do, in a group by their numbers in the world, too.

        Example:
            >>> import collectives as cc
            >>> cc.init().name(0)
            'rank 0'
        """
        return self.transport.name(ranks)

    def close(self) -> None:
        """Release the communicator; *collective*. Closing twice is harmless."""
        if self.unusable is None:
            self.check_free("close")
        self.close_state_of(request_thread)
        self.close_state_of(P2PEndpoint)
        if self.unusable is None:
            self.close_state_of(_OfMpi)
            self.close_state_of(DeviceOperations)
            super().close()

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
