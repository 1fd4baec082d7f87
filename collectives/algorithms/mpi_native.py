"""MPI's own collectives behind the same interface, as the reference for the other algorithms.

Their non-blocking forms are used, so that waits have a deadline. They need an `MpiTransport`. With
a library older than MPI 4 they reject more than 2^31 - 1 elements of a reduction, or bytes of other
operations. The MPI library determines the order of summation, and whether all ranks get the same
bits.

Source: MPI 3.1 standard, chapter 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array, raw_bytes
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Deadline, Transport

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    from collectives.core import mpi as MPI

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "exclusive",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# The largest count of MPI 3.1, a C int; libraries of MPI 4 accept larger ones.
_LARGEST_COUNT = 2**31 - 1


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks, in place."""
    # Before the copy, so that a call that is too long raises on all ranks alike.
    t = _of_mpi(transport, "allreduce", buffer.size, "elements")
    work = _reducible(buffer)
    # `watch` gives the operation a deadline, and keeps its memory.
    t.wait([t.watch(t.mpi.Iallreduce, MPI.IN_PLACE, work, _op(op))], deadline)
    _give_back(work, buffer)


def reduce(
    transport: Transport, buffer: Array, op: reduction.Op, root: int, deadline: Deadline
) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks on the root, in place."""
    t = _of_mpi(transport, "reduce", buffer.size, "elements")
    work = _reducible(buffer)
    # In place on the root only, as MPI_Reduce requires.
    send, receive = (MPI.IN_PLACE, work) if t.rank == root else (work, None)
    t.wait([t.watch(t.mpi.Ireduce, send, receive, _op(op), root)], deadline)
    _give_back(work, buffer)


def reduce_scatter(
    transport: Transport,
    buffer: Array,
    bounds: Sequence[int],
    op: reduction.Op,
    deadline: Deadline,
) -> None:
    """Reduce `buffer[bounds[rank]:bounds[rank + 1]]` of this rank, in place."""
    t = _of_mpi(transport, "reduce_scatter", buffer.size, "elements")
    work = _reducible(buffer)
    own = np.empty(bounds[t.rank + 1] - bounds[t.rank], work.dtype)
    counts = np.diff(bounds).tolist()
    t.wait([t.watch(t.mpi.Ireduce_scatter, work, own, counts, _op(op))], deadline)
    buffer[bounds[t.rank] : bounds[t.rank + 1]] = own


def exclusive(
    transport: Transport, own: Array, op: reduction.Op, deadline: Deadline
) -> Array | None:
    """Return the reduction over the ranks before this one, shape (n,); None on rank 0."""
    t = _of_mpi(transport, "scan", own.size, "elements")
    work, result = _reducible(own), np.empty_like(own)
    # MPI leaves the result of rank 0 undefined.
    received = np.empty_like(work)
    ranks: Any = t.mpi  # an intracommunicator, which has Iexscan
    t.wait([t.watch(ranks.Iexscan, work, received, _op(op))], deadline)
    if t.rank == 0:
        return None
    result[...] = received
    return result


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    t = _of_mpi(transport, "broadcast", buffer.nbytes, "bytes")
    # As bytes, so that every dtype can be moved.
    t.wait([t.watch(t.mpi.Ibcast, raw_bytes(buffer), root)], deadline)


def allgather(
    transport: Transport, buffer: Array, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill `buffer` with every rank's `buffer[bounds[rank]:bounds[rank + 1]]`, in place."""
    t = _of_mpi(transport, "allgather", buffer.nbytes, "bytes")
    # Each rank's own part is in its place already.
    parts = _parts(buffer, np.diff(bounds).tolist())
    t.wait([t.watch(t.mpi.Iallgatherv, MPI.IN_PLACE, parts)], deadline)


def gather(
    transport: Transport, own: Array, counts: Sequence[int], root: int, deadline: Deadline
) -> Array | None:
    """Collect every rank's elements on the root, shape (sum(counts),); None elsewhere."""
    t = _of_mpi(transport, "gather", sum(counts) * own.itemsize, "bytes")
    result = np.empty(sum(counts), own.dtype) if t.rank == root else None
    receive = None if result is None else _parts(result, counts)
    t.wait([t.watch(t.mpi.Igatherv, raw_bytes(own), receive, root)], deadline)
    return result


def scatter(
    transport: Transport,
    buffer: Array | None,
    counts: Sequence[int],
    root: int,
    dtype: np.dtype[Any],
    deadline: Deadline,
) -> Array:
    """Send every rank its part of the root's buffer; arguments and result as `tree.scatter`."""
    t = _of_mpi(transport, "scatter", sum(counts) * dtype.itemsize, "bytes")
    own = np.empty(counts[t.rank], dtype)
    send = None if buffer is None or t.rank != root else _parts(buffer, counts)
    t.wait([t.watch(t.mpi.Iscatterv, send, raw_bytes(own), root)], deadline)
    return own


def alltoall(
    transport: Transport,
    send: Array,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    deadline: Deadline,
) -> Array:
    """Exchange a part with every rank; arguments and result as `pairwise.alltoall`.

    Each rank knows only its own bytes, so the ranks first exchange the largest sum: all reject what
    is too long for one.
    """
    t = _of_mpi(transport)
    longest = np.array([max(sum(send_counts), sum(receive_counts)) * send.itemsize])
    # Libraries of MPI 4 take large counts, and need no agreement.
    if MPI.Get_version() < (4, 0):
        t.wait([t.watch(t.mpi.Iallreduce, MPI.IN_PLACE, longest, MPI.MAX)], deadline)
    # After the exchange, so that all ranks raise.
    _of_mpi(transport, "alltoall", int(longest[0]), "bytes")
    result = np.empty(sum(receive_counts), send.dtype)
    parts = _parts(send, send_counts), _parts(result, receive_counts)
    t.wait([t.watch(t.mpi.Ialltoallv, *parts)], deadline)
    return result


def barrier(transport: Transport, deadline: Deadline) -> None:
    """Return when every rank has entered."""
    t = _of_mpi(transport)
    t.wait([t.watch(t.mpi.Ibarrier)], deadline)


def _of_mpi(
    transport: Transport, operation: str = "native", count: int = 0, unit: str = ""
) -> MpiTransport:
    """Return the MPI transport; raise if MPI's operations cannot handle this count."""
    if not isinstance(transport, MpiTransport):
        raise TypeError(f"native: expected a transport over MPI, got {type(transport).__name__}")
    if count > _LARGEST_COUNT and MPI.Get_version() < (4, 0):
        raise ValueError(
            f"{operation}: too long for this MPI library's own operation, expected at most "
            f"{_LARGEST_COUNT} {unit}, got {count}; use another algorithm"
        )
    return transport


def _parts(array: Array, counts: Sequence[int]) -> list[object]:
    """Return an array and its bytes per rank, as MPI's vector operations take them."""
    # Offsets follow from the counts, as mpi4py computes them.
    return [raw_bytes(array), [count * array.itemsize for count in counts]]


def _reducible(buffer: Array) -> Array:
    """Return a buffer as a dtype that MPI reduces correctly.

    MPI has no order of bool, so bools are reduced as bytes. Open MPI's vectorised sum of 8- and
    16-bit integers saturates instead of wrapping around (seen with 5.0.11). So these are reduced as
    32-bit integers, which wrap when they are converted back.
    """
    if buffer.dtype.kind == "b":
        return buffer.view(np.uint8)
    if buffer.dtype.kind in "iu" and buffer.itemsize < 4:
        return buffer.astype(np.int32 if buffer.dtype.kind == "i" else np.uint32)
    return buffer


def _give_back(work: Array, buffer: Array) -> None:
    # A view has the dtype of bytes, but shares the memory, so this copies onto itself.
    if work.dtype != buffer.dtype:
        buffer[...] = work


def _op(op: reduction.Op) -> object:
    return getattr(MPI, reduction.RULES[op].mpi)
