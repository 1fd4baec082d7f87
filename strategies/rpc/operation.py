"""Operations that may wait, as state machines that need no thread.

An attempt is submitted to its owner. An owner on this task, such as the state machine of a queue,
finishes the attempt in whichever thread makes that possible. For an owner on another task there is
a `RemoteAttempts`, which sends the attempt there, where `serve` submits it to the owner::

    caller            this task                      other task

    perform(attempt) -> RemoteAttempts -- request --> serve -> owner
                                                                 |  waits, holds no thread
    wakes up        <- settle, tell   <-- answer --- reply   <- on_done
"""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from strategies.errors import CancelledError, DeadlineExceededError, OpError, UnavailableError
from strategies.rpc import client
from strategies.rpc.client import Reply
from strategies.rpc.registry import Address
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service
from strategies.rpc.wait_limits import current_settings, wait_limit

__all__ = ["PendingOperation", "RemoteAttempts", "OperationOwner", "finish", "perform", "serve"]

_log = logging.getLogger(__name__)


class PendingOperation:
    """One operation, waiting or finished.

    Attributes:
        on_done: called once without arguments when it has finished, also if that is inside
            `submit`. Runs in any thread, holds no lock of the owner, must not block.
        done: whether it has finished; the others are then final.
        error: why it did not succeed, or None.
        count: of how many things it is, such as rows of a queue; None for a single one.
        entered: how many of these were done, also before an error, if they are done one by one.
    """

    on_done: Callable[[], None] | None = None
    done = False
    error: OpError | None = None
    count: int | None = None
    entered = 0

    def call_when_done(self, on_done: Callable[[], None]) -> bool:
        """Set the callback while the attempt waits, and tell whether it does; the lock is held."""
        if not self.done:
            self.on_done = on_done
        return not self.done

    def complete(self, error: OpError | None = None) -> None:
        """Note the end; the lock of the owner is held."""
        self.error = error
        self.done = True  # last: who sees it without the lock may use the others

    def notify(self) -> None:
        """Wake whoever waits; no lock is held, as a callback may come back."""
        if self.on_done is not None:
            try:
                self.on_done()
            except Exception:
                # It belongs to another caller: this thread must not fail for it.
                _log.exception("the callback of a finished attempt failed")


A = TypeVar("A", bound=PendingOperation)


class OperationOwner(Protocol):
    """Where attempts are made: a thing on this task, or its counterpart for another task.

    Attributes:
        _lock: held while an attempt is changed.
    """

    _lock: threading.Lock

    def submit(self, attempt: PendingOperation) -> None:
        """Let an attempt run, now or when its turn comes; `on_done` follows."""

    def when_done(self, attempt: PendingOperation, on_done: Callable[[], None]) -> bool:
        """Set the callback of an attempt that waits; return False, unset, if it has finished."""
        with self._lock:
            return attempt.call_when_done(on_done)

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End an attempt that waits, with `error`; nothing if it has finished."""

    def abandon(self, attempt: PendingOperation) -> None:
        """End an attempt for which nobody waits any more; what it has taken goes back."""


StallReason = Callable[[str], str | None]


def perform(
    where: OperationOwner,
    attempt: PendingOperation,
    operation: str,
    timeout: float | None,
    context: str = "",
    stall_reason: StallReason | None = None,
) -> None:
    """Run an attempt to its end; sleep if it must wait, but not past the deadline.

    Args:
        where: the thing that it concerns.
        attempt: a new one.
        operation: beginning of a message.
        timeout: in seconds; None for that of `UNISONO_WAIT_LIMIT`, or any time without.
        context: end of a message.
        stall_reason: called with the operation after each `UNISONO_STALL_WARNING` seconds; returns
            why it may be waiting, for one warning in the log, or None to log nothing yet.

    Raises:
        DeadlineExceededError: it has not finished after `timeout` seconds.
        OpError: the attempt's error.
        ValueError: the timeout is negative or not a number.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"{operation}: timeout must be seconds >= 0 or None, got {timeout}")
    where.submit(attempt)
    if not attempt.done:
        finish(where, attempt, operation, wait_limit(timeout), context, stall_reason)
    elif attempt.error is not None:
        raise attempt.error


def finish(
    where: OperationOwner,
    attempt: PendingOperation,
    operation: str,
    timeout: float | None = None,
    context: str = "",
    stall_reason: StallReason | None = None,
) -> None:
    """As `perform`, for an attempt that was submitted before."""
    asleep = threading.Lock()
    asleep.acquire()
    try:
        if where.when_done(attempt, asleep.release):
            limit = math.inf if timeout is None else timeout
            if not _await_release(asleep, operation, limit, context, stall_reason):
                late = f"{operation}: not finished after {timeout} s{context}"
                where.withdraw(attempt, DeadlineExceededError(late))
                if not asleep.acquire(timeout=client.DECISION):
                    silent = f"{late}; its task does not say whether it succeeded after all"
                    raise UnavailableError(silent)
    except BaseException:
        # Also an interrupt: the attempt must not take what nobody would receive.
        where.abandon(attempt)
        raise
    if attempt.error is not None:
        raise attempt.error


def _await_release(
    asleep: threading.Lock,
    operation: str,
    limit: float,
    context: str,
    stall_reason: StallReason | None,
) -> bool:
    """Wait at most `limit` seconds for the release of a lock; return whether it was released."""
    if stall_reason is not None:
        pause = current_settings().stall_warning
        waited = 0.0
        while waited + pause < limit:
            if asleep.acquire(timeout=min(pause, threading.TIMEOUT_MAX)):
                return True
            waited += pause
            why = stall_reason(operation)
            if why is not None:
                _log.warning("%s has waited %g s: %s%s", operation, waited, why, context)
                break
        limit -= waited
    return asleep.acquire(timeout=-1 if limit == math.inf else min(limit, threading.TIMEOUT_MAX))


class _Sent(NamedTuple):
    """The message of an attempt that waits: its number, and whether arrays travel with it."""

    number: int
    carries: bool


class RemoteAttempts(OperationOwner):
    """Makes attempts on a thing of another task.

    Args:
        service: reaches the other task.
        address: the thing.
    """

    def __init__(self, service: Service, address: Address) -> None:
        self.service = service
        self.address = address
        self._lock = threading.Lock()
        self._sent: dict[PendingOperation, _Sent] = {}  # those that wait
        self._unwanted: set[PendingOperation] = set()  # what they bring has to go back

    @abc.abstractmethod
    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values of an attempt's message."""

    @abc.abstractmethod
    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        """Note in an attempt what came of it, if it has succeeded.

        Raises:
            OpError: the answer cannot be read.
        """

    def give_back(self, attempt: PendingOperation) -> None:  # noqa: B027 (most bring nothing)
        """Return what an attempt has brought and nobody will take, if that is possible."""

    def submit(self, attempt: PendingOperation) -> None:
        """Send an attempt on its way."""
        operation, arguments, values = self.request_of(attempt)
        try:
            with self._lock:  # the answer may come before the number is noted
                number = self.service.start(
                    self.address, operation, lambda a: self._take(attempt, a), arguments, values
                )
                self._sent[attempt] = _Sent(number, bool(values))
        except OpError as error:
            self._finish(attempt, error)

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """Ask that an attempt ends; its end still comes."""
        with self._lock:
            sent = self._sent.get(attempt)
        if sent is not None:
            self.service.withdraw(sent.number, error)

    def abandon(self, attempt: PendingOperation) -> None:
        """End an attempt for which nobody waits any more, also if it has finished by now."""
        interrupted = CancelledError(f"{self.address.name}: the caller was interrupted")
        with self._lock:
            sent = self._sent.get(attempt)
            if sent is not None:
                self._unwanted.add(attempt)  # if its answer is just coming in
        if sent is None:
            self.give_back(attempt)
            return
        if sent.carries:
            # The caller may change its arrays when this returns: they must have left by then.
            self._end(attempt, sent.number, interrupted)
        if self.service.disown(sent.number):
            self._finish(attempt, interrupted)

    def cancel_pending(self) -> None:
        """Fail all that this task waits for."""
        with self._lock:
            waiting = list(self._sent)
        # The last in the line first, so that none gets what another one gives back.
        for attempt in reversed(waiting):
            error = CancelledError(f"{self.address.name}: the operation was cancelled")
            self.withdraw(attempt, error)

    def _end(self, attempt: PendingOperation, number: int, error: OpError) -> None:
        """Let an attempt end with an error, and wait for that, but not for long."""
        ended, told = threading.Event(), attempt.on_done

        def wake() -> None:
            ended.set()
            if told is not None:
                told()

        if self.when_done(attempt, wake):
            self.service.withdraw(number, error)
            ended.wait(client.DECISION)

    def _take(self, attempt: PendingOperation, answer: Reply) -> None:
        error = answer.error
        try:
            if error is None:
                self.answered(attempt, answer)
            else:
                attempt.entered = answer.metadata.get("entered", 0)
        except OpError as damaged:
            error = damaged
        self._finish(attempt, error)

    def _finish(self, attempt: PendingOperation, error: OpError | None) -> None:
        with self._lock:
            self._sent.pop(attempt, None)
            unwanted = attempt in self._unwanted
            self._unwanted.discard(attempt)
            if attempt.done:
                return
            attempt.complete(error)
        if unwanted:
            self.give_back(attempt)
        attempt.notify()


def serve(
    where: OperationOwner, attempt: A, work: ServerRequest, reply: Callable[[A], None]
) -> None:
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
            work.fail(attempt.error, entered=attempt.entered)
        else:
            reply(attempt)

    attempt.on_done = answer
    where.submit(attempt)
