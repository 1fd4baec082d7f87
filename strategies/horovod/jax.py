"""`import strategies.horovod.jax as hvd`: Horovod's API for JAX arrays.

    hvd.init()
    transformation = hvd.DistributedOptimizer(optax.adam(1e-3))
    params = hvd.broadcast_parameters(params)

Arrays of JAX do not change: the operations that change arrays in place are absent, and
`broadcast_parameters` returns new ones. Outside of compiled functions; inside of these it is
`DistributedOptimizer` that averages.
"""

from __future__ import annotations

from typing import Any

import strategies.averaging.broadcast as broadcasts
from strategies.horovod import common
from strategies.horovod.common import *  # noqa: F403  # listed there
from strategies.horovod.operations import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from strategies.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
__all__ += common.__all__


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the parameters of one rank, in a tree like that of `params`; *collective*."""
    bound = process_set.bound("broadcast_parameters")
    root = bound.ranks.index(root_rank) if root_rank in bound.ranks else -1
    return broadcasts.broadcast_parameters(params, root, comm=bound.comm)
