"""Names shared by the `torch`, `jax` and `numpy` modules."""

from __future__ import annotations

import collectives as cc
from collectives import extend
from strategies.horovod import context, elastic
from strategies.horovod.compression import Compression
from strategies.horovod.context import *  # noqa: F403  # listed there
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
    poll,
    reducescatter_async,
    synchronize,
)
from strategies.horovod.optimizer import DistributedOptimizer, join
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
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_reducescatter_async",
    "join",
    "metric_average",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "reducescatter_async",
    "rocm_built",
    "synchronize",
]
__all__ += context.__all__


def mpi_threads_supported() -> bool:
    """Return whether several threads may send messages."""
    return extend.supports_threads(cc.init())


def mpi_built() -> bool:
    """Return True, because messages use MPI."""
    return True


mpi_enabled = mpi_built


def gloo_built() -> bool:
    """Return False, because Gloo is not used."""
    return False


def nccl_built() -> int:
    """Return 0, because NCCL is not used by default.

    Programs ask whether NCCL reduces gradients on GPUs. Horovod's names reduce by MPI.
    `algorithm="nccl"` or UNISONO_NCCL makes `collectives` reduce by NCCL.
    """
    return 0


gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = gloo_built
