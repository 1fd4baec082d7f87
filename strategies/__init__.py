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
from strategies.base import DefaultStrategy, InputContext, Strategy, get_strategy
from strategies.distributed_optimizer import DistributedOptimizer
from strategies.input.batching import (
    batch,
    batch_join,
    csv_batches,
    shuffle_batch,
    shuffle_batch_join,
)
from strategies.input.coordinator import Coordinator, LooperThread
from strategies.input.decode import decode_csv
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
from strategies.input.queues import (
    FIFOQueue,
    PaddingFIFOQueue,
    PriorityQueue,
    RandomShuffleQueue,
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
from strategies.input.shared import shared_queue
from strategies.input.shared_files import shared_files
from strategies.multi_worker import MultiWorkerMirroredStrategy
from strategies.one_device import OneDeviceStrategy
from strategies.optimizers import SGD, Momentum
from strategies.resources.container import container
from strategies.resources.service import Service
from strategies.resources.variables import Variable
from strategies.training.checkpoint import Checkpoint
from strategies.training.checkpoint_manager import CheckpointManager
from strategies.training.summaries import MetricsWriter, Progress, loss_curve, read_metrics

__all__ = [
    "SGD",
    "Checkpoint",
    "CheckpointManager",
    "Coordinator",
    "DefaultStrategy",
    "DistributedOptimizer",
    "FIFOQueue",
    "FixedLengthRecordReader",
    "IdentityReader",
    "InputContext",
    "LooperThread",
    "MetricsWriter",
    "Momentum",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PaddingFIFOQueue",
    "PriorityQueue",
    "Progress",
    "QueueRunner",
    "RandomShuffleQueue",
    "Service",
    "ShardedInput",
    "Strategy",
    "TFRecordReader",
    "TFRecordWriter",
    "TextLineReader",
    "Variable",
    "WholeFileReader",
    "batch",
    "batch_join",
    "container",
    "csv_batches",
    "decode_csv",
    "errors",
    "get_strategy",
    "in_step",
    "input_producer",
    "limit_epochs",
    "loss_curve",
    "match_files",
    "maybe_batch",
    "maybe_batch_join",
    "maybe_shuffle_batch",
    "maybe_shuffle_batch_join",
    "prefetch",
    "preload",
    "range_input_producer",
    "read_metrics",
    "shared_files",
    "shared_queue",
    "shuffle_batch",
    "shuffle_batch_join",
    "slice_input_producer",
    "start_queue_runners",
    "string_input_producer",
]
