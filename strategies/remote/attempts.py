"""Attempts on a thing of another task: each is a message there, and ends with the answer."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from strategies.errors import CancelledError, OpError
from strategies.remote.containers import Place, Work
from strategies.remote.outgoing import Answer
from strategies.remote.service import Service
from strategies.remote.waiting import Attempt, Waiting

__all__ = ["RemoteAttempts", "serve"]

A = TypeVar("A", bound=Attempt)


class RemoteAttempts(abc.ABC):
    """Makes attempts on a thing of another task.

    Args:
        service: reaches the other task.
        place: the thing.
    """

    def __init__(self, service: Service, place: Place) -> None:
        self.service = service
        self.place = place
        self._lock = threading.Lock()
        self._numbers: dict[Attempt, int] = {}  # of those that wait

    @abc.abstractmethod
    def request_of(self, attempt: Attempt) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values of an attempt's message."""

    @abc.abstractmethod
    def answered(self, attempt: Attempt, answer: Answer) -> None:
        """Note in an attempt what came of it.

        Raises:
            OpError: the answer cannot be read.
        """

    def submit(self, attempt: Attempt) -> None:
        """Send an attempt on its way."""
        operation, arguments, values = self.request_of(attempt)
        try:
            with self._lock:  # the answer may come before the number is noted
                self._numbers[attempt] = self.service.start(
                    self.place, operation, lambda a: self._take(attempt, a), arguments, values
                )
        except OpError as error:
            self._finish(attempt, error)

    def when_done(self, attempt: Attempt, on_done: Callable[[], None]) -> bool:
        """Set the callback of an attempt that waits."""
        with self._lock:
            if not attempt.done:
                attempt.on_done = on_done
            return not attempt.done

    def withdraw(self, attempt: Attempt, error: OpError) -> None:
        """Ask that an attempt ends; its end still comes."""
        with self._lock:
            number = self._numbers.get(attempt)
        if number is not None:
            self.service.withdraw(number, error)

    def abandon(self, attempt: Attempt) -> None:
        """End an attempt for which nobody waits any more."""
        with self._lock:
            number = self._numbers.get(attempt)
        if number is not None and self.service.disown(number):
            error = CancelledError(f"{self.place.name}: the caller was interrupted")
            self._finish(attempt, error)

    def cancel_pending(self) -> None:
        """Fail all that this task waits for."""
        with self._lock:
            waiting = list(self._numbers)
        for attempt in reversed(waiting):
            error = CancelledError(f"{self.place.name}: the operation was cancelled")
            self.withdraw(attempt, error)

    def _take(self, attempt: Attempt, answer: Answer) -> None:
        error = answer.error
        if error is None:
            try:
                self.answered(attempt, answer)
            except OpError as damaged:
                error = damaged
        self._finish(attempt, error)

    def _finish(self, attempt: Attempt, error: OpError | None) -> None:
        with self._lock:
            self._numbers.pop(attempt, None)
            if attempt.done:
                return
            attempt.settle(error)
        attempt.tell()


def serve(where: Waiting, attempt: A, work: Work, reply: Callable[[A], None]) -> None:
    """Make an attempt for another task, and answer when it has finished.

    Args:
        where: the thing, on this task.
        attempt: a new one.
        work: the request.
        reply: answers with what came of it.
    """
    work.wait(lambda error: where.withdraw(attempt, error), lambda: where.abandon(attempt))

    def answer() -> None:
        attempt.on_done = None  # else arrays live until the garbage collector finds the circle
        if attempt.error is not None:
            work.fail(attempt.error)
        else:
            reply(attempt)

    attempt.on_done = answer
    where.submit(attempt)
