"""Sources of work for readers: file names, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from strategies.errors import OutOfRangeError
from strategies.input.queues import FIFOQueue
from strategies.input.runners import QueueRunner

__all__ = ["Producer", "string_input_producer"]


class Producer(NamedTuple):
    """A queue and the runner whose thread fills it; start the runner to get anything."""

    queue: FIFOQueue
    runner: QueueRunner


def string_input_producer(
    strings: Sequence[str],
    *,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    name: str = "input_producer",
) -> Producer:
    """Offer the strings, usually file names, in a queue, all of them in each epoch.

    Args:
        strings: what an epoch consists of.
        num_epochs: after so many epochs the queue is closed; None to go on for ever.
        shuffle: whether to shuffle the strings anew in each epoch; epochs are never mixed.
        seed: of the shuffling; None for a different order each time.
        capacity: of the queue.
        name: of the queue.

    Returns:
        The queue of single strings and its runner.

    Raises:
        ValueError: no strings, or `num_epochs` below 1.
    """
    work = np.empty(len(strings), object)
    work[:] = strings
    if isinstance(strings, str) or not len(work):
        raise ValueError(
            f"string_input_producer: expected a sequence of at least one string, got {strings!r}"
        )
    queue = FIFOQueue(capacity, str, [()], name=name)
    order = np.random.default_rng(seed)

    def enqueue_epoch() -> None:
        queue.enqueue_many((work[order.permutation(len(work))] if shuffle else work,))

    runner = QueueRunner(queue, [_limit_epochs(enqueue_epoch, num_epochs)])
    return Producer(queue, runner)


def _limit_epochs(function: Callable[[], None], num_epochs: int | None) -> Callable[[], None]:
    """The function, which after so many calls raises `OutOfRangeError` instead."""
    if num_epochs is None:
        return function
    if num_epochs < 1:
        raise ValueError(f"limit_epochs: num_epochs must be at least 1 or None, got {num_epochs}")
    left = num_epochs

    def limited() -> None:
        nonlocal left
        if not left:
            raise OutOfRangeError(f"limit_epochs: {num_epochs} epochs are over")
        left -= 1
        function()

    return limited
