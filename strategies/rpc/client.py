"""Pending requests of this task."""

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

# Seconds that another task has to say whether what was withdrawn has succeeded after all.
DECISION = 2.0

# A task that owes an answer and is silent is asked for a sign of life so often before it is given
# up: one lost interval, as for a process that is swapped out, does not mean that it is dead.
_PINGS = 4

# Seconds between two looks at others after which this process, too, must have been stopped: they
# had no way to be heard.
_STOPPED = 1.0


class Reply(NamedTuple):
    """What came back for a request; `error` is None if it succeeded."""

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
        """Return the error of a request whose task will not answer it."""
        return UnavailableError(f"{self.operation}: {why} (object: {self.address})")


class PendingRequests:
    """Requests under way; usable from any thread.

    Args:
        send: sends frames to a task without waiting.
        size: number of tasks.
        timeout: seconds of silence after which a task counts as unreachable.
    """

    def __init__(self, send: Callable[[int, list[Frame]], None], size: int, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._gone: dict[int, str] = {}  # task -> why it will not answer any more
        self._closed: str | None = None  # why nothing can be asked any more
        now = time.monotonic()
        self._heard = [now] * size
        self._asked = [now] * size  # when the last ping was sent
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
        number = next(self._numbers)
        target = {"c": address.container, "n": address.name, "s": address.serial, "o": operation}
        frames = protocol.encode(Kind.REQUEST, number, {**target, "a": arguments}, values)
        with self._lock:
            self.check_open()
            pending = _Pending(address, operation, time.monotonic(), on_answer)
            if address.task in self._gone:
                raise pending.unavailable(self._gone[address.task])
            self._pending[number] = pending
        try:
            self._send(address.task, frames)
        except BaseException:
            with self._lock:
                self._pending.pop(number, None)
            raise
        return number

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._closed is not None

    def check_open(self) -> None:
        """Raise `CancelledError` after `close`."""
        if self._closed is not None:
            raise CancelledError(self._closed)

    def withdraw(self, number: int, error: OpError) -> None:
        """Ask that a request that waits ends with this error; the answer still comes."""
        with self._lock:
            pending = self._pending.get(number)
        if pending is not None:
            frames = protocol.encode(Kind.WITHDRAW, number, protocol.error_to(error))
            self._send(pending.task, frames)

    def disown(self, number: int) -> bool:
        """Ask that a request is undone, and forget it; False if its answer has come."""
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            self._send(pending.task, protocol.encode(Kind.DISOWN, number))
        return pending is not None

    def answered(self, source: int, message: Message) -> None:
        """Hand an answer to whoever waits for it."""
        with self._lock:
            pending = self._pending.pop(message.number, None)
        if pending is None:
            return  # disowned: the other task knows, or will know, that it has to undo this
        if message.metadata.get("confirm"):
            self._send(source, protocol.encode(Kind.RECEIVED, message.number))
        failed = message.kind is Kind.ERROR
        error = protocol.error_from(message.metadata) if failed else None
        pending.on_answer(Reply(message.metadata, message.values, error))

    def acknowledged(self, task: int) -> None:
        """Note a sign of life."""
        self._heard[task] = time.monotonic()

    def peer_lost(self, task: int, error: UnavailableError) -> None:
        """Fail what a task owes, now and from now on; what was asked before hears of it first."""
        self._fail(task, str(error))
        with self._lock:
            self._gone.setdefault(task, str(error))
        self._fail(task, str(error))  # asked meanwhile

    def look_after(self) -> None:
        """Ask silent tasks for a sign of life; give up on those that have been silent too long."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > _STOPPED:
            self._heard = [heard + gap for heard in self._heard]
        with self._lock:
            oldest: dict[int, float] = {}
            for pending in self._pending.values():
                oldest[pending.task] = min(pending.began, oldest.get(pending.task, now))
        for task, began in oldest.items():
            silent = now - max(self._heard[task], began)
            if silent > self._timeout:
                why = f"task {task} has given no sign of life for {self._timeout:g} s"
                self._fail(task, why, before=now - self._timeout)
            elif min(silent, now - self._asked[task]) > self._timeout / _PINGS:
                self._asked[task] = now
                self._send(task, protocol.encode(Kind.PING))

    def close(self, why: str) -> bool:
        """Cancel everything, and refuse what comes later; return False if that was so already."""
        with self._lock:
            if self._closed is not None:
                return False
            self._closed = why
            everything, self._pending = self._pending, {}
        self._end(everything, lambda _: CancelledError(why))
        return True

    def _fail(self, task: int, why: str, before: float = float("inf")) -> None:
        with self._lock:
            numbers = [n for n, p in self._pending.items() if p.task == task and p.began <= before]
            failed = {number: self._pending.pop(number) for number in numbers}
        self._end(failed, lambda pending: pending.unavailable(why))

    def _end(self, ended: Mapping[int, _Pending], error_of: Callable[[_Pending], OpError]) -> None:
        """Let requests that are not pending any more have an error for an answer."""
        try:
            # Other tasks, or one that comes back to life, hear of it before what is asked next.
            for number, pending in ended.items():
                self._send(pending.task, protocol.encode(Kind.DISOWN, number))
        finally:  # also where nothing can be sent any more
            for pending in ended.values():
                pending.on_answer(Reply({}, (), error_of(pending)))
