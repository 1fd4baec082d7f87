"""`import strategies.horovod.jax as hvd`: Horovod's API for JAX arrays.

    hvd.init()
    transformation = hvd.DistributedOptimizer(optax.adam(1e-3))
    params = hvd.broadcast_parameters(params)

JAX arrays are immutable: in-place operations are absent, and `broadcast_parameters` returns new
arrays. Call the operations outside of compiled functions. Inside of them `DistributedOptimizer`
averages.
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
    """Return the parameters of one rank in a tree like `params`; *collective*."""
    bound = process_set.bound("broadcast_parameters")
    # -1 is rejected by the broadcast, with the same error on all ranks.
    root = bound.ranks.index(root_rank) if root_rank in bound.ranks else -1
    return broadcasts.broadcast_parameters(params, root, comm=bound.comm)
