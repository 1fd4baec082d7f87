"""Every algorithm against the oracle; a program for all ranks of some machines."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from mpi4py import MPI

import collectives as cc
import oracle
from collectives.algorithms import (
    double_tree,
    halving_doubling,
    hierarchical,
    mpi_native,
    pairwise,
    recursive_doubling,
    ring,
    tree,
)
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

ALLREDUCES = {
    "ring": lambda buffer, op: ring.allreduce(transport, buffer, op, limit()),
    "tree": lambda buffer, op: tree.allreduce(transport, buffer, op, limit()),
    "double_tree": lambda buffer, op: double_tree.allreduce(transport, buffer, op, limit()),
    "doubling": lambda buffer, op: recursive_doubling.allreduce(transport, buffer, op, limit()),
    "halving": lambda buffer, op: halving_doubling.allreduce(transport, buffer, op, limit()),
    "native": lambda buffer, op: mpi_native.allreduce(transport, buffer, op, limit()),
    "hierarchical": lambda buffer, op: hierarchical.allreduce(levels, buffer, op, limit()),
    "in memory": lambda buffer, op: hierarchical.allreduce(in_memory, buffer, op, limit()),
}

BROADCASTS = {
    "ring": lambda buffer, root: ring.broadcast(transport, buffer, root, limit()),
    "tree": lambda buffer, root: tree.broadcast(transport, buffer, root, limit()),
    "double_tree": lambda buffer, root: double_tree.broadcast(transport, buffer, root, limit()),
    "native": lambda buffer, root: mpi_native.broadcast(transport, buffer, root, limit()),
    "hierarchical": lambda buffer, root: hierarchical.broadcast(levels, buffer, root, limit()),
    "in memory": lambda buffer, root: hierarchical.broadcast(in_memory, buffer, root, limit()),
}


def everyones(count):
    return [oracle.data(rank, (count,), np.dtype(np.float32)) for rank in range(SIZE)]


for count in COUNTS:
    arrays = everyones(count)
    for name, allreduce in ALLREDUCES.items():
        for op in (cc.SUM, cc.MEAN, cc.MAX) if count == 1001 else (cc.SUM,):
            buffer = arrays[comm.rank].copy()
            reduction.prescale(buffer, op, SIZE)
            allreduce(buffer, op)
            oracle.assert_close(buffer, arrays, op)
            if name != "native":
                root_bits = comm.broadcast(buffer)
                np.testing.assert_array_equal(buffer, root_bits)
    for name, broadcast in BROADCASTS.items():
        for root in (0, SIZE - 1):
            buffer = arrays[comm.rank].copy()
            broadcast(buffer, root)
            np.testing.assert_array_equal(buffer, arrays[root], err_msg=name)
    bounds = topology.chunk_bounds(count, SIZE)
    own = slice(bounds[comm.rank], bounds[comm.rank + 1])
    for module in (ring, halving_doubling, mpi_native):
        buffer = arrays[comm.rank].copy()
        module.reduce_scatter(transport, buffer, bounds, cc.SUM, limit())
        oracle.assert_close(buffer[own], [a[own] for a in arrays], cc.SUM)
        buffer = np.full(count, np.nan, np.float32)
        buffer[own] = arrays[0][own]
        module.allgather(transport, buffer, bounds, limit())
        np.testing.assert_array_equal(buffer, arrays[0])
    counts = np.diff(bounds).tolist()
    for module in (tree, mpi_native):
        whole = arrays[1] if comm.rank == 1 else None
        part = module.scatter(transport, whole, counts, 1, np.dtype(np.float32), limit())
        np.testing.assert_array_equal(part, arrays[1][own])
        collected = module.gather(transport, part, counts, 1, limit())
        if collected is not None:
            np.testing.assert_array_equal(collected, arrays[1])
    for module in (pairwise, mpi_native):
        result = module.alltoall(
            transport, arrays[comm.rank], counts, [counts[comm.rank]] * SIZE, limit()
        )
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
    hierarchical.barrier(levels, limit())
    hierarchical.barrier(in_memory, limit())

print(
    f"rank {comm.rank} of {SIZE} on node {comm.node_rank} of {comm.num_nodes}: all right\n", end=""
)
sys.stdout.flush()
