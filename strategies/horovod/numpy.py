"""Horovod's names for arrays of NumPy.

import strategies.horovod.numpy as hvd

hvd.init()
total = hvd.allreduce(x, op=hvd.Sum, name="x")
"""

from __future__ import annotations

from strategies.averaging.metrics import metric_average
from strategies.horovod import elastic, questions, sessions
from strategies.horovod.compression import Compression
from strategies.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
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
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from strategies.horovod.process_sets import ProcessSet, global_process_set
from strategies.horovod.questions import *  # noqa: F403  # listed there
from strategies.horovod.sessions import *  # noqa: F403

__all__ = [
    "Adasum",
    "Average",
    "Compression",
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
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
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
