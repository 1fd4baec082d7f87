"""Queues of typed elements, local or on another task."""

from strategies.queues.queue_types import (
    FIFOQueue,
    PaddingFIFOQueue,
    PriorityQueue,
    RandomShuffleQueue,
)
from strategies.queues.remote import shared_queue
from strategies.queues.shared_files import shared_files, shared_range

__all__ = [
    "FIFOQueue",
    "PaddingFIFOQueue",
    "PriorityQueue",
    "RandomShuffleQueue",
    "shared_files",
    "shared_queue",
    "shared_range",
]
