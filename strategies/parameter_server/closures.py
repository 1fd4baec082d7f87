"""State machine of scheduled closures.

A *closure* is a call to run on any worker. It is queued, in flight on a worker, or ended:

::

    put ---> queued ---- get ----> in flight ---- finished ----> ended with a value
               ^  \\                  |     \\
               |   `-- cancelled      |      `---- failed -----> ended with an error
               `----- put_back -------'

The first error cancels all queued closures. Once no closure is in flight, the next `put`, `wait` or
`done` raises the error, and the queue is usable again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from strategies.errors import CancelledError, DeadlineExceededError

__all__ = ["CAPACITY", "Closure", "ClosureQueue", "RemoteValue"]

CAPACITY = 1 << 18
"""Largest number of queued closures; about 100 MB of Python objects."""


class RemoteValue:
    """Result of a closure, available after a worker has run the call."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def __repr__(self) -> str:
        if not self.ready:
            return "RemoteValue(not ready)"
        error = self._future.exception()
        return f"RemoteValue({'ready' if error is None else repr(error)})"

    @property
    def ready(self) -> bool:
        """Whether `fetch` returns or raises at once."""
        return self._future.done()

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            Exception: error of the call.
            CancelledError: the call did not run, because another call failed or the coordinator was
                closed.
            DeadlineExceededError: the call did not finish in time.
        """
        # Not `Future.result(timeout)`, whose TimeoutError could also be an error of the call.
        if not concurrent.futures.wait([self._future], timeout).done:
            raise DeadlineExceededError(f"fetch: the call was not made within {timeout:g} s")
        return self._future.result()

    def set(self, value: Any) -> None:
        """Set the value; has no effect if there is a value or an error."""
        with contextlib.suppress(InvalidStateError):
            # A repeated call may end twice; the first end counts.
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set the error; has no effect if there is a value or an error."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)


class Closure:
    """A call to run on a worker.

    Args:
        call: runs the call on the worker with the given number and returns its value.

    Attributes:
        result: receives the value or error.
    """

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call
        self.result = RemoteValue()


class ClosureQueue:
    """Closures of one coordinator; thread-safe.

    Args:
        capacity: number of queued closures at which `put` waits.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        # Guards all attributes below.
        self._changed = threading.Condition()
        self._queued: deque[Closure] = deque()
        self._in_flight = 0
        self._error: BaseException | None = None
        self._closed: str | None = None
        self._stopped = False

    def put(self, closure: Closure, timeout: float | None = None) -> None:
        """Add a closure; wait while the queue is full.

        Raises:
            Exception: error of an earlier closure, raised once; this closure is not added.
            DeadlineExceededError: the queue stayed full.
            CancelledError: the queue is closed.
        """
        with self._changed:
            # Also wakes up for an error or a close, which are raised below.
            self._await(
                lambda: (
                    self._error is not None or self._stopped or len(self._queued) < self._capacity
                ),
                timeout,
                "schedule: the queue of calls is full",
            )
            self._raise_error(timeout, "schedule")
            if self._closed is not None:
                raise CancelledError(f"schedule: {self._closed}")
            self._queued.append(closure)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Closure | None:
        """Take the first closure; return None after `close` or `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._stopped, timeout)
            if not self._queued:  # timeout, or emptied by `close`
                return None
            self._in_flight += 1
            self._changed.notify_all()
            return self._queued.popleft()

    def put_back(self, closure: Closure) -> None:
        """Return an unfinished closure in flight to the front of the queue."""
        with self._changed:
            self._in_flight -= 1
            # After an error or `close`, unfinished closures are cancelled, not repeated.
            if self._error is not None or self._stopped:
                self._cancel(closure)
            else:
                # At the front, because it was scheduled before all others in the queue.
                self._queued.appendleft(closure)
            self._changed.notify_all()

    def finish(self, closure: Closure, value: Any) -> None:
        """End a closure in flight with a value."""
        with self._changed:
            self._in_flight -= 1
            closure.result.set(value)
            self._changed.notify_all()

    def fail(self, closure: Closure, error: BaseException) -> None:
        """End a closure in flight with an error, and cancel all queued closures."""
        with self._changed:
            self._in_flight -= 1
            closure.result.fail(error)
            self._record(error)

    def fail_all(self, error: BaseException) -> None:
        """Record an error without a closure, and cancel all queued closures."""
        with self._changed:
            self._record(error)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no closure is queued or in flight.

        Raises:
            Exception: first error of a closure, raised once.
            DeadlineExceededError: closures are unfinished after the timeout.
        """
        with self._changed:
            self._await(self._idle, timeout, "join: not all calls have been made")
            self._raise_error(timeout, "join")

    def done(self) -> bool:
        """Return whether no closure is queued or in flight.

        Raises:
            Exception: first error of a closure, raised once.
        """
        with self._changed:
            # Unlike `wait`, `done` never waits for calls in flight.
            if self._error is not None and not self._in_flight:
                self._raise_error(None, "done")
            return self._idle()

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self._stopped

    def close(self, why: str) -> None:
        """Cancel all queued closures; `get` returns None from now on."""
        with self._changed:
            # The first reason stays; later calls of `close` only follow from it.
            self._closed = self._closed or why
            self._stopped = True
            self._cancel_queued()
            self._changed.notify_all()

    def _idle(self) -> bool:
        return not self._queued and not self._in_flight

    def _record(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._cancel_queued()
        self._changed.notify_all()

    def _cancel_queued(self) -> None:
        while self._queued:
            self._cancel(self._queued.popleft())

    def _cancel(self, closure: Closure) -> None:
        why = self._closed or f"an earlier call failed: {self._error!r:.200}"
        closure.result.fail(CancelledError(f"the call was not made, since {why}"))

    def _raise_error(self, timeout: float | None, operation: str) -> None:
        """Raise the recorded error after all closures in flight have ended."""
        if self._error is None:
            return
        self._await(
            lambda: not self._in_flight, timeout, f"{operation}: calls in flight have not ended"
        )
        # Taken once, so the queue is usable again after the error was raised.
        error, self._error = self._error, None
        if error is not None:  # no other thread has raised it in the meantime
            raise error

    def _await(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not self._changed.wait_for(condition, timeout):
            raise DeadlineExceededError(f"{what} within {timeout:g} s")
