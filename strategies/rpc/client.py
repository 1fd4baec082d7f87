"""Client side of RPC: the requests of this task that wait for a reply."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from strategies.errors import CancelledError, OpError, UnavailableError
from strategies.rpc import message as protocol
from strategies.rpc.message import Kind, Message
from strategies.rpc.registry import Address
from strategies.rpc.wire import Frame

__all__ = ["DECISION", "Reply", "PendingRequests"]

# Seconds to wait for the final result of a withdrawn request, which may still have succeeded.
DECISION = 2.0

# Pings of a silent task before the timeout: a process that is swapped out may miss an interval
# without being dead.
_PINGS = 4

# Gap in seconds between two liveness checks that means this process itself was stopped. Messages
# of other tasks were not read in that time, so it must not count as their silence.
_STOPPED = 1.0


class Reply(NamedTuple):
    """Reply to a request; `error` is None if the request succeeded."""

    metadata: Mapping[str, Any]
    values: Sequence[Any]
    error: OpError | None


class _Pending(NamedTuple):
    address: Address
    operation: str
    began: float
    on_answer: Callable[[Reply], None]

    @property
    def task(self) -> int:
        return self.address.task

    def unavailable(self, why: str) -> UnavailableError:
        """Return the error for a request that its task will not answer."""
        return UnavailableError(f"{self.operation}: {why} (object: {self.address})")


class PendingRequests:
    """Requests that wait for a reply; thread-safe.

    Args:
        send: sends frames to a task without waiting.
        size: number of tasks.
        timeout: seconds of silence after which a task counts as unreachable.
    """

    def __init__(self, send: Callable[[int, list[Frame]], None], size: int, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        # Protects `_pending`, `_gone` and `_closed`.
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._gone: dict[int, str] = {}  # task -> reason why it is lost
        self._closed: str | None = None  # reason why new requests are refused
        now = time.monotonic()
        self._heard = [now] * size
        self._asked = [now] * size  # time of the last ping
        self._looked = now

    def start(
        self,
        address: Address,
        operation: str,
        arguments: Mapping[str, Any],
        values: Sequence[Any],
        on_answer: Callable[[Reply], None],
    ) -> int:
        """Send a request and return its number; see `Service.start`."""
        # `next` on a counter is atomic in CPython, so it needs no lock.
        number = next(self._numbers)
        target = {"c": address.container, "n": address.name, "s": address.serial, "o": operation}
        # Encoded before the lock is taken: packing copies small arrays, and a bad value must raise
        # before the request is registered.
        frames = protocol.encode(Kind.REQUEST, number, {**target, "a": arguments}, values)
        with self._lock:
            # Under the lock, so that `close` either sees this request or refuses it.
            self.check_open()
            pending = _Pending(address, operation, time.monotonic(), on_answer)
            if address.task in self._gone:
                raise pending.unavailable(self._gone[address.task])
            # Registered before the send, because the reply may arrive before `_send` returns.
            self._pending[number] = pending
        try:
            self._send(address.task, frames)
        except BaseException:
            with self._lock:
                # A request that was not sent gets no reply.
                self._pending.pop(number, None)
            raise
        return number

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed is not None

    def check_open(self) -> None:
        """Raise `CancelledError` after `close`."""
        if self._closed is not None:
            raise CancelledError(self._closed)

    def withdraw(self, number: int, error: OpError) -> None:
        """Ask the server to end a waiting request with `error`; its reply still arrives."""
        with self._lock:
            pending = self._pending.get(number)
        if pending is not None:
            # The request stays pending: the server replies with its result or with `error`.
            frames = protocol.encode(Kind.WITHDRAW, number, protocol.error_to(error))
            self._send(pending.task, frames)

    def disown(self, number: int) -> bool:
        """Ask the server to undo a request, and drop it; False if it was already answered."""
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            self._send(pending.task, protocol.encode(Kind.DISOWN, number))
        return pending is not None

    def answered(self, source: int, message: Message) -> None:
        """Pass a reply to the callback of its request."""
        with self._lock:
            # The thread that removes a request calls its callback. So the callback runs once, even
            # if the reply, a timeout and `close` coincide.
            pending = self._pending.pop(message.number, None)
        if pending is None:
            return  # disowned: the DISOWN message makes the other task undo the request
        if message.metadata.get("confirm"):
            # Until this confirmation the server can undo the operation, should this task die.
            self._send(source, protocol.encode(Kind.RECEIVED, message.number))
        failed = message.kind is Kind.ERROR
        error = protocol.error_from(message.metadata) if failed else None
        pending.on_answer(Reply(message.metadata, message.values, error))

    def acknowledged(self, task: int) -> None:
        """Record a sign of life from a task."""
        # `_heard`, `_asked` and `_looked` belong to the message loop's thread and need no lock.
        self._heard[task] = time.monotonic()

    def peer_lost(self, task: int, error: UnavailableError) -> None:
        """Fail the pending and all later requests to a task.

        Pending requests fail before the task is marked as lost: their callers see the error first.
        """
        self._fail(task, str(error))
        with self._lock:
            self._gone.setdefault(task, str(error))
        self._fail(task, str(error))  # requests started between the two steps

    def look_after(self) -> None:
        """Ping silent tasks, and fail the requests to tasks that exceed the timeout."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > _STOPPED:
            self._heard = [heard + gap for heard in self._heard]
        with self._lock:
            # Only tasks that owe a reply are watched: any other task may be silent for ever.
            oldest: dict[int, float] = {}
            for pending in self._pending.values():
                oldest[pending.task] = min(pending.began, oldest.get(pending.task, now))
        for task, began in oldest.items():
            # A task without requests sends nothing, so its silence starts with the oldest request.
            silent = now - max(self._heard[task], began)
            if silent > self._timeout:
                why = f"task {task} has given no sign of life for {self._timeout:g} s"
                # Requests younger than the timeout stay pending.
                self._fail(task, why, before=now - self._timeout)
            elif min(silent, now - self._asked[task]) > self._timeout / _PINGS:
                self._asked[task] = now
                self._send(task, protocol.encode(Kind.PING))

    def close(self, why: str) -> bool:
        """Cancel all requests and refuse new ones; return False if already closed."""
        with self._lock:
            if self._closed is not None:
                return False
            # Both in one step: a request that starts later is refused, and no earlier one is
            # missed.
            self._closed = why
            everything, self._pending = self._pending, {}
        # Without the lock, because callbacks may start requests.
        self._end(everything, lambda _: CancelledError(why))
        return True

    def _fail(self, task: int, why: str, before: float = float("inf")) -> None:
        with self._lock:
            numbers = [n for n, p in self._pending.items() if p.task == task and p.began <= before]
            failed = {number: self._pending.pop(number) for number in numbers}
        self._end(failed, lambda pending: pending.unavailable(why))

    def _end(self, ended: Mapping[int, _Pending], error_of: Callable[[_Pending], OpError]) -> None:
        """Call the callbacks of removed requests with an error."""
        try:
            # DISOWN is sent first: a task that resumes must undo these requests before new ones.
            for number, pending in ended.items():
                self._send(pending.task, protocol.encode(Kind.DISOWN, number))
        finally:  # callers need their error even if the channel is closed
            for pending in ended.values():
                pending.on_answer(Reply({}, (), error_of(pending)))
