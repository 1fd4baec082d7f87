"""Operations that may have to wait, each a thing of its own, so that waiting needs no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from strategies.errors import DeadlineExceededError, OpError, UnavailableError

__all__ = ["Attempt", "Waiting", "finish", "perform"]

# Seconds that another task has to say whether what was withdrawn has succeeded after all.
_DECISION = 2.0


class Attempt:
    """One operation, waiting or finished.

    Attributes:
        on_done: called once without arguments when it has finished, in any thread; must not block.
        done: whether it has finished; the others are then final.
        error: why it did not succeed, or None.
    """

    on_done: Callable[[], None] | None = None
    done = False
    error: OpError | None = None

    def settle(self, error: OpError | None = None) -> None:
        """Note the end; the lock that `when_done` takes is held."""
        self.error = error
        self.done = True

    def tell(self) -> None:
        """Wake whoever waits; no lock is held."""
        if self.on_done is not None:
            self.on_done()


class Waiting(Protocol):
    """Where attempts are made: a thing on this task, or its counterpart for another task."""

    def submit(self, attempt: Attempt) -> None:
        """Let an attempt run, now or when its turn comes; `on_done` follows."""

    def when_done(self, attempt: Attempt, on_done: Callable[[], None]) -> bool:
        """Set the callback of an attempt that waits; return False, unset, if it has finished."""

    def withdraw(self, attempt: Attempt, error: OpError) -> None:
        """End an attempt that waits, with `error`; nothing if it has finished."""

    def abandon(self, attempt: Attempt) -> None:
        """End an attempt for which nobody waits any more; what it has taken goes back."""


def perform(where: Waiting, attempt: Attempt, operation: str, timeout: float | None) -> None:
    """Run an attempt to its end; sleep if it must wait, but not past the deadline.

    Raises:
        DeadlineExceededError: the take has not got enough after `timeout` seconds.
        OpError: the attempt's error.
        ValueError: the timeout is no time.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"{operation}: timeout must be seconds >= 0 or None, got {timeout}")
    where.submit(attempt)
    finish(where, attempt, operation, timeout)


def finish(where: Waiting, attempt: Attempt, operation: str, timeout: float | None = None) -> None:
    """As `perform`, for an attempt that was submitted before."""
    asleep = threading.Lock()
    asleep.acquire()
    try:
        if where.when_done(attempt, asleep.release):
            _sleep(where, attempt, asleep, operation, timeout)
    except BaseException:
        where.abandon(attempt)
        raise
    if attempt.error is not None:
        raise attempt.error


def _sleep(
    where: Waiting, attempt: Attempt, asleep: Any, operation: str, timeout: float | None
) -> None:
    if timeout is None:
        asleep.acquire()
    elif not asleep.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
        late = f"{operation}: not finished after {timeout} s"
        where.withdraw(attempt, DeadlineExceededError(late))
        if not asleep.acquire(timeout=_DECISION):
            raise UnavailableError(f"{late}; its task does not say whether it succeeded after all")
