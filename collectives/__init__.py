"""Collective operations on arrays among the processes of an MPI job.

Example:
    >>> import collectives as cc
    >>> comm = cc.init()
    >>> total = comm.allreduce(comm.rank, op=cc.SUM)
"""

from __future__ import annotations

from collectives.communicator import Communicator
from collectives.compression import BF16, FP16, NONE, Compression
from collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    LaunchError,
    MismatchError,
    PeerFailure,
)
from collectives.reduction import MAX, MEAN, MIN, PRODUCT, SUM
from collectives.world import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_object,
    gather,
    init,
    is_initialized,
    local_rank,
    local_size,
    node_rank,
    num_nodes,
    rank,
    reduce,
    reduce_scatter,
    scatter,
    shutdown,
    size,
)

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP16",
    "MAX",
    "MEAN",
    "MIN",
    "NONE",
    "PRODUCT",
    "SUM",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Compression",
    "LaunchError",
    "MismatchError",
    "PeerFailure",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "node_rank",
    "num_nodes",
    "rank",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shutdown",
    "size",
]
