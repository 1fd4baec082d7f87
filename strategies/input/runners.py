"""`QueueRunner`: threads that fill a queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from strategies.errors import OpError, OutOfRangeError
from strategies.input.coordinator import Coordinator
from strategies.queues.queue_types import Queue
from strategies.rpc.wait_limits import current_settings, no_wait_limit

__all__ = ["QueueRunner", "start_queue_runners"]

_log = logging.getLogger(__name__)


class QueueRunner:
    """A queue, and functions that fill it, each called repeatedly in its own thread.

    When a function raises one of `queue_closed_exception_types`, its source is exhausted and its
    thread ends. The last thread closes the queue; `Coordinator.join` then returns. Any other
    exception stops the coordinator and is raised by `Coordinator.join`.

    Args:
        queue: queue to fill.
        enqueue_ops: functions without arguments that enqueue elements, one thread each. The same
            function may occur several times.
        close_op: called by the last thread; None for `queue.close`.
        cancel_op: called when the coordinator stops; None closes the queue and cancels waiting
            enqueues.
        queue_closed_exception_types: exceptions that mean that the source is exhausted.

    Raises:
        ValueError: the queue is None, or no function is given.
        TypeError: the exception types are not a tuple of `OpError` classes.

    Attributes:
        exceptions_raised: exceptions of threads that were started without a coordinator.
    """

    def __init__(
        self,
        queue: Queue,
        enqueue_ops: Sequence[Callable[[], Any]],
        *,
        close_op: Callable[[], Any] | None = None,
        cancel_op: Callable[[], Any] | None = None,
        queue_closed_exception_types: tuple[type[OpError], ...] = (OutOfRangeError,),
    ) -> None:
        if queue is None or not enqueue_ops:
            raise ValueError("QueueRunner: expected a queue and at least one enqueue op")
        types = queue_closed_exception_types
        if (
            not isinstance(types, tuple)
            or not types
            or not all(isinstance(kind, type) and issubclass(kind, OpError) for kind in types)
        ):
            raise TypeError(
                "QueueRunner: queue_closed_exception_types must be a tuple of OpError classes, "
                f"not empty, got {types!r}"
            )
        self.queue = queue
        self.enqueue_ops = tuple(enqueue_ops)
        self.queue_closed_exception_types = types
        self.exceptions_raised: list[BaseException] = []
        self._close_op = close_op or queue.close
        self._cancel_op = cancel_op or (lambda: queue.close(cancel_pending_enqueues=True))
        self._lock = threading.Lock()
        self._running = 0  # threads that have not ended
        self._started = threading.Event()
        # The queue knows its runners, so that a consumer's error can say that none was started.
        queue.runners.append(self._started)

    @property
    def name(self) -> str:
        """Name of the queue."""
        return self.queue.name

    def create_threads(
        self, coord: Coordinator | None = None, *, daemon: bool = False, start: bool = False
    ) -> list[threading.Thread]:
        """Create a thread per enqueue function; with a coordinator, one more to wait for its stop.

        Args:
            coord: coordinator that registers the threads and receives exceptions.
            daemon: whether the process may exit while the threads run.
            start: whether to start the threads.

        Returns:
            The threads; empty while threads of an earlier call are running.
        """
        with self._lock:
            # A second start would enqueue everything twice.
            if self._running:
                _log.warning("QueueRunner: threads are running already (queue: %s)", self.name)
                return []
            self._running = len(self.enqueue_ops)
            self.exceptions_raised = []
            threads: list[threading.Thread] = [
                _EnqueueThread(
                    self, enqueue, coord, f"QueueRunnerThread-{self.name}-{index}", daemon
                )
                for index, enqueue in enumerate(self.enqueue_ops)
            ]
            # Waits for the stop and then cancels: the enqueue threads may be blocked in the queue.
            if coord is not None:
                threads.append(
                    threading.Thread(
                        target=self._cancel_on_stop,
                        args=(coord,),
                        name=f"QueueRunnerThread-{self.name}-close_on_stop",
                        daemon=daemon,
                    )
                )
        for index, thread in enumerate(threads):
            # Registered before they start: `join` must not miss a thread that ends at once.
            if coord is not None:
                coord.register_thread(thread, waits_for_stop=index == len(self.enqueue_ops))
            if start:
                thread.start()
        return threads

    def _fill(self, thread: _EnqueueThread, coord: Coordinator | None) -> None:
        """Call a thread's function in a loop, until the source or the coordinator ends it."""
        # For consumers: threads have started, so an empty queue is a matter of time.
        self._started.set()
        ended = False
        try:
            with no_wait_limit():  # a slow consumer is not an error
                while coord is None or not coord.should_stop():
                    thread.enqueue()
                    thread.calls += 1
        except self.queue_closed_exception_types:
            # The source is exhausted: a normal end.
            ended = True
        except BaseException as error:
            if coord is not None:
                coord.request_stop(error)
                return
            self.exceptions_raised.append(error)
            ended = True  # closes the queue: consumers must not wait for a dead thread
            raise
        finally:
            with self._lock:
                self._running -= 1
                # The last thread closes the queue, so that consumers take the rest and end.
                last = not self._running
            if last and ended:
                self._end("closing", self._close_op)

    def _cancel_on_stop(self, coord: Coordinator) -> None:
        coord.wait_for_stop()
        self._end("cancelling", self._cancel_op)

    def _end(self, what: str, op: Callable[[], Any]) -> None:
        try:
            op()
        except Exception as error:
            # The queue may be closed already, or its task gone; nothing depends on it any more.
            _log.info("QueueRunner: %s the queue: %s (queue: %s)", what, error, self.name)


class _EnqueueThread(threading.Thread):
    """Thread of a queue runner; counts its calls, so that `Coordinator.join` detects a stall."""

    def __init__(
        self,
        runner: QueueRunner,
        enqueue: Callable[[], Any],
        coord: Coordinator | None,
        name: str,
        daemon: bool,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._runner, self.enqueue, self._coord = runner, enqueue, coord
        self.calls = self._calls_before = 0  # finished calls: now, and at the last check

    def run(self) -> None:
        self._runner._fill(self, self._coord)

    def stall_reason(self) -> str | None:
        """Return why no call has finished since the last check; None if one has."""
        # Counters without a lock: a stale value only delays the warning.
        before, self._calls_before = self._calls_before, self.calls
        if self.calls != before:
            return None
        queue, seconds = self._runner.queue, current_settings().stall_warning
        is_full = False
        with suppress(OpError):  # the task of a shared queue may be unreachable
            # The size distinguishes a slow consumer from a slow source.
            is_full = 0 <= queue.capacity <= queue.size()
        why = "nothing is taken out of the full queue" if is_full else "its source gives nothing"
        return f"QueueRunner has put nothing into {queue.name!r} for {seconds:g} s: {why}"


def start_queue_runners(
    runners: Iterable[QueueRunner],
    coord: Coordinator | None = None,
    *,
    daemon: bool = True,
    start: bool = True,
) -> list[threading.Thread]:
    """Create and start the threads of several queue runners.

    Args:
        runners: queue runners; no global list exists.
        coord: see `QueueRunner.create_threads`.
        daemon: whether the process may exit while the threads run.
        start: whether to start the threads.

    Returns:
        All threads.
    """
    return [
        thread
        for runner in runners
        for thread in runner.create_threads(coord, daemon=daemon, start=start)
    ]
