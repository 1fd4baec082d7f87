"""Operations that may wait, as state machines that need no thread.

An attempt is submitted to its owner. A local owner, such as the state machine of a queue, finishes
the attempt in the thread that makes it possible. A remote owner is represented by
`RemoteAttempts`, which sends the attempt to the owner's task; there `serve` submits it::

    caller            this task                      other task

    perform(attempt) -> RemoteAttempts -- request --> serve -> owner
                                                                 |  waits, holds no thread
    wakes up        <- complete, notify <-- reply -- reply   <- on_done
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
    """An operation that is waiting or finished.

    Attributes:
        on_done: called once without arguments on completion, possibly inside `submit`. Runs in any
            thread without the owner's lock, and must not block.
        done: whether the operation has finished; the other attributes are final then.
        error: reason of the failure, or None.
        count: number of items, such as rows of a queue; None for a single item.
        entered: number of items processed, also before an error, if they are processed one by one.
    """

    on_done: Callable[[], None] | None = None
    done = False
    error: OpError | None = None
    count: int | None = None
    entered = 0

    def call_when_done(self, on_done: Callable[[], None]) -> bool:
        """Set the callback if the operation is waiting; return whether it is. The lock is held."""
        if not self.done:
            self.on_done = on_done
        return not self.done

    def complete(self, error: OpError | None = None) -> None:
        """Record the end of the operation; the owner's lock is held."""
        self.error = error
        self.done = True  # last: readers without the lock rely on the other attributes

    def notify(self) -> None:
        """Call the callback; no lock is held, because the callback may call the owner."""
        if self.on_done is not None:
            try:
                self.on_done()
            except Exception:
                # The callback belongs to another caller, so its error must not end this thread.
                _log.exception("the callback of a finished attempt failed")


A = TypeVar("A", bound=PendingOperation)


class OperationOwner(Protocol):
    """Executes operations: an object on this task, or the proxy of an object on another task.

    Attributes:
        _lock: protects the state of the operations.
    """

    _lock: threading.Lock

    def submit(self, attempt: PendingOperation) -> None:
        """Run an operation now or when its turn comes; `on_done` follows."""

    def when_done(self, attempt: PendingOperation, on_done: Callable[[], None]) -> bool:
        """Set the callback of a waiting operation; return False without setting it if finished."""
        with self._lock:
            return attempt.call_when_done(on_done)

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End a waiting operation with `error`; no effect if it has finished."""

    def abandon(self, attempt: PendingOperation) -> None:
        """End an operation without a caller, and return the items that it took."""


StallReason = Callable[[str], str | None]


def perform(
    where: OperationOwner,
    attempt: PendingOperation,
    operation: str,
    timeout: float | None,
    context: str = "",
    stall_reason: StallReason | None = None,
) -> None:
    """Run an operation to its end; sleep until the deadline if it has to wait.

    Args:
        where: owner of the operation.
        attempt: a new operation.
        operation: prefix of error messages.
        timeout: seconds; None uses UNISONO_WAIT_LIMIT, or no limit if that is unset.
        context: suffix of error messages.
        stall_reason: called with the operation after each UNISONO_STALL_WARNING seconds; returns a
            possible reason of the wait for one warning in the log, or None to log nothing yet.

    Raises:
        DeadlineExceededError: the operation has not finished after `timeout` seconds.
        OpError: error of the operation.
        ValueError: the timeout is negative or NaN.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"{operation}: timeout must be seconds >= 0 or None, got {timeout}")
    where.submit(attempt)
    # Most operations finish inside `submit`, and then cost no lock for the wait.
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
    """Wait for an operation that was already submitted; see `perform`."""
    # A held lock is a one-shot event: `on_done` releases it once, from any thread.
    asleep = threading.Lock()
    asleep.acquire()
    try:
        if where.when_done(attempt, asleep.release):
            limit = math.inf if timeout is None else timeout
            if not _await_release(asleep, operation, limit, context, stall_reason):
                late = f"{operation}: not finished after {timeout} s{context}"
                # The owner decides: the operation may succeed before the withdrawal arrives.
                where.withdraw(attempt, DeadlineExceededError(late))
                if not asleep.acquire(timeout=client.DECISION):
                    silent = f"{late}; its task does not say whether it succeeded after all"
                    raise UnavailableError(silent)
    except BaseException:
        # Includes KeyboardInterrupt: items that the attempt takes would have no receiver.
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
            # One warning per wait; None asks again after the next pause.
            if why is not None:
                _log.warning("%s has waited %g s: %s%s", operation, waited, why, context)
                break
        limit -= waited
    # -1 waits without a limit. `acquire` raises OverflowError above TIMEOUT_MAX, about 292 years.
    return asleep.acquire(timeout=-1 if limit == math.inf else min(limit, threading.TIMEOUT_MAX))


class _Sent(NamedTuple):
    """Message of a waiting operation: its number, and whether it carries arrays."""

    number: int
    carries: bool


class RemoteAttempts(OperationOwner):
    """Proxy of an owner on another task.

    Args:
        service: service that reaches the other task.
        address: address of the owner.
    """

    def __init__(self, service: Service, address: Address) -> None:
        self.service = service
        self.address = address
        self._lock = threading.Lock()
        self._sent: dict[PendingOperation, _Sent] = {}  # waiting operations
        self._unwanted: set[PendingOperation] = set()  # abandoned; their items are returned

    @abc.abstractmethod
    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values of the request for an operation."""

    @abc.abstractmethod
    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        """Store the reply of a successful operation.

        Raises:
            OpError: the reply cannot be decoded.
        """

    def give_back(self, attempt: PendingOperation) -> None:  # noqa: B027 (most take no items)
        """Return the items of an abandoned operation, if possible."""

    def submit(self, attempt: PendingOperation) -> None:
        """Send the request of an operation."""
        operation, arguments, values = self.request_of(attempt)
        try:
            with self._lock:  # the reply may arrive before the number is stored
                number = self.service.start(
                    self.address, operation, lambda a: self._take(attempt, a), arguments, values
                )
                self._sent[attempt] = _Sent(number, bool(values))
        except OpError as error:
            # Callers of `submit` expect every error in the operation, also that of a lost task.
            self._finish(attempt, error)

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """Ask the owner to end an operation with `error`; its reply still arrives."""
        with self._lock:
            sent = self._sent.get(attempt)
        if sent is not None:
            self.service.withdraw(sent.number, error)

    def abandon(self, attempt: PendingOperation) -> None:
        """End an operation without a caller, even if it has just finished."""
        interrupted = CancelledError(f"{self.address.name}: the caller was interrupted")
        with self._lock:
            sent = self._sent.get(attempt)
            if sent is not None:
                self._unwanted.add(attempt)  # its reply may be arriving now
        # The reply has arrived already, possibly with items.
        if sent is None:
            self.give_back(attempt)
            return
        if sent.carries:
            # The caller may change its arrays after this returns, so they must be sent by then.
            self._end(attempt, sent.number, interrupted)
        # False if the reply has arrived: `_finish` then gives its items back, because of
        # `_unwanted`.
        if self.service.disown(sent.number):
            self._finish(attempt, interrupted)

    def cancel_pending(self) -> None:
        """Cancel all waiting operations of this task."""
        with self._lock:
            waiting = list(self._sent)
        # In reverse order of submission, so that no operation takes items that another returns.
        for attempt in reversed(waiting):
            error = CancelledError(f"{self.address.name}: the operation was cancelled")
            self.withdraw(attempt, error)

    def _end(self, attempt: PendingOperation, number: int, error: OpError) -> None:
        """End an operation with an error, and wait a limited time for its reply."""
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
                # An error may come after some rows were added, such as by a close in the middle.
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
                # Reply, withdrawal and interruption may race; the first one that gets the lock
                # decides.
                return
            attempt.complete(error)
        if unwanted:
            self.give_back(attempt)
        attempt.notify()


def serve(
    where: OperationOwner, attempt: A, work: ServerRequest, reply: Callable[[A], None]
) -> None:
    """Run an operation for another task, and reply when it has finished.

    Args:
        where: owner on this task.
        attempt: a new operation.
        work: the request.
        reply: sends the result of the operation.
    """
    work.wait(lambda error: where.withdraw(attempt, error), lambda: where.abandon(attempt))

    def answer() -> None:
        attempt.on_done = None  # breaks a reference cycle that would keep arrays alive
        if attempt.error is not None:
            work.fail(attempt.error, entered=attempt.entered)
        else:
            reply(attempt)

    # Before `submit`, which may finish the operation in this thread.
    attempt.on_done = answer
    where.submit(attempt)
