"""Names shared by the `torch`, `jax` and `numpy` modules."""

from __future__ import annotations

from strategies.horovod import build_info, context, elastic
from strategies.horovod.build_info import *  # noqa: F403  # listed there
from strategies.horovod.compression import Compression
from strategies.horovod.context import *  # noqa: F403
from strategies.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from strategies.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    metric_average,
)
from strategies.horovod.operations import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_async,
    alltoall_async,
    barrier,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter_async,
    synchronize,
)
from strategies.horovod.optimizer import DistributedOptimizer
from strategies.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather_async",
    "allgather_object",
    "allreduce_async",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "elastic",
    "global_process_set",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_reducescatter_async",
    "join",
    "metric_average",
    "poll",
    "reducescatter_async",
    "synchronize",
]
__all__ += build_info.__all__ + context.__all__
