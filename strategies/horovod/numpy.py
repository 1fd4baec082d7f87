"""Horovod's names for arrays of NumPy.

import strategies.horovod.numpy as hvd

hvd.init()
total = hvd.allreduce(x, op=hvd.Sum, name="x")
"""

from __future__ import annotations

from strategies.averaging.metrics import metric_average
from strategies.horovod import elastic, operations, questions, sessions
from strategies.horovod.compression import Compression
from strategies.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from strategies.horovod.operations import *  # noqa: F403  # listed there
from strategies.horovod.optimizer import DistributedOptimizer
from strategies.horovod.process_sets import ProcessSet, global_process_set
from strategies.horovod.questions import *  # noqa: F403
from strategies.horovod.sessions import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "metric_average",
]
__all__ += operations.__all__ + questions.__all__ + sessions.__all__
