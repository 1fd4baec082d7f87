"""Collective operations on arrays among the processes of an MPI job.

Example:
    >>> import collectives as cc
    >>> comm = cc.init()
    >>> total = comm.allreduce(comm.rank, op=cc.SUM)
"""

from __future__ import annotations

from collectives.arrays.reduction import MAX, MEAN, MIN, PRODUCT, SUM
from collectives.buckets.buckets import Buckets
from collectives.communicator import Communicator
from collectives.compression import BF16, FP16, NONE, Compression
from collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    LaunchError,
    MismatchError,
    PeerFailure,
)
from collectives.launch import launched_processes
from collectives.operations.plan import Plan
from collectives.operations.requests import Request
from collectives.version import __version__ as __version__
from collectives.world import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    barrier_async,
    broadcast,
    broadcast_async,
    broadcast_object,
    gather,
    gather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    init,
    is_initialized,
    local_rank,
    local_size,
    node_rank,
    num_nodes,
    plan_allreduce,
    plan_buckets,
    rank,
    recv,
    reduce,
    reduce_async,
    reduce_scatter,
    reduce_scatter_async,
    scatter,
    scatter_async,
    send,
    shared_empty,
    shutdown,
    size,
    sparse_allreduce,
)

__all__ = [
    "BF16",
    "FP16",
    "MAX",
    "MEAN",
    "MIN",
    "NONE",
    "PRODUCT",
    "SUM",
    "Buckets",
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "Compression",
    "LaunchError",
    "MismatchError",
    "PeerFailure",
    "Plan",
    "Request",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "gather",
    "gather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "init",
    "is_initialized",
    "launched_processes",
    "local_rank",
    "local_size",
    "node_rank",
    "num_nodes",
    "plan_allreduce",
    "plan_buckets",
    "rank",
    "recv",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scatter",
    "scatter_async",
    "send",
    "shared_empty",
    "shutdown",
    "size",
    "sparse_allreduce",
]


def __dir__() -> list[str]:
    """Return what is public, without the modules that it comes from."""
    return __all__
