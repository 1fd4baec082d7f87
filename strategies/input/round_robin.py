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
    """Whose turn it is among the threads of a pipeline, round and round; for one pipeline.

    Threads read and decode at the same time. Only what decides the order of the rows, taking the
    next file and handing over what was read, each does in its turn.

    Args:
        count: threads.

    Raises:
        ValueError: `count` below 1.
    """

    def __init__(self, count: int) -> None:
        integer("ReaderRoundRobin", "count", count)
        self.count = count
        self._order = deque(range(count))
        self._changed = threading.Condition()
        self._begun = self._stopped = False

    def begin(self) -> None:
        """Let turns count from now on; before, one thread does all that is done."""
        self._begun = True

    def hand_over(
        self, place: int, read: Callable[[], Any], enqueue: Callable[[Any], None]
    ) -> None:
        """Read at any time, and put in what was read, or leave at the end, in turn.

        Raises:
            OutOfRangeError: from `read`, when the thread has left.
            CancelledError: the pipeline stops.
        """
        try:
            values = read()
        except OutOfRangeError:
            self.leave(place)
            raise
        self.wait(place)
        enqueue(values)
        self.pass_on()

    def wait(self, place: int) -> None:
        """Return when it is the turn of a thread.

        Raises:
            CancelledError: the pipeline stops.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or not self._begun or self._order[0] == place
            )
            if self._stopped:
                raise CancelledError("batch: the pipeline has stopped")

    def pass_on(self) -> None:
        """End the turn of the thread whose turn it is."""
        with self._changed:
            if self._begun:
                self._order.rotate(-1)
                self._changed.notify_all()

    def leave(self, place: int) -> None:
        """Take a thread that has nothing more out of the round, in its turn."""
        self.wait(place)
        with self._changed:
            self._order.remove(place)
            self._changed.notify_all()

    def stop(self) -> None:
        """End all that waits, and all that would."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class RoundRobinNames:
    """The file names of a queue, which one of several readers takes in its turn."""

    def __init__(self, queue: Queue, turns: ReaderRoundRobin, place: int) -> None:
        self._queue, self._turns, self._place = queue, turns, place
        self.dtypes, self.names = queue.dtypes, queue.names
        self.shapes, self.name = queue.shapes, queue.name

    def dequeue(self) -> Any:
        """Return the next name; a turn of its own, so that the others need not wait for the file.

        Raises:
            OpError: as from the queue; the thread then keeps its turn, and leaves or fails in it.
        """
        self._turns.wait(self._place)
        name = self._queue.dequeue()
        self._turns.pass_on()
        return name
