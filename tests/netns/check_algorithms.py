"""Every algorithm against the oracle; a program for all ranks of some machines."""

import sys
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import collectives as cc
import oracle
from collectives.algorithms import hierarchical, mpi_native, selection
from collectives.arrays import reduction
from collectives.communicator import group_of
from collectives.core import topology
from collectives.transport.transport import Deadline

comm = cc.init()
transport = group_of(comm).transport
leaders = comm.allgather(comm.node_rank).tolist()
levels = hierarchical.levels(transport, leaders)
in_memory = group_of(comm).levels  # the same where ranks of a machine meet in shared memory
assert (group_of(comm).node_engine is None) == (comm.local_size == 1)
SIZE = comm.size


def limit():
    return Deadline("check", 30.0)


# None, fewer than ranks, doubled, halved, a ring of several slices.
COUNTS = [0, 1, 1001, 50_001, 600_001]


def runs(operation):
    """The algorithms of an operation by name, over what they need; and by shared memory."""
    found = {
        name: partial(algorithm.run, levels if name == "hierarchical" else transport)
        for name, algorithm in selection.ALGORITHMS[operation].items()
    }
    if "hierarchical" in found:
        found["in memory"] = partial(found["hierarchical"].func, in_memory)
    return found


def everyones(count):
    return [oracle.data(rank, (count,), np.dtype(np.float32)) for rank in range(SIZE)]


for count in COUNTS:
    arrays = everyones(count)
    for name, allreduce in runs("allreduce").items():
        for op in (cc.SUM, cc.MEAN, cc.MAX) if count == 1001 else (cc.SUM,):
            buffer = arrays[comm.rank].copy()
            reduction.prescale(buffer, op, SIZE)
            allreduce(buffer, op, limit())
            oracle.assert_close(buffer, arrays, op)
            if name != "native":
                root_bits = comm.broadcast(buffer)
                np.testing.assert_array_equal(buffer, root_bits)
    for name, broadcast in runs("broadcast").items():
        for root in (0, SIZE - 1):
            buffer = arrays[comm.rank].copy()
            broadcast(buffer, root, limit())
            np.testing.assert_array_equal(buffer, arrays[root], err_msg=name)
    bounds = topology.chunk_bounds(count, SIZE)
    own = slice(bounds[comm.rank], bounds[comm.rank + 1])
    for reduce_scatter in runs("reduce_scatter").values():
        buffer = arrays[comm.rank].copy()
        reduce_scatter(buffer, bounds, cc.SUM, limit())
        oracle.assert_close(buffer[own], [a[own] for a in arrays], cc.SUM)
    for allgather in runs("allgather").values():
        buffer = np.full(count, np.nan, np.float32)
        buffer[own] = arrays[0][own]
        allgather(buffer, bounds, limit())
        np.testing.assert_array_equal(buffer, arrays[0])
    counts = np.diff(bounds).tolist()
    for scatter in runs("scatter").values():
        whole = arrays[1] if comm.rank == 1 else None
        part = scatter(whole, counts, 1, np.dtype(np.float32), limit())
        np.testing.assert_array_equal(part, arrays[1][own])
    for gather in runs("gather").values():
        collected = gather(arrays[1][own].copy(), counts, 1, limit())
        if comm.rank == 1:
            np.testing.assert_array_equal(collected, arrays[1])
    for alltoall in runs("alltoall").values():
        result = alltoall(arrays[comm.rank], counts, [counts[comm.rank]] * SIZE, limit())
        np.testing.assert_array_equal(result, np.concatenate([a[own] for a in arrays]))

# Longer than an int of C counts; the memory is never touched.
huge = np.empty(2**31, np.uint8)
own_share = 2**31 if comm.rank == 1 else 0
to_itself = [own_share if rank == comm.rank else 0 for rank in range(SIZE)]
if MPI.Get_version() < (4, 0):
    for refused in (
        lambda: mpi_native.allreduce(transport, huge, cc.MAX, limit()),
        lambda: mpi_native.broadcast(transport, huge, 0, limit()),
        # Too long for rank 1 alone: it sends 2 GiB to itself, the others nothing to anybody.
        lambda: mpi_native.alltoall(transport, huge[:own_share], to_itself, to_itself, limit()),
    ):
        with pytest.raises(ValueError, match="expected at most 2147483647"):
            refused()

for _ in range(5):
    for barrier in runs("barrier").values():
        barrier(limit())

print(
    f"rank {comm.rank} of {SIZE} on node {comm.node_rank} of {comm.num_nodes}: all right\n", end=""
)
sys.stdout.flush()
