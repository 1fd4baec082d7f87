"""Keep the replicas of a model in step, and feed them.

Example:
    >>> import strategies
    >>> strategy = strategies.get_strategy()
    >>> with strategy.scope():
    ...     w = strategy.variable([1.0, 2.0], name="w")
    >>> strategy.run(lambda: w.value.sum()).item()
    3.0
"""

from __future__ import annotations

from strategies import errors
from strategies.accumulators.accumulators import (
    ConditionalAccumulator,
    SparseConditionalAccumulator,
    shared_accumulator,
)
from strategies.averaging.alike import check_alike
from strategies.averaging.broadcast import broadcast_optimizer_state, broadcast_parameters
from strategies.cluster.cluster import Cluster
from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.gpus import limit_gpu_memory, use_gpus
from strategies.cluster.resolvers import (
    RanksClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from strategies.cluster.scopes import current_device, device
from strategies.cluster.setter import (
    GreedyLoadBalancing,
    RandomChoice,
    RoundRobin,
    byte_size,
    replica_device_setter,
)
from strategies.cluster.slurm import SlurmClusterResolver
from strategies.cluster.spec import ClusterSpec
from strategies.distributed_optimizer import DistributedOptimizer
from strategies.input.batching import (
    batch,
    batch_join,
    csv_batches,
    shuffle_batch,
    shuffle_batch_join,
)
from strategies.input.coordinator import Coordinator, LooperThread
from strategies.input.csv import decode_csv
from strategies.input.files import match_files
from strategies.input.filtering import (
    maybe_batch,
    maybe_batch_join,
    maybe_shuffle_batch,
    maybe_shuffle_batch_join,
)
from strategies.input.prefetch import prefetch
from strategies.input.producers import (
    input_producer,
    limit_epochs,
    preload,
    range_input_producer,
    slice_input_producer,
    string_input_producer,
)
from strategies.input.readers import (
    FixedLengthRecordReader,
    IdentityReader,
    TextLineReader,
    TFRecordReader,
    WholeFileReader,
)
from strategies.input.records import TFRecordWriter
from strategies.input.runners import QueueRunner, start_queue_runners
from strategies.input.sharded import ShardedInput
from strategies.input.sharding import in_step
from strategies.optimizers import LARS, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp, schedules
from strategies.optimizers.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from strategies.options import CommunicationOptions
from strategies.parameter_server import ClusterCoordinator, Drop, ParameterServerStrategy, Scale
from strategies.queues.files import shared_files
from strategies.queues.kinds import FIFOQueue, PaddingFIFOQueue, PriorityQueue, RandomShuffleQueue
from strategies.queues.shared import shared_queue
from strategies.remote.container import container
from strategies.remote.functions import RemoteTraceback, Task, TaskFuture
from strategies.remote.server import Server
from strategies.remote.service import Service
from strategies.replicas.context import ReplicaContext
from strategies.replicas.datasets import InputContext, ValueContext
from strategies.replicas.per_replica import PerReplica
from strategies.replicas.variable import Variable
from strategies.spare_replica import SpareReplicaStrategy
from strategies.sparse import Rows
from strategies.strategy import Strategy
from strategies.synchronous import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from strategies.training.checkpoint import Checkpoint
from strategies.training.checkpoint_manager import CheckpointManager
from strategies.training.summaries import MetricsWriter, Progress, loss_curve, read_metrics
from strategies.variables import partition
from strategies.variables.items import Reading, Update
from strategies.variables.open import reset_container, shared_partitioned_variable, shared_variable
from strategies.variables.partitioned import PartitionedVariable
from strategies.variables.together import apply_all, assign_all, read_all
from strategies.variables.variable import SharedVariable

__all__ = [
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "Cluster",
    "ClusterCoordinator",
    "ClusterSpec",
    "CommunicationOptions",
    "ConditionalAccumulator",
    "Coordinator",
    "DefaultStrategy",
    "DeviceSpec",
    "DistributedOptimizer",
    "Drop",
    "FIFOQueue",
    "FixedLengthRecordReader",
    "GreedyLoadBalancing",
    "IdentityReader",
    "InputContext",
    "LooperThread",
    "MetricsWriter",
    "MirroredStrategy",
    "Momentum",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PaddingFIFOQueue",
    "ParameterServerStrategy",
    "PartitionedVariable",
    "PerReplica",
    "PriorityQueue",
    "Progress",
    "QueueRunner",
    "RMSProp",
    "RandomChoice",
    "RandomShuffleQueue",
    "RanksClusterResolver",
    "Reading",
    "RemoteTraceback",
    "ReplicaContext",
    "RoundRobin",
    "Rows",
    "Scale",
    "Server",
    "Service",
    "ShardedInput",
    "SharedVariable",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "SpareReplicaStrategy",
    "SparseConditionalAccumulator",
    "Strategy",
    "TFConfigClusterResolver",
    "TFRecordReader",
    "TFRecordWriter",
    "Task",
    "TaskFuture",
    "TextLineReader",
    "UnionResolver",
    "Update",
    "ValueContext",
    "Variable",
    "WholeFileReader",
    "apply_all",
    "assign_all",
    "batch",
    "batch_join",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byte_size",
    "check_alike",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "container",
    "csv_batches",
    "current_device",
    "decode_csv",
    "device",
    "errors",
    "get_replica_context",
    "get_strategy",
    "in_cross_replica_context",
    "in_step",
    "input_producer",
    "limit_epochs",
    "limit_gpu_memory",
    "loss_curve",
    "match_files",
    "maybe_batch",
    "maybe_batch_join",
    "maybe_shuffle_batch",
    "maybe_shuffle_batch_join",
    "partition",
    "prefetch",
    "preload",
    "range_input_producer",
    "read_all",
    "read_metrics",
    "replica_device_setter",
    "reset_container",
    "schedules",
    "shared_accumulator",
    "shared_files",
    "shared_partitioned_variable",
    "shared_queue",
    "shared_variable",
    "shuffle_batch",
    "shuffle_batch_join",
    "slice_input_producer",
    "start_queue_runners",
    "string_input_producer",
    "use_gpus",
]


def __dir__() -> list[str]:
    """Return what is public, without the modules that it comes from."""
    return __all__
