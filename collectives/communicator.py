"""The object that users hold: operations on arrays among the ranks of one group."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from collectives import arrays, reduction, selection, settings, topology
from collectives.algorithms import tree
from collectives.arrays import Array
from collectives.calls import Call, Calls
from collectives.reduction import MEAN, Op
from collectives.transport import MpiTransport, Transport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Communicator", "from_mpi"]

T = TypeVar("T")


def from_mpi(comm: MPI.Comm, configuration: settings.Settings | None = None) -> Communicator:
    """Make a communicator of an `mpi4py.MPI.Comm`, which stays the caller's own.

    *Collective*: every rank of `comm`.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    leader = np.array([comm.Get_rank()])
    node.Bcast(leader, 0)
    node.Free()
    leaders = np.empty(comm.Get_size(), leader.dtype)
    comm.Allgather(leader, leaders)
    return Communicator(MpiTransport(comm), leaders.tolist(), configuration)


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
    """

    def __init__(
        self,
        transport: Transport,
        leaders: Sequence[int],
        configuration: settings.Settings | None = None,
    ) -> None:
        self._transport = transport
        self._leaders = list(leaders)
        self._nodes = topology.nodes(self._leaders, transport.rank)
        self._calls = Calls(transport, configuration or settings.from_environment())

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

    def allreduce(
        self,
        x: npt.ArrayLike,
        *,
        op: Op = MEAN,
        out: Array | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """Reduce the arrays of all ranks, and give every rank the result.

        As if all arrays were gathered and combined in a fixed order of ranks.

        Args:
            x: shape (...), any dtype of the table in `collectives.reduction`; any strides.
            op: how to combine; the default divides by the number of ranks.
            out: where to put the result, may be `x` itself; shape and dtype of `x`.
            algorithm: "auto", "ring", "tree" or "native".
            timeout: seconds.

        Returns:
            `out`, or a new array of the shape and dtype of `x`; the same bits on all ranks
            (with "native" as far as the MPI library does so).

        Raises:
            TypeError: the op is not defined for the dtype.
            ValueError: unknown algorithm, or `out` does not fit.
            CollectiveTimeout: some rank did not come in time, on the ranks that waited.

        Cost: "ring" 2 (P - 1) messages and 2 (P - 1)/P S bytes sent per rank; "tree" at most
            2 ceil(log2 P) messages of S bytes.
        Order: fixed by algorithm, P and size; reproducible.

        Example:
            >>> import collectives as cc
            >>> comm = cc.init()
            >>> comm.allreduce([1.0, 2.0], op=cc.SUM).tolist() == [comm.size, 2.0 * comm.size]
            True
        """
        with self._calls.enter("allreduce", timeout) as call:
            array = self._reducible(call, x, op, out)
            run = selection.choose("allreduce", algorithm, array.nbytes)
            call.agree(op=op.value, dtype=array.dtype, shape=array.shape, algorithm=algorithm)
            buffer = self._contribution(array, op, out)
            run(self._transport, buffer, op, call.deadline)
        return arrays.store(buffer, array.shape, array.dtype, out)

    def reduce(
        self,
        x: npt.ArrayLike,
        root: int = 0,
        *,
        op: Op = MEAN,
        out: Array | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array | None:
        """Reduce the arrays of all ranks, and give the result to one.

        Arguments and errors as `allreduce`; `out` is used on the root only.

        Returns:
            On the root `out` or a new array of the shape and dtype of `x`, elsewhere None.

        Cost: one message of S bytes per rank, ceil(log2 P) received by the root.
        """
        with self._calls.enter("reduce", timeout) as call:
            target = out if self.rank == root else None
            array = self._reducible(call, x, op, target)
            run = selection.choose("reduce", algorithm, array.nbytes)
            self._check_root(call, root)
            call.agree(
                op=op.value, dtype=array.dtype, shape=array.shape, root=root, algorithm=algorithm
            )
            buffer = self._contribution(array, op, target)
            run(self._transport, buffer, op, root, call.deadline)
        if self.rank != root:
            return None
        return arrays.store(buffer, array.shape, array.dtype, out)

    def reduce_scatter(
        self,
        x: npt.ArrayLike,
        *,
        op: Op = MEAN,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """Reduce the arrays of all ranks, and give each rank its share of the rows.

        Args:
            x: shape (n, ...), the same on all ranks; n need not be a multiple of the size: the
                first `n % size` ranks get one row more.
            op: how to combine.
            algorithm: "auto", "ring" or "native".
            timeout: seconds.

        Returns:
            A new array of shape (own rows, ...) and the dtype of `x`.

        Raises:
            ValueError: `x` has no dimension.
            TypeError, CollectiveTimeout: as `allreduce`.

        Cost: "ring" P - 1 messages and (P - 1)/P S bytes sent per rank.
        """
        with self._calls.enter("reduce_scatter", timeout) as call:
            array = self._reducible(call, x, op, None)
            run = selection.choose("reduce_scatter", algorithm, array.nbytes)
            if array.ndim == 0:
                raise ValueError("reduce_scatter: a scalar has no rows, expected shape (n, ...)")
            call.agree(op=op.value, dtype=array.dtype, shape=array.shape, algorithm=algorithm)
            rows = topology.chunk_bounds(array.shape[0], self.size)
            bounds = [row * _row_size(array.shape) for row in rows]
            buffer = self._contribution(array, op, None)
            run(self._transport, buffer, bounds, op, call.deadline)
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        shape = (rows[self.rank + 1] - rows[self.rank], *array.shape[1:])
        return own.reshape(shape).astype(array.dtype)

    def broadcast(
        self,
        x: npt.ArrayLike,
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array:
        """Give every rank the root's array.

        Args:
            x: shape (...); on the other ranks any array of the same shape and dtype.
            root: whose array.
            out: where to put the result, may be `x` itself; shape and dtype of `x`.
            algorithm: "auto", "tree" or "native".
            timeout: seconds.

        Returns:
            `out`, or a new array; the root's bits.

        Raises:
            ValueError: no such root, or `out` does not fit.
            CollectiveTimeout: as `allreduce`.

        Cost: ceil(log2 P) messages of S bytes sent by the root.
        """
        with self._calls.enter("broadcast", timeout) as call:
            array = arrays.as_array(x, operation="broadcast")
            run = selection.choose("broadcast", algorithm, array.nbytes)
            self._check_root(call, root)
            if out is not None:
                arrays.check_out(out, array.shape, array.dtype, operation="broadcast")
            call.agree(dtype=array.dtype, shape=array.shape, root=root, algorithm=algorithm)
            buffer = arrays.flat_copy(array, out, array.dtype)
            run(self._transport, buffer, root, call.deadline)
        return arrays.store(buffer, array.shape, array.dtype, out)

    def gather(
        self,
        x: npt.ArrayLike,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> Array | None:
        """Join the arrays of all ranks along their first axis on one rank.

        Args:
            x: shape (n, ...); n may differ between ranks; a scalar counts as shape (1,).
            root: who gets the result.
            algorithm: "auto", "tree" or "native".
            timeout: seconds.

        Returns:
            On the root a new array of shape (sum of n, ...), elsewhere None.

        Raises:
            ValueError: no such root.
            MismatchError: the ranks' arrays differ in dtype or in the other dimensions; on all
                ranks.
            CollectiveTimeout: as `allreduce`.
        """
        with self._calls.enter("gather", timeout) as call:
            array = np.atleast_1d(arrays.as_array(x, operation="gather"))
            run = selection.choose("gather", algorithm, array.nbytes)
            self._check_root(call, root)
            rows = call.agree_on_rows(
                array.shape[0],
                dtype=array.dtype,
                row=array.shape[1:],
                root=root,
                algorithm=algorithm,
            )
            own = np.ascontiguousarray(array).reshape(-1)
            counts = [n * _row_size(array.shape) for n in rows]
            result = run(self._transport, own, counts, root, call.deadline)
        return None if result is None else result.reshape(sum(rows), *array.shape[1:])

    def allgather(
        self, x: npt.ArrayLike, *, algorithm: str = "auto", timeout: float | None = None
    ) -> Array:
        """Join the arrays of all ranks along their first axis on every rank.

        Arguments and errors as `gather`, without a root; algorithms "auto", "ring" and "native".

        Returns:
            A new array of shape (sum of n, ...) in the order of the ranks, on all ranks.

        Cost: "ring" P - 1 messages per rank, (P - 1)/P of the result's bytes.
        """
        with self._calls.enter("allgather", timeout) as call:
            array = np.atleast_1d(arrays.as_array(x, operation="allgather"))
            run = selection.choose("allgather", algorithm, array.nbytes)
            rows = call.agree_on_rows(
                array.shape[0], dtype=array.dtype, row=array.shape[1:], algorithm=algorithm
            )
            starts = np.cumsum([0, *rows])
            result = np.empty((starts[-1], *array.shape[1:]), array.dtype)
            result[starts[self.rank] : starts[self.rank + 1]] = array
            bounds = (starts * _row_size(array.shape)).tolist()
            run(self._transport, result.reshape(-1), bounds, call.deadline)
        return result

    def barrier(self, *, algorithm: str = "auto", timeout: float | None = None) -> None:
        """Return when every rank of the group has called this."""
        with self._calls.enter("barrier", timeout) as call:
            run = selection.choose("barrier", algorithm, 0)
            call.agree(algorithm=algorithm)
            run(self._transport, call.deadline)

    def broadcast_object(self, obj: T, root: int = 0, *, timeout: float | None = None) -> T:
        """Give every rank a copy of the root's Python object, by pickle.

        Pickle runs code of its choice when it is read: use this among ranks of one job only,
        never for data that came from elsewhere.

        Returns:
            `obj` itself on the root, a copy elsewhere.
        """
        with self._calls.enter("broadcast_object", timeout) as call:
            self._check_root(call, root)
            data = _pickled(obj) if self.rank == root else np.empty(0, np.uint8)
            call.agree(root=root)
            length = np.array([data.size])
            tree.broadcast(self._transport, length, root, call.deadline)
            if self.rank != root:
                data = np.empty(length[0], np.uint8)
            tree.broadcast(self._transport, data, root, call.deadline)
        if self.rank == root:
            return obj
        copy: T = pickle.loads(data.data)
        return copy

    def allgather_object(self, obj: T, *, timeout: float | None = None) -> list[T]:
        """Give every rank the Python objects of all ranks, in rank order, by pickle.

        See `broadcast_object` about pickle.
        """
        data = _pickled(obj)
        lengths = self.allgather(np.array([data.size]), timeout=timeout)
        joined = self.allgather(data, timeout=timeout)
        ends = np.cumsum(lengths).tolist()
        parts = zip(ends, lengths.tolist(), strict=True)
        return [pickle.loads(joined[end - length : end].data) for end, length in parts]

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make communicators of the ranks that name the same color.

        Args:
            color: an integer >= 0, or None to belong to no group.
            key: the order in the new group; ties by rank.

        Returns:
            The new group's communicator, None where color is None.
        """
        if color is not None and color < 0:
            raise ValueError(f"split: color is negative, expected None or >= 0, got {color}")
        mine = np.array([[-1 if color is None else color, key]])
        chosen = self.allgather(mine)
        part = self._transport.split(color, key)
        if part is None:
            return None
        members = [r for r in range(self.size) if chosen[r, 0] == color]
        members.sort(key=lambda r: (chosen[r, 1], r))
        return Communicator(part, [self._leaders[r] for r in members], self._calls.settings)

    def close(self) -> None:
        """Release the communicator; *collective*. Closing twice is harmless."""
        if self._calls.unusable is None:
            self._calls.unusable = "it was closed"
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

    def _reducible(self, call: Call, x: npt.ArrayLike, op: Op, out: Array | None) -> Array:
        """Check the arguments of a reduction."""
        array = arrays.as_array(x, operation=call.operation)
        reduction.check(op, array.dtype, operation=call.operation)
        if out is not None:
            arrays.check_out(out, array.shape, array.dtype, operation=call.operation)
        return array

    def _contribution(self, array: Array, op: Op, out: Array | None) -> Array:
        """Copy this rank's array to where the reduction will happen."""
        buffer = arrays.flat_copy(array, out, reduction.work_dtype(array.dtype))
        reduction.prepare(buffer, op, self.size)
        return buffer


def _row_size(shape: tuple[int, ...]) -> int:
    """Return the number of elements of one row of an array."""
    return math.prod(shape[1:])


def _pickled(obj: object) -> Array:
    return np.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), np.uint8)
