"""Horovod's names for arrays of JAX: `import strategies.horovod.jax as hvd`.

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
from strategies.averaging.metrics import metric_average
from strategies.horovod import elastic, questions, sessions
from strategies.horovod.compression import Compression
from strategies.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
)
from strategies.horovod.operations import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from strategies.horovod.optimizer import DistributedOptimizer
from strategies.horovod.process_sets import ProcessSet, global_process_set
from strategies.horovod.questions import *  # noqa: F403  # listed there
from strategies.horovod.sessions import *  # noqa: F403

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "metric_average",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += questions.__all__ + sessions.__all__


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the parameters of one rank, in a tree like that of `params`; *collective*."""
    bound = process_set.bound("broadcast_parameters")
    root = bound.ranks.index(root_rank) if root_rank in bound.ranks else -1
    return broadcasts.broadcast_parameters(params, root, comm=bound.comm)
