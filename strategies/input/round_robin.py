"""Parallel reader threads with a deterministic order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strategies.core.validation import integer
from strategies.errors import CancelledError, OutOfRangeError

if TYPE_CHECKING:
    from strategies.queues.queue import Queue

__all__ = ["RoundRobinNames", "ReaderRoundRobin"]


class ReaderRoundRobin:
    """Turns of the threads of one pipeline, round robin.

    Threads read and decode concurrently. They take turns only where the order of the rows is
    decided: when they take the next file, and when they hand over their rows.

    Args:
        count: number of threads.

    Raises:
        ValueError: `count` below 1.
    """

    def __init__(self, count: int) -> None:
        integer("ReaderRoundRobin", "count", count)
        self.count = count
        # The first element is the thread whose turn it is.
        self._order = deque(range(count))
        self._changed = threading.Condition()
        self._begun = self._stopped = False

    def begin(self) -> None:
        """Enforce turns from now on; before, only one thread is active."""
        # Without a lock, because the threads start later.
        self._begun = True

    def hand_over(
        self, place: int, read: Callable[[], Any], enqueue: Callable[[Any], None]
    ) -> None:
        """Read at any time, then enqueue the values in turn; leave at the end of the input.

        Raises:
            OutOfRangeError: raised by `read`; the thread has left.
            CancelledError: the pipeline has stopped.
        """
        try:
            # Reading needs no turn, so files are decoded in parallel.
            values = read()
        except OutOfRangeError:
            self.leave(place)
            raise
        # Waits with rows in hand, so that the turn itself is short.
        self.wait(place)
        enqueue(values)
        # After an error the turn is not passed on: the pipeline stops anyway.
        self.pass_on()

    def wait(self, place: int) -> None:
        """Wait for the turn of a thread.

        Raises:
            CancelledError: the pipeline has stopped.
        """
        with self._changed:
            # `_begun` in the condition: the first read happens in the opener's thread.
            self._changed.wait_for(
                lambda: self._stopped or not self._begun or self._order[0] == place
            )
            if self._stopped:
                raise CancelledError("batch: the pipeline has stopped")

    def pass_on(self) -> None:
        """End the current turn."""
        with self._changed:
            if self._begun:
                self._order.rotate(-1)
                self._changed.notify_all()

    def leave(self, place: int) -> None:
        """Wait for the turn of a thread, then remove the thread from the round."""
        # In its turn, so that the order of the remaining threads is the same in each run.
        self.wait(place)
        with self._changed:
            self._order.remove(place)
            self._changed.notify_all()

    def stop(self) -> None:
        """Cancel all current and later waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class RoundRobinNames:
    """A queue of file names that one of several readers uses in its turn."""

    def __init__(self, queue: Queue, turns: ReaderRoundRobin, place: int) -> None:
        self._queue, self._turns, self._place = queue, turns, place
        self.dtypes, self.names = queue.dtypes, queue.names
        self.shapes, self.name = queue.shapes, queue.name

    def dequeue(self) -> Any:
        """Return the next name in a separate turn, so that the file does not delay other threads.

        Raises:
            OpError: as from the queue; the thread keeps its turn and leaves or fails in it.
        """
        self._turns.wait(self._place)
        name = self._queue.dequeue()
        # A turn of its own: all readers take one file each before one takes a second.
        self._turns.pass_on()
        return name
