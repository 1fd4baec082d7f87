"""Queues of typed elements: four kinds, one state machine, here or on another task."""

from __future__ import annotations

from strategies.queues.files import shared_files, shared_range
from strategies.queues.kinds import FIFOQueue, PaddingFIFOQueue, PriorityQueue, RandomShuffleQueue
from strategies.queues.remote import shared_queue

__all__ = [
    "FIFOQueue",
    "PaddingFIFOQueue",
    "PriorityQueue",
    "RandomShuffleQueue",
    "shared_files",
    "shared_queue",
    "shared_range",
]
