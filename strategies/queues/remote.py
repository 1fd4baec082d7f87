"""The engine of a queue that is on another task: every attempt is a message there.

It offers what `engine.Engine` offers, so that a queue does not know the difference. The real engine
decides; here are only the attempts that wait for its answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from strategies.errors import CancelledError, OpError, UnavailableError
from strategies.queues.attempts import Attempt, Close, Dequeue, Enqueue
from strategies.remote.containers import Place
from strategies.remote.outgoing import Answer
from strategies.remote.service import Service

__all__ = ["RemoteEngine"]

_log = logging.getLogger(__name__)

# Seconds that the other task has to say whether an attempt that was withdrawn has succeeded after
# all. What it hands out later goes back.
_DECISION = 2.0


class RemoteEngine:
    """Attempts on a queue of another task.

    Args:
        service: reaches the other task.
        place: the queue.
    """

    def __init__(self, service: Service, place: Place) -> None:
        self._service = service
        self._place = place
        self._lock = threading.Lock()
        self._numbers: dict[Attempt, int] = {}  # of those that wait
        self._unwanted: set[Attempt] = set()  # what they bring has to go back

    def __len__(self) -> int:
        return int(self._service.request(self._place, "size").metadata["size"])

    @property
    def closed(self) -> bool:
        """Whether the queue is closed."""
        return bool(self._service.request(self._place, "is_closed").metadata["closed"])

    def submit(self, attempt: Attempt) -> bool:
        """Send an attempt on its way; return whether it has finished, which needs an answer."""
        if attempt.count == 0:
            self._finish(attempt)
            return True
        operation, arguments, values = _as_request(attempt)
        try:
            with self._lock:  # the answer may come before the number is noted
                self._numbers[attempt] = self._service.start(
                    self._place,
                    operation,
                    lambda answer: self._answered(attempt, answer),
                    arguments,
                    values,
                )
        except OpError as error:
            self._finish(attempt, error)
        return attempt.done

    def when_done(self, attempt: Attempt, on_done: Callable[[], None]) -> bool:
        """Set the callback of an attempt that waits; return False, unset, if it has finished."""
        with self._lock:
            if not attempt.done:
                attempt.on_done = on_done
            return not attempt.done

    def close_now(self) -> None:
        """Close and fail all that waits on the enqueue side; rows that are in stay."""
        self._service.request(self._place, "close_now")

    def cancel_pending(self) -> None:
        """Fail all that this task waits for."""
        with self._lock:
            waiting = list(self._numbers)
        # The last in the line first, so that none gets what another one gives back.
        for attempt in reversed(waiting):
            error = CancelledError(f"{self._place.name}: the operation was cancelled")
            self.withdraw(attempt, error)

    def withdraw(self, attempt: Attempt, error: OpError) -> bool:
        """End an attempt that waits, with `error`; what it had taken goes back.

        Returns:
            False if it had finished already, also if that was not known here.
        """
        asleep = threading.Lock()
        asleep.acquire()
        with self._lock:
            number = self._numbers.get(attempt)
            if attempt.done or number is None:
                return False
            told = attempt.on_done

            def wake() -> None:
                if told is not None:
                    told()
                asleep.release()

            attempt.on_done = wake
        self._service.withdraw(number, error)
        if not asleep.acquire(timeout=_DECISION) and self._service.disown(number):
            silent = UnavailableError(
                f"{error.message}; task {self._place.task} does not say whether it succeeded "
                f"after all, within {_DECISION:g} s"
            )
            self._finish(attempt, silent)
        return attempt.error is not None and attempt.error.code == error.code

    def abandon(self, attempt: Attempt) -> None:
        """End an attempt for which nobody waits any more, also if it has finished by now."""
        interrupted = CancelledError(f"{self._place.name}: the caller was interrupted")
        if isinstance(attempt, Enqueue):
            # The caller may change its arrays when this returns: they must have been sent by then.
            self.withdraw(attempt, interrupted)
            return
        with self._lock:
            number = self._numbers.get(attempt)
            if number is not None:
                self._unwanted.add(attempt)  # if its answer is just coming in
        if number is None:
            self._give_back(attempt)
        elif self._service.disown(number):
            self._finish(attempt, interrupted)

    def _answered(self, attempt: Attempt, answer: Answer) -> None:
        values = list(answer.values)
        if isinstance(attempt, Dequeue) and answer.error is None:
            if attempt.count is None:
                attempt.row = tuple(values)
            else:
                pieces = answer.metadata["pieces"]
                width = len(values) // max(pieces, 1)
                cuts = range(0, len(values), max(width, 1))
                attempt.pieces = [tuple(values[at : at + width]) for at in cuts]
                attempt.taken = sum(len(piece[0]) for piece in attempt.pieces)
        elif isinstance(attempt, Enqueue):
            failed = answer.error is not None
            attempt.entered = answer.metadata.get("entered", 0) if failed else attempt.count or 1
        self._finish(attempt, answer.error)

    def _finish(self, attempt: Attempt, error: OpError | None = None) -> None:
        with self._lock:
            self._numbers.pop(attempt, None)
            unwanted = attempt in self._unwanted
            self._unwanted.discard(attempt)
            attempt.error = error
            attempt.done = True
            on_done = attempt.on_done
        if unwanted:
            self._give_back(attempt)
        if on_done is not None:
            try:
                on_done()
            except Exception:
                # It belongs to another caller: the service's thread must not fail for it.
                _log.exception("queue: the callback of a finished attempt failed")

    def _give_back(self, attempt: Attempt) -> None:
        """Return rows that have come and that nobody will take."""
        if not isinstance(attempt, Dequeue) or not (attempt.row or attempt.pieces):
            return
        pieces = attempt.pieces or []
        values: list[Any] = [column for piece in pieces for column in piece] or list(attempt.row)
        attempt.row, attempt.pieces, attempt.taken = (), None, 0
        try:
            self._service.start(
                self._place, "give_back", lambda _: None, {"pieces": len(pieces)}, values
            )
        except OpError as error:
            _log.warning("queue: rows could not be given back: %s", error)


def _as_request(attempt: Attempt) -> tuple[str, dict[str, Any], list[Any]]:
    """Return operation, arguments and values."""
    if isinstance(attempt, Enqueue):
        return "enqueue", {"count": attempt.count}, list(attempt.rows)
    if isinstance(attempt, Dequeue):
        return "dequeue", {"count": attempt.count, "up_to": attempt.up_to}, []
    if isinstance(attempt, Close):
        return "close", {}, []
    raise TypeError(f"submit: no such attempt, got {type(attempt).__name__}")
