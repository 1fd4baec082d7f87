"""State machine of scheduled closures.

A *closure* is a call that some worker is to make. It is queued, in flight at a worker, or ended:

::

    put ---> queued ---- get ----> in flight ---- finished ----> ended with a value
               ^  \\                  |     \\
               |   `-- cancelled      |      `---- failed -----> ended with an error
               `----- put_back -------'

The first error cancels what is queued. When nothing is in flight any more it is raised, once, by
whoever calls `put`, `wait` or `done` next; then all is as if new.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from strategies.errors import CancelledError, DeadlineExceededError

__all__ = ["CAPACITY", "Closure", "ClosureQueue", "RemoteValue"]

CAPACITY = 1 << 18
"""Closures that may be queued; about 100 MB of Python objects."""


class RemoteValue:
    """What a closure returns, once a worker has made the call."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        if not self._ended.is_set():
            return "RemoteValue(not ready)"
        return f"RemoteValue({'ready' if self._error is None else repr(self._error)})"

    @property
    def ready(self) -> bool:
        """Whether `fetch` returns or raises at once."""
        return self._ended.is_set()

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it.

        Args:
            timeout: seconds to wait; None for any time.

        Raises:
            Exception: what the call raised.
            CancelledError: it was not made, because another one failed or the coordinator closed.
            DeadlineExceededError: it has not been made in time.
        """
        if not self._ended.wait(timeout):
            raise DeadlineExceededError(f"fetch: the call was not made within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._value

    def set(self, value: Any) -> None:
        """End with a value; does nothing after the end."""
        if not self._ended.is_set():
            self._value = value
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End with an error; does nothing after the end."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


class Closure:
    """A call that a worker is to make.

    Args:
        call: makes it on the worker with the given number; returns its value.

    Attributes:
        result: where its value or error goes.
    """

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call
        self.result = RemoteValue()


class ClosureQueue:
    """Closures of one coordinator; usable from any thread.

    Args:
        capacity: how many may be queued before `put` waits.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._queued: deque[Closure] = deque()
        self._in_flight = 0
        self._error: BaseException | None = None
        self._closed: str | None = None
        self._stopped = False

    def put(self, closure: Closure, timeout: float | None = None) -> None:
        """Add a closure; waits while the queue is full.

        Raises:
            Exception: an earlier closure's error, once; this one is not added.
            DeadlineExceededError: the queue stayed full.
            CancelledError: it is closed.
        """
        with self._changed:
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
        """Take the first closure; None after `close` or `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._stopped, timeout)
            if not self._queued:  # which a close has emptied
                return None
            self._in_flight += 1
            self._changed.notify_all()
            return self._queued.popleft()

    def put_back(self, closure: Closure) -> None:
        """Take back a closure in flight that its worker cannot finish; it comes first again."""
        with self._changed:
            self._in_flight -= 1
            if self._error is not None or self._stopped:
                self._cancel(closure)
            else:
                self._queued.appendleft(closure)
            self._changed.notify_all()

    def finish(self, closure: Closure, value: Any) -> None:
        """End a closure in flight with a value."""
        with self._changed:
            self._in_flight -= 1
            closure.result.set(value)
            self._changed.notify_all()

    def fail(self, closure: Closure, error: BaseException) -> None:
        """End a closure in flight with an error, and cancel what is queued."""
        with self._changed:
            self._in_flight -= 1
            closure.result.fail(error)
            self._record(error)

    def fail_all(self, error: BaseException) -> None:
        """Note an error that belongs to no closure, and cancel what is queued."""
        with self._changed:
            self._record(error)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is queued or in flight.

        Raises:
            Exception: the first error of a closure, once.
            DeadlineExceededError: there is still something.
        """
        with self._changed:
            self._await(self._idle, timeout, "join: not all calls have been made")
            self._raise_error(timeout, "join")

    def done(self) -> bool:
        """Tell whether nothing is queued or in flight.

        Raises:
            Exception: the first error of a closure, once.
        """
        with self._changed:
            if self._error is not None and not self._in_flight:
                self._raise_error(None, "done")
            return self._idle()

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._stopped

    def close(self, why: str) -> None:
        """Cancel what is queued, and let `get` return None from now on."""
        with self._changed:
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
        """Raise the error that there is, when nothing is in flight any more."""
        if self._error is None:
            return
        self._await(
            lambda: not self._in_flight, timeout, f"{operation}: calls in flight have not ended"
        )
        error, self._error = self._error, None
        if error is not None:  # nobody else has raised it meanwhile
            raise error

    def _await(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not self._changed.wait_for(condition, timeout):
            raise DeadlineExceededError(f"{what} within {timeout:g} s")
