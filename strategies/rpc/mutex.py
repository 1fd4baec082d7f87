"""Distributed mutex.

Whoever wants it stands in a line there, by a request that stays open as long as it stands in the
line or has the lock: when its task dies, the request ends, and the next one gets the lock::

    task 1   stand ---------------------------> [1]        [1, 2]      [2]
             come to the front ---> at once      |            |          |
    task 2   stand ---------------------------------------> [1, 2]      [2]
             come to the front -------------- waits until task 1 leaves --> answered
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    OpError,
)
from strategies.rpc.client import Reply
from strategies.rpc.operation import (
    OperationOwner,
    PendingOperation,
    RemoteAttempts,
    perform,
    serve,
)
from strategies.rpc.registry import ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service

__all__ = ["MutexLock"]


class MutexLock:
    """A lock by name that all tasks of a service share, such as for a file that several write.

    It may be used from any thread. Those that wait get it in the order in which they came. It is
    not reentrant: a thread that asks again for what it has gets an error.

    A task that dies, or closes its service, has it no longer; one that is stopped has it still, and
    the error of those whose time is over names it. If the lock is lost otherwise, since
    its task has died or its container was reset, `release`, and the end of a `with` block, say so
    where this task has heard of it: another thread may have had it meanwhile.

    Args:
        service: open on all tasks.
        shared_name: of the lock.
        task: where it lives: a number, or a device string; see `Service.open`.
        container: of the name; None for the current one.

    Raises:
        InvalidArgumentError: the name belongs to something else.
        UnavailableError: the task cannot be reached.

    Cost: two messages to its task and one back to acquire it, one to release it; none on its task.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service, MutexLock(service, "report"):
        ...     "nobody else is here"
        'nobody else is here'
    """

    def __init__(
        self,
        service: Service,
        shared_name: str,
        *,
        task: int | str | None = 0,
        container: str | None = None,
    ) -> None:
        address, line = service.open(_KIND, {}, name=shared_name, task=task, container=container)
        self.name = shared_name
        self._where: OperationOwner = (
            line if line is not None else _RemoteWaitQueue(service, address)
        )
        self._task = service.task
        self._own = threading.local()  # `stand`: how this thread has it

    def acquire(self, timeout: float | None = None) -> None:
        """Wait for the lock.

        Args:
            timeout: in seconds; None for `UNISONO_WAIT_LIMIT`, or any time without.

        Raises:
            DeadlineExceededError: others have had it for so long; names the task that has it.
            UnavailableError: its task is gone.
            CancelledError: its container was reset, or the service is closed.
            FailedPreconditionError: this thread has it.
        """
        if self.is_held:
            raise FailedPreconditionError(f"acquire: this thread has it (lock: {self.name})")
        who = f"{self._task} {next(_numbers)}"
        stand = _Enqueue(who)
        self._where.submit(stand)
        try:
            perform(self._where, _AtHead(who), "acquire", timeout, f" (lock: {self.name})")
        except BaseException:
            self._where.abandon(stand)
            raise
        self._own.stand = stand

    def release(self) -> None:
        """Let the next one have it.

        Raises:
            FailedPreconditionError: this thread does not have it.
            OpError: it was lost before; the class says how.
        """
        if not self.is_held:
            raise FailedPreconditionError(f"release: this thread has it not (lock: {self.name})")
        stand, self._own.stand = self._own.stand, None
        if stand.done and stand.error is not None:
            raise stand.error
        self._where.abandon(stand)

    @property
    def is_held(self) -> bool:
        """Whether this thread has acquired it."""
        return getattr(self._own, "stand", None) is not None

    def __enter__(self) -> MutexLock:
        self.acquire()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.release()
        except OpError:
            if error is None:  # else that counts
                raise


_numbers = itertools.count()


class _Enqueue(PendingOperation):
    """Stand in the line, until somebody ends this."""

    def __init__(self, who: str) -> None:
        self.who = who


class _AtHead(PendingOperation):
    """Wait until one who stands in the line is at its front."""

    def __init__(self, who: str) -> None:
        self.who = who


class _WaitQueue(OperationOwner):
    """Those who have or want a lock, on its task; the first one has it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._standing: dict[str, PendingOperation] = {}  # in order
        self._waiting: dict[str, PendingOperation] = {}

    def submit(self, attempt: PendingOperation) -> None:
        assert isinstance(attempt, (_Enqueue, _AtHead))
        with self._lock:
            if isinstance(attempt, _Enqueue):
                self._standing[attempt.who] = attempt
            elif attempt.who in self._standing:
                self._waiting[attempt.who] = attempt
            else:
                attempt.complete(CancelledError(f"acquire: out of the line (lock: {self._name})"))
        if attempt.done:
            attempt.notify()
        self._advance()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        assert isinstance(attempt, (_Enqueue, _AtHead))
        line = self._standing if isinstance(attempt, _Enqueue) else self._waiting
        with self._lock:
            if line.get(attempt.who) is not attempt:
                return
            del line[attempt.who]
            holder = next(iter(self._standing), "").partition(" ")[0]
            if isinstance(error, DeadlineExceededError) and holder:
                error = DeadlineExceededError(f"{error.message}; task {holder} has it")
            attempt.complete(error)
        attempt.notify()
        self._advance()

    def abandon(self, attempt: PendingOperation) -> None:
        self.withdraw(attempt, CancelledError(f"{self._name}: the lock was released"))

    def cancel_pending(self) -> None:
        """End all that stand and wait."""
        with self._lock:
            ended = [*self._waiting.values(), *self._standing.values()]
            self._waiting.clear()
            self._standing.clear()
            for attempt in ended:
                attempt.complete(CancelledError(f"{self._name}: the lock is there no more"))
        for attempt in ended:
            attempt.notify()

    def _advance(self) -> None:
        with self._lock:
            first = next(iter(self._standing), "")
            front = self._waiting.pop(first, None)
            if front is not None:
                front.complete()
        if front is not None:
            front.notify()


class _RemoteWaitQueue(RemoteAttempts):
    """The same on another task."""

    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        assert isinstance(attempt, (_Enqueue, _AtHead))
        return "hold" if isinstance(attempt, _Enqueue) else "acquire", {"who": attempt.who}, []

    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        pass


def _stand(line: _WaitQueue, work: ServerRequest) -> None:
    serve(line, _Enqueue(work.arguments["who"]), work, lambda done: work.reply())


def _front(line: _WaitQueue, work: ServerRequest) -> None:
    serve(line, _AtHead(work.arguments["who"]), work, lambda done: work.reply())


def _make(description: Mapping[str, Any], name: str) -> _WaitQueue:
    return _WaitQueue(name)


_KIND = register_type(
    ResourceType(
        "MutexLock",
        _make,
        lambda line, description: None,
        {"hold": _stand, "acquire": _front},
        _WaitQueue.cancel_pending,
    )
)
