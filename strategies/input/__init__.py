"""Input pipelines: queues, readers, threads, and each rank's shard."""

from strategies.input.batching import (
    batch,
    batch_join,
    csv_batches,
    shuffle_batch,
    shuffle_batch_join,
)
from strategies.input.broadcast_batches import broadcast_batches
from strategies.input.coordinator import Coordinator, LooperThread
from strategies.input.csv.parser import decode_csv
from strategies.input.file_batches import FileBatches
from strategies.input.files import match_files
from strategies.input.filtering import (
    maybe_batch,
    maybe_batch_join,
    maybe_shuffle_batch,
    maybe_shuffle_batch_join,
)
from strategies.input.node_arrays import once_per_node
from strategies.input.prefetching import prefetch
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
from strategies.input.round_robin import ReaderRoundRobin
from strategies.input.runners import QueueRunner, start_queue_runners
from strategies.input.sharded import ShardedInput
from strategies.input.uneven_batches import in_step

__all__ = [
    "Coordinator",
    "FileBatches",
    "FixedLengthRecordReader",
    "IdentityReader",
    "LooperThread",
    "QueueRunner",
    "ShardedInput",
    "TFRecordReader",
    "TFRecordWriter",
    "TextLineReader",
    "ReaderRoundRobin",
    "WholeFileReader",
    "batch",
    "batch_join",
    "broadcast_batches",
    "csv_batches",
    "decode_csv",
    "in_step",
    "input_producer",
    "limit_epochs",
    "match_files",
    "maybe_batch",
    "maybe_batch_join",
    "maybe_shuffle_batch",
    "maybe_shuffle_batch_join",
    "once_per_node",
    "prefetch",
    "preload",
    "range_input_producer",
    "shuffle_batch",
    "shuffle_batch_join",
    "slice_input_producer",
    "start_queue_runners",
    "string_input_producer",
]
