"""Distributed mutex.

A caller joins a queue on the mutex's task with a request that stays open while the caller waits for
or holds the mutex. When the caller's task dies, the request ends and the next caller gets the
mutex::

    task 1   hold ----------------------------> [1]        [1, 2]      [2]
             acquire -------------> at once      |            |          |
    task 2   hold ----------------------------------------> [1, 2]      [2]
             acquire ------------------------ waits until task 1 leaves --> answered
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
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
    """A named lock that all tasks of a service share, such as for a file that several tasks write.

    It is thread-safe, fair (first come, first served) and not reentrant: a second `acquire` of the
    holding thread raises.

    A task that dies or closes its service loses the lock. A stopped task keeps it, and the timeout
    errors of waiting threads name that task. The lock is also lost if its task dies or its
    container is reset, and another thread may hold it then. `release` and the end of a `with` block
    raise if this task was notified of the loss.

    Args:
        service: open on all tasks.
        shared_name: name of the lock.
        task: task of the lock: number or device string; see `Service.open`.
        container: container of the name; None for the current one.

    Raises:
        InvalidArgumentError: the name belongs to another object.
        UnavailableError: the task cannot be reached.

    Cost: `acquire` sends two messages and receives one, `release` sends one; on the lock's task
    none.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service, MutexLock(service, "report"):
        ...     "this task holds the lock"
        'this task holds the lock'
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
        self._own = threading.local()  # `entry`: queue entry of this thread while it holds the lock

    def acquire(self, timeout: float | None = None) -> None:
        """Wait for the lock.

        Args:
            timeout: seconds; None uses UNISONO_WAIT_LIMIT, or no limit if that is unset.

        Raises:
            DeadlineExceededError: the timeout has passed; the error names the task that holds the
                lock.
            UnavailableError: the lock's task is lost.
            CancelledError: the container was reset, or the service is closed.
            FailedPreconditionError: this thread already holds the lock.
        """
        if self.is_held:
            raise FailedPreconditionError(f"acquire: this thread has it (lock: {self.name})")
        # Unique per call; timeout errors read the holder's task from the first part.
        who = f"{self._task} {next(_numbers)}"
        # Two requests: one stays open for as long as the lock is held, so that the owner notices
        # the end of this task. The other one is answered when the lock is free.
        entry = _Enqueue(who)
        # One task handles both requests in order, so the entry exists before `_AtHead` arrives.
        self._where.submit(entry)
        try:
            perform(self._where, _AtHead(who), "acquire", timeout, f" (lock: {self.name})")
        except BaseException:
            # Leaves the line. Otherwise the lock would pass to a caller that has gone.
            self._where.abandon(entry)
            raise
        self._own.entry = entry

    def release(self) -> None:
        """Release the lock to the next waiting thread.

        Raises:
            FailedPreconditionError: this thread does not hold the lock.
            OpError: the lock was lost before; the class gives the cause.
        """
        if not self.is_held:
            raise FailedPreconditionError(
                f"release: this thread does not hold it (lock: {self.name})"
            )
        entry, self._own.entry = self._own.entry, None
        # The entry ends early only if the lock was lost, by a reset or a lost task.
        if entry.done and entry.error is not None:
            raise entry.error
        self._where.abandon(entry)

    @property
    def is_held(self) -> bool:
        """Whether this thread has acquired the lock."""
        return getattr(self._own, "entry", None) is not None

    def __enter__(self) -> MutexLock:
        self.acquire()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.release()
        except OpError:
            if error is None:  # an error of the block takes precedence
                raise


_numbers = itertools.count()


class _Enqueue(PendingOperation):
    """Keep a place in the queue until the entry is abandoned or cancelled."""

    def __init__(self, who: str) -> None:
        self.who = who


class _AtHead(PendingOperation):
    """Wait until a queue entry reaches the front."""

    def __init__(self, who: str) -> None:
        self.who = who


class _WaitQueue(OperationOwner):
    """Holder and waiting callers of a lock, on the lock's task; the first entry holds it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        # Dicts keep the order of insertion, which makes the lock fair.
        self._entries: dict[str, PendingOperation] = {}  # caller -> entry, in order of arrival
        self._waiting: dict[str, PendingOperation] = {}

    def submit(self, attempt: PendingOperation) -> None:
        assert isinstance(attempt, (_Enqueue, _AtHead))
        with self._lock:
            if isinstance(attempt, _Enqueue):
                # An entry has no reply of its own until it is abandoned.
                self._entries[attempt.who] = attempt
            elif attempt.who in self._entries:
                self._waiting[attempt.who] = attempt
            else:
                # The entry was cancelled between the two requests, such as by a reset.
                attempt.complete(CancelledError(f"acquire: out of the line (lock: {self._name})"))
        if attempt.done:
            attempt.notify()
        self._advance()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        assert isinstance(attempt, (_Enqueue, _AtHead))
        line = self._entries if isinstance(attempt, _Enqueue) else self._waiting
        with self._lock:
            # The operation has finished already.
            if line.get(attempt.who) is not attempt:
                return
            del line[attempt.who]
            holder = next(iter(self._entries), "").partition(" ")[0]
            if isinstance(error, DeadlineExceededError) and holder:
                error = DeadlineExceededError(f"{error.message}; task {holder} has it")
            attempt.complete(error)
        attempt.notify()
        # If the holder has left, the next entry is now first.
        self._advance()

    def abandon(self, attempt: PendingOperation) -> None:
        self.withdraw(attempt, CancelledError(f"{self._name}: the lock was released"))

    def cancel_pending(self) -> None:
        """Cancel the holder and all waiting callers."""
        with self._lock:
            ended = [*self._waiting.values(), *self._entries.values()]
            self._waiting.clear()
            self._entries.clear()
            for attempt in ended:
                attempt.complete(CancelledError(f"{self._name}: the lock is there no more"))
        for attempt in ended:
            attempt.notify()

    def _advance(self) -> None:
        with self._lock:
            # The holder's own request has left `_waiting`, so it is not completed twice.
            first = next(iter(self._entries), "")
            front = self._waiting.pop(first, None)
            if front is not None:
                front.complete()
        if front is not None:
            # Without the lock, because the callback may call the queue.
            front.notify()


class _RemoteWaitQueue(RemoteAttempts):
    """Wait queue on another task."""

    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        assert isinstance(attempt, (_Enqueue, _AtHead))
        return "hold" if isinstance(attempt, _Enqueue) else "acquire", {"who": attempt.who}, []

    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        pass


def _serve(kind: type[_Enqueue | _AtHead], line: _WaitQueue, work: ServerRequest) -> None:
    serve(line, kind(work.arguments["who"]), work, lambda done: work.reply())


_KIND = register_type(
    ResourceType(
        "MutexLock",
        lambda description, name: _WaitQueue(name),
        lambda line, description: None,
        {"hold": partial(_serve, _Enqueue), "acquire": partial(_serve, _AtHead)},
        _WaitQueue.cancel_pending,
    )
)
