"""Distribution strategies: train replicas of a model in step, and feed them with data.

Example:
    >>> import strategies
    >>> strategy = strategies.get_strategy()
    >>> with strategy.scope():
    ...     w = strategy.variable([1.0, 2.0], name="w")
    >>> strategy.run(lambda: w.value.sum()).item()
    3.0

`strategies.torch`, `.jax`, `.horovod`, `.experiment` and `.model_parallel` are imported at first
use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from strategies import (
    accumulators,
    checkpoint,
    cluster,
    elastic,
    errors,
    input,
    optimizers,
    parameter_server,
    queues,
    replicas,
    rpc,
    session,
    variables,
)
from strategies.averaging.broadcast import (
    average_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from strategies.averaging.consistency import check_consistent
from strategies.checkpoint.checkpoint_manager import CheckpointManager
from strategies.cluster.cluster import Cluster
from strategies.cluster.local_devices import devices
from strategies.core.communication_options import CommunicationOptions
from strategies.core.sparse import Rows
from strategies.distributed_optimizer import DistributedOptimizer
from strategies.launcher import launch
from strategies.optimizers import LARS, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp, schedules
from strategies.parameter_server import ParameterServerStrategy
from strategies.replicas.variable import Variable
from strategies.rpc.server import Server
from strategies.spare_replica import SpareReplicaStrategy
from strategies.strategy.base import Strategy
from strategies.strategy.synchronous_strategies import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from strategies.tpu import TPUStrategy

__all__ = [
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CentralStorageStrategy",
    "CheckpointManager",
    "Cluster",
    "CommunicationOptions",
    "DefaultStrategy",
    "DistributedOptimizer",
    "MirroredStrategy",
    "Momentum",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "RMSProp",
    "Rows",
    "Server",
    "SpareReplicaStrategy",
    "Strategy",
    "TPUStrategy",
    "Variable",
    "accumulators",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_consistent",
    "checkpoint",
    "cluster",
    "devices",
    "elastic",
    "errors",
    "get_replica_context",
    "get_strategy",
    "in_cross_replica_context",
    "input",
    "launch",
    "optimizers",
    "parameter_server",
    "queues",
    "replicas",
    "rpc",
    "schedules",
    "session",
    "variables",
]

# Not in `__all__`, because `from strategies import *` would import PyTorch, JAX and Keras.
_LAZY = ("experiment", "horovod", "jax", "keras", "model_parallel", "torch")

if TYPE_CHECKING:
    from strategies import experiment as experiment
    from strategies import horovod as horovod
    from strategies import jax as jax
    from strategies import keras as keras
    from strategies import model_parallel as model_parallel
    from strategies import torch as torch
else:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> ModuleType:
        """Import a module of this package at its first use."""
        # Called only for names that the module does not have yet (PEP 562).
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            # The import system stores the module as an attribute, so this runs once per name.
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            # `hasattr` and `inspect` handle only this error.
            raise AttributeError(f"strategies.{name}: the import failed: {error}") from error


def __dir__() -> list[str]:
    """Return the public names, without imported modules."""
    return sorted([*__all__, *_LAZY])
