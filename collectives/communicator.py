"""The object that users hold: operations on arrays among the ranks of one group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from collectives import settings, topology, tuned
from collectives.algorithms import selection
from collectives.arrays import host, reduction
from collectives.arrays.host import Array, Borrowed
from collectives.arrays.reduction import MEAN, Op
from collectives.buckets import buckets
from collectives.channel.channel import Channel, open_channel
from collectives.compression import NONE, Compression, chosen
from collectives.errors import in_turn
from collectives.operations import (
    compare,
    cuda_aware,
    grouped,
    groups,
    objects,
    rows,
    send_recv,
    shared,
    ways,
)
from collectives.operations.call import Call, Calls
from collectives.operations.on_devices import OnDevices
from collectives.operations.repeats import NEW, Repeats
from collectives.operations.requests import Progress, asynchronous
from collectives.signatures import A, Compressing, Detachable, Numbers, Reducing, Waiting
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import Unpack

__all__ = ["Communicator", "from_mpi"]

E = TypeVar("E", bound=BaseException)


def from_mpi(comm: MPI.Comm, configuration: settings.Settings | None = None) -> Communicator:
    """Make a communicator of an `mpi4py.MPI.Comm`, which stays the caller's own.

    *Collective*: every rank of `comm`.

    Raises:
        ValueError: what rank 0 knows of the links cannot be read; on all ranks.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    leader = np.array([comm.Get_rank()])
    node.Bcast(leader, 0)
    node.Free()
    leaders = np.empty(comm.Get_size(), leader.dtype)
    comm.Allgather(leader, leaders)
    transport = MpiTransport(comm)
    configuration = tuned.agreed(configuration or settings.from_environment(), transport)
    configuration = cuda_aware.agreed(configuration, transport)
    configuration = compare.agreed(configuration, transport)
    return Communicator(transport, leaders.tolist(), configuration)


class Communicator:
    """A group of ranks and the operations among them.

    Every operation is *collective*: all ranks of the group call it, in the same order, with the
    same op, dtype, root and, unless stated otherwise, shape. Results are new arrays unless `out`
    is given. `timeout` is in seconds and defaults to the setting `UNISONO_TIMEOUT`.

    After a `CollectiveTimeout` or a `PeerFailure` messages may still be under way, so every later
    call raises `CollectiveError` at once.

    Args:
        transport: moves arrays between the ranks.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.
        configuration: the settings, from the environment if None.
        name: in flight records.
    """

    def __init__(
        self,
        transport: Transport,
        leaders: Sequence[int],
        configuration: settings.Settings | None = None,
        name: str = "world",
    ) -> None:
        self._transport = transport
        self._leaders = list(leaders)
        self._nodes = topology.nodes(self._leaders, transport.rank)
        configuration = configuration or settings.from_environment()
        self._calls = Calls(transport, self._leaders, configuration, name)
        self._repeats = Repeats(self._calls)
        self._on_devices = OnDevices(self._calls, self._leaders)
        self._progress = Progress(self._background)
        self._direct = send_recv.PointToPoint(transport, self._calls)
        self._splits_made = 0
        self._memory = np.empty(0, np.uint8)
        self._groupings = grouped.Groupings()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    @property
    def rank(self) -> int:
        """Number of this process in the group, `0 .. size - 1`."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return self._transport.size

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its node."""
        return self._nodes.local_rank

    @property
    def local_size(self) -> int:
        """Number of the group's processes on this node."""
        return self._nodes.local_size

    @property
    def node_rank(self) -> int:
        """Number of this node, in the order of the nodes' lowest ranks."""
        return self._nodes.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the group spans."""
        return self._nodes.num_nodes

    @overload
    def allreduce(
        self, x: Numbers, *, out: None = None, **options: Unpack[Compressing]
    ) -> Array: ...
    @overload
    def allreduce(
        self, x: Detachable[A], *, out: None = None, **options: Unpack[Compressing]
    ) -> A: ...
    @overload
    def allreduce(self, x: A, *, out: None = None, **options: Unpack[Compressing]) -> A: ...
    @overload
    def allreduce(self, x: object, *, out: A, **options: Unpack[Compressing]) -> A: ...
    def allreduce(
        self,
        x: Any,
        *,
        op: Op = MEAN,
        out: Any = None,
        algorithm: str = "auto",
        compression: Compression | None = NONE,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Reduce the arrays of all ranks, and give every rank the result.

        As if all arrays were gathered and combined in a fixed order of ranks.

        Args:
            x: shape (...), any dtype of the table in `collectives.arrays.reduction`; any strides. A
                NumPy, PyTorch, JAX or CuPy array, a number or a nested list of numbers.
            op: how to combine; the default divides by the number of ranks.
            out: where to put the result, may be `x` itself; an array of the shape and dtype of `x`
                that can be written, of NumPy, PyTorch, CuPy or another library with DLPack.
            algorithm: "auto", "node", "ring", "tree", "halving", "hierarchical" or "native".
            compression: `FP16` or `BF16` let float32 and float64 arrays travel as 16 bits wherever
                they travel as messages: rounded once, summed in float32, and the result rounded
                once, however many ranks there are. `on("network")` is for those between nodes. None
                is `NONE`.
            name: of the array, for compression with feedback.
            timeout: seconds.

        Returns:
            `out`, or a new array of the kind, shape and dtype of `x`, on its device; the same bits
            on all ranks (with "native" as far as the MPI library does so).

        Raises:
            TypeError: the op is not defined for the dtype, or this is not a compression.
            ValueError: unknown algorithm, or `out` does not fit.
            MismatchError: ranks differ in operation, op, dtype, shape or options; on all ranks. Or
                another rank's arguments are wrong.
            CollectiveTimeout: some rank did not come in time, on the ranks that waited.
            PeerFailure: a rank has died, on the ranks that waited for it.

        Cost: "ring" 2 (P - 1) messages and 2 (P - 1)/P S bytes sent per rank; "tree" at most
            2 ceil(log2 P) messages of S bytes.
        Order: fixed by algorithm, P and size; reproducible.

        Example:
            >>> import collectives as cc
            >>> comm = cc.init()
            >>> comm.allreduce([1.0, 2.0], op=cc.SUM).tolist() == [comm.size, 2.0 * comm.size]
            True
        """
        done = self._repeats.allreduce(x, op, out, algorithm, compression, timeout)
        if done is not NEW:
            return done
        with self._calls.enter("allreduce", timeout) as call:
            compression = chosen(compression, call.operation)
            if there := self._on_devices.lend(x, out):
                reduction.check(op, there.dtype, operation="allreduce")
                codec = compression.codec(there.dtype, op, network=self.num_nodes > 1, name=name)
                facts = {"op": op.value, "dtype": there.dtype, "shape": there.shape}
                self._describe(call, algorithm, **facts, compression=compression, memory="device")
                self._on_devices.allreduce(call, there, op, algorithm, codec)
                return there.finish()
            loan = self._reducible(call, x, op, out)
            array = loan.host
            codec = compression.codec(array.dtype, op, network=self.num_nodes > 1, name=name)
            facts = {"op": op.value, "dtype": array.dtype, "shape": array.shape}
            self._describe(call, algorithm, **facts, compression=compression)
            result = np.empty(array.shape, array.dtype) if loan.target is None else loan.target
            flat = host.flat_target(result, array)
            ways.allreduce(self._transport, call, host.flat(array), flat, op, algorithm, codec)
            self._repeats.note_allreduce(call, x, result, op, algorithm, compression)
        return loan.give_back(host.stored(flat, result))

    @overload
    def reduce(
        self, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[Reducing]
    ) -> Array | None: ...
    @overload
    def reduce(
        self, x: Detachable[A], root: int = 0, *, out: None = None, **options: Unpack[Reducing]
    ) -> A | None: ...
    @overload
    def reduce(
        self, x: A, root: int = 0, *, out: None = None, **options: Unpack[Reducing]
    ) -> A | None: ...
    @overload
    def reduce(
        self, x: object, root: int = 0, *, out: A, **options: Unpack[Reducing]
    ) -> A | None: ...
    def reduce(
        self,
        x: Any,
        root: int = 0,
        *,
        op: Op = MEAN,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Reduce the arrays of all ranks, and give the result to one.

        Arguments and errors as `allreduce`; `out` is used on the root only, and algorithms are
        "auto", "node", "tree" and "native".

        Returns:
            On the root `out` or a new array of the shape and dtype of `x`, elsewhere None.

        Cost: one message of S bytes per rank, ceil(log2 P) received by the root.
        """
        done = self._repeats.reduce(x, root, op, out, algorithm, timeout)
        if done is not NEW:
            return done
        with self._calls.enter("reduce", timeout) as call:
            loan = self._reducible(call, x, op, out if self.rank == root else None)
            array = loan.host
            self._check_root(call, root)
            facts = {"op": op.value, "dtype": array.dtype, "shape": array.shape, "root": root}
            self._describe(call, algorithm, **facts)
            if self.rank != root:
                ways.reduce(self._transport, call, host.flat(array), None, op, root, algorithm)
                self._repeats.note_reduce(call, x, root, op, algorithm)
                return None
            result = np.empty(array.shape, array.dtype) if loan.target is None else loan.target
            flat = host.flat_target(result, array)
            ways.reduce(self._transport, call, host.flat(array), flat, op, root, algorithm)
            self._repeats.note_reduce(call, x, root, op, algorithm)
        return loan.give_back(host.stored(flat, result))

    @overload
    def reduce_scatter(self, x: Numbers, **options: Unpack[Reducing]) -> Array: ...
    @overload
    def reduce_scatter(self, x: Detachable[A], **options: Unpack[Reducing]) -> A: ...
    @overload
    def reduce_scatter(self, x: A, **options: Unpack[Reducing]) -> A: ...
    def reduce_scatter(
        self,
        x: Any,
        *,
        op: Op = MEAN,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Reduce the arrays of all ranks, and give each rank its share of the rows.

        Args:
            x: shape (n, ...), the same on all ranks; n need not be a multiple of the size: the
                first `n % size` ranks get one row more.
            op: how to combine.
            algorithm: "auto", "node", "ring", "halving" or "native".
            timeout: seconds.

        Returns:
            A new array of shape (own rows, ...) and the dtype of `x`.

        Raises:
            ValueError: `x` has no dimension.
            TypeError, CollectiveTimeout: as `allreduce`.

        Cost: "ring" P - 1 messages and (P - 1)/P S bytes sent per rank.
        """
        done = self._repeats.reduce_scatter(x, op, algorithm, timeout)
        if done is not NEW:
            return done
        with self._calls.enter("reduce_scatter", timeout) as call:
            loan = self._reducible(call, x, op, None)
            array = loan.host
            if array.ndim == 0:
                raise ValueError("reduce_scatter: a scalar has no rows, expected shape (n, ...)")
            self._describe(call, algorithm, op=op.value, dtype=array.dtype, shape=array.shape)
            rows = topology.chunk_bounds(array.shape[0], self.size)
            own = rows[self.rank + 1] - rows[self.rank]
            result = np.empty((own, *array.shape[1:]), array.dtype)
            bounds = [row * math.prod(array.shape[1:]) for row in rows]
            ways.reduce_scatter(
                self._transport, call, host.flat(array), result.reshape(-1), bounds, op, algorithm
            )
            self._repeats.note_reduce_scatter(call, x, bounds, result, op, algorithm)
        return loan.give_back(result)

    @overload
    def broadcast(
        self, x: Numbers, root: int = 0, *, out: None = None, **options: Unpack[Waiting]
    ) -> Array: ...
    @overload
    def broadcast(
        self, x: Detachable[A], root: int = 0, *, out: None = None, **options: Unpack[Waiting]
    ) -> A: ...
    @overload
    def broadcast(
        self, x: A, root: int = 0, *, out: None = None, **options: Unpack[Waiting]
    ) -> A: ...
    @overload
    def broadcast(self, x: object, root: int = 0, *, out: A, **options: Unpack[Waiting]) -> A: ...
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Any:
        """Give every rank the root's array.

        Args:
            x: shape (...); on the other ranks any array of the same shape and dtype, such as
                `np.empty(shape, dtype)`.
            root: whose array.
            out: where to put the result, may be `x` itself; shape and dtype of `x`.
            algorithm: "auto", "node", "tree", "ring", "hierarchical" or "native".
            timeout: seconds.

        Returns:
            `out`, or a new array; the root's bits.

        Raises:
            TypeError: `x` is None. What only the root knows is for `broadcast_object`.
            ValueError: no such root, or `out` does not fit.
            CollectiveTimeout: as `allreduce`.

        Cost: ceil(log2 P) messages of S bytes sent by the root.
        """
        done = self._repeats.broadcast(x, root, out, algorithm, timeout)
        if done is not NEW:
            return done
        with self._calls.enter("broadcast", timeout) as call:
            if x is None:  # what users of mpi4py pass on the other ranks
                raise TypeError(
                    "broadcast: x is None, expected an array on every rank. Where the root's is "
                    "to go, pass one of its shape and dtype, such as np.empty(shape, dtype), or "
                    "use broadcast_object, which sends what only the root knows"
                )
            if there := self._on_devices.lend(x, out):
                self._check_root(call, root)
                facts = {"dtype": there.dtype, "shape": there.shape, "root": root}
                self._describe(call, algorithm, **facts, memory="device")
                self._on_devices.broadcast(call, there, root, algorithm)
                return there.finish()
            loan = host.borrow(x, out, operation="broadcast")
            array = loan.host
            self._check_root(call, root)
            self._describe(call, algorithm, dtype=array.dtype, shape=array.shape, root=root)
            if loan.target is None:
                buffer = host.flat_copy(array, None, array.dtype)
            else:
                own = self.rank == root
                buffer = host.flat(array) if own else host.flat_target(loan.target)
            ways.broadcast(self._transport, call, buffer, root, algorithm)
            self._repeats.note_broadcast(call, x, root, algorithm)
        return loan.give_back(host.store(buffer, array.shape, array.dtype, loan.target))

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> None:
        """Return when every rank of the group has called this.

        Args:
            algorithm: "auto", "node", "tree", "hierarchical" or "native".
            timeout: seconds.
        """
        if self._repeats.barrier(algorithm, timeout):
            return
        with self._calls.enter("barrier", timeout) as call:
            self._describe(call, algorithm)
            ways.barrier(self._transport, call, algorithm)
            self._repeats.note_barrier(call, algorithm)

    gather = rows.gather
    allgather = rows.allgather
    scatter = rows.scatter
    alltoall = rows.alltoall

    broadcast_object = objects.broadcast_object
    allgather_object = objects.allgather_object
    grouped_allreduce = grouped.grouped_allreduce
    sparse_allreduce = objects.sparse_allreduce

    send = send_recv.send
    recv = send_recv.recv

    shared_empty = shared.shared_empty
    plan_allreduce = shared.plan_allreduce
    plan_buckets = buckets.plan_buckets
    split = groups.split
    group = groups.group
    _bucket = shared.bucket
    _background = groups.background

    allreduce_async = asynchronous(allreduce)
    reduce_async = asynchronous(reduce)
    reduce_scatter_async = asynchronous(reduce_scatter)
    broadcast_async = asynchronous(broadcast)
    gather_async = asynchronous(gather)
    allgather_async = asynchronous(allgather)
    scatter_async = asynchronous(scatter)
    alltoall_async = asynchronous(alltoall)
    barrier_async = asynchronous(barrier)
    grouped_allreduce_async = asynchronous(grouped_allreduce)

    def open_channel(self) -> Channel:
        """Make a channel: messages between any two ranks at any time; *collective*.

        For services that answer whoever asks. It does not disturb operations and is not disturbed
        by them: it goes on when ranks die, also where this communicator does not.

        Raises:
            LaunchError: MPI was started without support for several threads.
        """
        with self._calls.enter("open_channel", None) as call:
            call.agree()
            mailbox = self._transport.open_mailbox()
            return open_channel(
                self._transport, mailbox, self._leaders, call.deadline, self._calls.dead_here
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
        return self._transport.name(ranks)

    def close(self) -> None:
        """Release the communicator; *collective*. Closing twice is harmless."""
        self._progress.close()
        self._direct.close()
        if self._calls.unusable is None:
            self._on_devices.close()
            self._calls.close()
            self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_root(self, call: Call, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(
                f"{call.operation}: no such root, expected 0 .. {self.size - 1}, got {root}"
            )

    def _reducible(self, call: Call, x: Any, op: Op, out: Any) -> Borrowed:
        """Check the arguments of a reduction."""
        loan = host.borrow(x, out, operation=call.operation)
        reduction.check(op, loan.host.dtype, operation=call.operation)
        return loan

    def _describe(self, call: Call, algorithm: str, **facts: object) -> None:
        """Check the algorithm, and say what must be equal on all ranks."""
        if call.operation in selection.ALGORITHMS:
            selection.check(call.operation, algorithm, call.engine)
        call.describe(**facts, algorithm=algorithm)
