"""`QueueRunner`: threads that fill a queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from strategies.errors import OpError, OutOfRangeError
from strategies.input.coordinator import Coordinator
from strategies.queues.queue import RunnerStatus
from strategies.queues.queue_types import Queue
from strategies.rpc.wait_limits import current_settings, no_wait_limit

__all__ = ["QueueRunner", "start_queue_runners"]

_log = logging.getLogger(__name__)


class QueueRunner:
    """A queue and the functions that fill it, each called again and again in a thread of its own.

    When a function says that its source has ended, its thread ends, and the last thread closes the
    queue, after which `Coordinator.join` returns. Any other exception stops the coordinator, which
    raises it where the threads are joined.

    Args:
        queue: to fill.
        enqueue_ops: functions without arguments that put something in; one thread for each, so the
            same function may be listed several times.
        close_op: called by the last thread; `queue.close` if None.
        cancel_op: called when the coordinator stops; by default it closes the queue and cancels
            the enqueues that wait.
        queue_closed_exception_types: exceptions that say that the source has ended.

    Raises:
        ValueError: no queue, or no functions.
        TypeError: the exception types are not a tuple of `OpError` classes.

    Attributes:
        exceptions_raised: of threads that were started without a coordinator.
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
        self._status = RunnerStatus()
        queue.runners.append(self._status)

    @property
    def name(self) -> str:
        """Name of the queue."""
        return self.queue.name

    def create_threads(
        self, coord: Coordinator | None = None, *, daemon: bool = False, start: bool = False
    ) -> list[threading.Thread]:
        """Make one thread per enqueue function, and with a coordinator one that waits for its stop.

        Args:
            coord: gets the threads registered and exceptions reported.
            daemon: whether the process may end while they run.
            start: whether to start them, too.

        Returns:
            The threads; none if those of an earlier call have not ended.
        """
        with self._lock:
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
            if coord is not None:
                coord.register_thread(thread, waits_for_stop=index == len(self.enqueue_ops))
            if start:
                thread.start()
        return threads

    def _fill(
        self, enqueue: Callable[[], Any], coord: Coordinator | None, done: Callable[[], object]
    ) -> None:
        """Call a function, and `done` after it, until it or the coordinator stops the loop."""
        self._status.started = True
        ended = False
        try:
            with no_wait_limit():  # whoever is slow to take what is here does no wrong
                while coord is None or not coord.should_stop():
                    enqueue()
                    done()
        except self.queue_closed_exception_types:
            ended = True
        except BaseException as error:
            if coord is not None:
                coord.request_stop(error)
                return
            self.exceptions_raised.append(error)
            ended = True  # consumers must not wait for ever for a dead thread
            raise
        finally:
            with self._lock:
                self._running -= 1
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
            _log.info("QueueRunner: %s the queue: %s (queue: %s)", what, error, self.name)


class _EnqueueThread(threading.Thread):
    """A thread of a queue runner that counts its calls, so that `Coordinator.join` sees a stall."""

    def __init__(
        self,
        runner: QueueRunner,
        enqueue: Callable[[], Any],
        coord: Coordinator | None,
        name: str,
        daemon: bool,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._runner, self._enqueue, self._coord = runner, enqueue, coord
        self._calls = self._calls_before = 0  # calls that have ended: now, and at the last check

    def run(self) -> None:
        self._runner._fill(self._enqueue, self._coord, self._count_call)

    def _count_call(self) -> None:
        self._calls += 1

    def stall_reason(self) -> str | None:
        """Return why no call has ended since the last check; None if a call has."""
        before, self._calls_before = self._calls_before, self._calls
        if self._calls != before:
            return None
        queue, seconds = self._runner.queue, current_settings().stall_warning
        is_full = False
        with suppress(OpError):  # the task of a shared queue may be unreachable
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
    """Make, and start, the threads of several queue runners.

    Args:
        runners: to start; nothing else knows which there are.
        coord: as for `QueueRunner.create_threads`.
        daemon: whether the process may end while they run.
        start: whether to start them.

    Returns:
        All threads.
    """
    return [
        thread
        for runner in runners
        for thread in runner.create_threads(coord, daemon=daemon, start=start)
    ]
