"""MPI's own collectives behind the same interface, as the reference for the other algorithms.

They are called in their non-blocking form, so that a wait has a deadline here, too. They need an
`MpiTransport`, and refuse more than 2^31 - 1 elements of a reduction, or bytes of anything else,
where the library is older than MPI 4. Order of summation, and whether all ranks get the same bits,
is up to the MPI library.

Source: MPI 3.1 standard, chapter 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import reduction
from collectives.arrays.host_arrays import Array, raw_bytes
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Deadline, Transport

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

# The largest count of MPI 3.1, an int of C; libraries of MPI 4 take longer ones.
_LARGEST_COUNT = 2**31 - 1


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks, in place."""
    from mpi4py import MPI

    t = _of_mpi(transport, "allreduce", buffer.size, "elements")
    work = _reducible(buffer)
    t.wait([t.watch(t.mpi.Iallreduce, MPI.IN_PLACE, work, _op(op))], deadline)
    _give_back(work, buffer)


def reduce(
    transport: Transport, buffer: Array, op: reduction.Op, root: int, deadline: Deadline
) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks on the root, in place."""
    from mpi4py import MPI

    t = _of_mpi(transport, "reduce", buffer.size, "elements")
    work = _reducible(buffer)
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
    """Reduce so that `buffer[bounds[rank]:bounds[rank + 1]]` is complete on this rank."""
    t = _of_mpi(transport, "reduce_scatter", buffer.size, "elements")
    work = _reducible(buffer)
    own = np.empty(bounds[t.rank + 1] - bounds[t.rank], work.dtype)
    counts = np.diff(bounds).tolist()
    t.wait([t.watch(t.mpi.Ireduce_scatter, work, own, counts, _op(op))], deadline)
    buffer[bounds[t.rank] : bounds[t.rank + 1]] = own


def exclusive(
    transport: Transport, own: Array, op: reduction.Op, deadline: Deadline
) -> Array | None:
    """Combine the arrays of the ranks before this one, shape (n,); None on rank 0."""
    t = _of_mpi(transport, "scan", own.size, "elements")
    work, result = _reducible(own), np.empty_like(own)
    received = np.empty_like(work)
    ranks: Any = t.mpi  # of one group, which has this
    t.wait([t.watch(ranks.Iexscan, work, received, _op(op))], deadline)
    if t.rank == 0:
        return None
    result[...] = received
    return result


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    t = _of_mpi(transport, "broadcast", buffer.nbytes, "bytes")
    t.wait([t.watch(t.mpi.Ibcast, raw_bytes(buffer), root)], deadline)


def allgather(
    transport: Transport, buffer: Array, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill `buffer` with every rank's `buffer[bounds[rank]:bounds[rank + 1]]`, in place."""
    from mpi4py import MPI

    t = _of_mpi(transport, "allgather", buffer.nbytes, "bytes")
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
    """Give every rank its part of the root's buffer; arguments and result as `tree.scatter`."""
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

    Each rank knows only its own sum of bytes; what is too long for one is refused on all.
    """
    from mpi4py import MPI

    t = _of_mpi(transport)
    longest = np.array([max(sum(send_counts), sum(receive_counts)) * send.itemsize])
    if MPI.Get_version() < (4, 0):
        t.wait([t.watch(t.mpi.Iallreduce, MPI.IN_PLACE, longest, MPI.MAX)], deadline)
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
    """Return a transport over MPI, whose own operations are not too short for this count."""
    from mpi4py import MPI

    if not isinstance(transport, MpiTransport):
        raise TypeError(
            f"native: this algorithm needs MPI below it, got {type(transport).__name__}"
        )
    if count > _LARGEST_COUNT and MPI.Get_version() < (4, 0):
        raise ValueError(
            f"{operation}: too long for this MPI library's own operation, expected at most "
            f"{_LARGEST_COUNT} {unit}, got {count}; use another algorithm"
        )
    return transport


def _parts(array: Array, counts: Sequence[int]) -> list[object]:
    """Cut an array into the ranks' elements, in the way that MPI takes them."""
    return [raw_bytes(array), [count * array.itemsize for count in counts]]


def _reducible(buffer: Array) -> Array:
    """Show a buffer as a dtype that MPI reduces rightly.

    MPI has no order of bool, so that goes as bytes. Open MPI's vectorised sum of 8- and 16-bit
    integers stops at the largest number instead of wrapping around (seen with 5.0.11), so these are
    reduced as 32-bit ones, which wrap when they are given back.
    """
    if buffer.dtype.kind == "b":
        return buffer.view(np.uint8)
    if buffer.dtype.kind in "iu" and buffer.itemsize < 4:
        return buffer.astype(np.int32 if buffer.dtype.kind == "i" else np.uint32)
    return buffer


def _give_back(work: Array, buffer: Array) -> None:
    if work.dtype != buffer.dtype:
        buffer[...] = work


def _op(op: reduction.Op) -> object:
    from mpi4py import MPI

    return getattr(MPI, reduction.RULES[op].mpi)
