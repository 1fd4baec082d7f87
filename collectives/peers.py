"""What `bench` compares with: the same operation done by others, on the same arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives import launch, settings
from collectives.arrays import Array

__all__ = ["PEERS", "native"]

Call = Callable[[], object]


def native(operation: str, x: Array, bounds: Sequence[int], root: int) -> Call:
    """Return MPI's own blocking call, straight through mpi4py.

    Args:
        operation: its name here.
        x: flat, what this rank brings; only read.
        bounds: `size + 1` offsets of the ranks' shares of the whole array.
        root: of the operations that have one.

    Raises:
        ValueError: the MPI library does not know the dtype.
    """
    from mpi4py import MPI

    world = launch.start_mpi(settings.from_environment())
    rank, size = world.Get_rank(), world.Get_size()
    if x.dtype.name == "bfloat16":  # MPI has none: float16 has as many bytes
        x = x.astype(np.float16)
    # One of MPI's own datatypes: its reductions take no duplicates.
    kind = MPI.Datatype.fromcode(x.dtype.char)
    if kind == MPI.DATATYPE_NULL:
        raise ValueError(f"bench: this MPI library has no {x.dtype}, expected --peers ''")
    counts = np.diff(bounds).tolist()
    offsets = bounds[:-1]
    # The first op that is defined for a dtype: SUM, or MIN for bool, which MPI calls LAND.
    mpi_op = MPI.LAND if x.dtype.kind == "b" else MPI.SUM
    send = [x, kind]
    if operation == "allreduce":
        out = np.empty_like(x)
        return lambda: world.Allreduce(send, [out, kind], mpi_op)
    if operation == "reduce":
        into = [np.empty_like(x), kind] if rank == root else None
        return lambda: world.Reduce(send, into, mpi_op, root)
    if operation == "reduce_scatter":
        own = np.empty(counts[rank], x.dtype)
        return lambda: world.Reduce_scatter(send, [own, kind], counts, mpi_op)
    if operation == "broadcast":
        buffer = [x.copy(), kind]
        return lambda: world.Bcast(buffer, root)
    whole = np.empty(bounds[-1], x.dtype)
    if operation == "allgather":
        return lambda: world.Allgatherv(send, [whole, counts, offsets, kind])
    if operation == "gather":
        gathered = [whole, counts, offsets, kind] if rank == root else None
        return lambda: world.Gatherv(send, gathered, root)
    if operation == "scatter":
        own = np.empty(counts[rank], x.dtype)
        parts = [x, counts, offsets, kind] if rank == root else None
        return lambda: world.Scatterv(parts, [own, kind], root)
    own_counts = [counts[rank]] * size
    starts = [counts[rank] * r for r in range(size)]
    received = np.empty(counts[rank] * size, x.dtype)
    return lambda: world.Alltoallv([x, counts, offsets, kind], [received, own_counts, starts, kind])


PEERS: dict[str, Callable[[str, Array, Sequence[int], int], Call]] = {"native": native}
