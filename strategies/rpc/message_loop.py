"""Message loop: the thread that exchanges messages with all other tasks.

It takes requests of other tasks, which it hands to what serves them, and answers to its own, which
it hands to whoever waits. It ends when all tasks have left.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import collectives as cc
from collectives import extend
from strategies.errors import DeadlineExceededError, InternalError, UnavailableError
from strategies.rpc import message as protocol
from strategies.rpc.client import PendingRequests
from strategies.rpc.message import Kind, Message
from strategies.rpc.server_requests import OpenRequests, ServerRequest
from strategies.rpc.wire import Frame

__all__ = ["MessageLoop"]

_log = logging.getLogger(__name__)

_LOOK_EVERY = 0.1  # seconds between two looks at who has died or is silent
_LAST_WORDS = 1.0  # seconds in which the farewell of a task that gives up must have left
_REMIND_AFTER = 60.0  # seconds after which a wait for others to leave is reported


class MessageLoop:
    """Messages with the other tasks, from construction to `close` or `abandon`.

    Args:
        comm: its ranks are the tasks; *collective*.
        timeout: seconds without a sign of life after which a task that owes an answer counts as
            unreachable.
        perform: serves a request of another task, given what it aims at; must not block.

    Attributes:
        task: number of this task.
        size: number of tasks.
        requests: what this task has asked others for.
    """

    def __init__(
        self,
        comm: cc.Communicator,
        timeout: float,
        perform: Callable[[ServerRequest, Mapping[str, Any]], None],
    ) -> None:
        self.task = comm.rank
        self.size = comm.size
        self._process = os.getpid()
        self._channel = extend.open_channel(comm)
        self.requests = PendingRequests(self._send, comm.size, timeout)
        self._incoming = OpenRequests(self._send)
        self._perform = perform
        self._left: set[int] = set()  # tasks that will ask for nothing more
        self._lost: set[int] = set()  # tasks that are dead or have given up
        self._departed: dict[int, str | None] = {}  # task -> why it is lost, None if it has left
        self._departure = threading.Condition()
        self._orderly = True  # whether all leave well, so that nothing is under way at the end
        self._hurry = False
        self._failure: Exception | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        if self.size > 1:
            self._thread.start()
            # MPI ends after this: the thread must not be inside it then.
            atexit.register(self.abandon, "its process ended")

    def is_here(self) -> bool:
        """Whether the current thread is the one that takes messages, which must not wait."""
        return threading.current_thread() is self._thread

    def departures(self, tasks: Collection[int], timeout: float | None) -> dict[int, str | None]:
        """Wait until some tasks have left or are lost; return why, None for those that left.

        Raises:
            DeadlineExceededError: after `timeout` seconds some of them are still there.
            CancelledError: this task has left meanwhile.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while missing := [task for task in tasks if task not in self._departed]:
            self.requests.check_open()
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    f"departures: tasks are still there after {timeout} s, expected none, got "
                    f"{missing}"
                )
            with self._departure:
                if any(task not in self._departed for task in missing):
                    self._departure.wait(min(left, 1.0))
        return {task: self._departed[task] for task in tasks}

    def close(self) -> None:
        """Serve on until all tasks have left; harmless when repeated.

        Raises:
            InternalError: the thread has failed.
        """
        if os.getpid() != self._process:  # a forked child: the service is the parent's
            return
        self._leave("the service is closed", None)
        remind_at = time.monotonic() + _REMIND_AFTER
        try:
            while self._thread.is_alive():
                self._thread.join(1.0)
                if time.monotonic() > remind_at:
                    remind_at = float("inf")
                    _log.warning("service: tasks %s have not left yet", sorted(self._inside()))
        except BaseException:
            self.abandon("it was interrupted")
            raise
        self._end()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise InternalError("service: its thread has failed") from failure

    def abandon(self, reason: str) -> None:
        """Leave without waiting for anybody; who asks from now on is told the reason."""
        if os.getpid() != self._process:
            return
        self._orderly = False
        self._leave("the service was given up", reason)
        self._hurry = True
        if self._thread.is_alive():
            self._channel.wake()
            self._thread.join(2 * _LAST_WORDS)
        self._end()

    def _leave(self, why: str, reason: str | None) -> None:
        if self.requests.close(f"{why} (task {self.task} of {self.size})"):
            for other in range(self.size):
                if other != self.task:
                    self._send(other, protocol.encode(Kind.LEAVE, 0, {"reason": reason}))

    def _end(self) -> None:
        if not self._ended and not self._thread.is_alive():
            self._ended = True
            atexit.unregister(self.abandon)
            self._channel.close(all_together=self._orderly)

    def _send(self, task: int, frames: list[Frame]) -> None:
        if not self._ended:
            self._channel.send(task, frames)

    def _inside(self) -> set[int]:
        """Return the other tasks that may still ask for something."""
        return set(range(self.size)) - {self.task} - self._left - self._lost

    def _run(self) -> None:
        """Take messages until all tasks have left."""
        try:
            look_at = 0.0
            while not self._on_finished():
                arrived = self._channel.poll()
                if arrived is not None:
                    self._handle(arrived.source, protocol.decode(arrived.frames))
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + _LOOK_EVERY
                    for task in self._channel.dead - self._lost:
                        self._lose(task, f"task {task} died")
                    self.requests.look_after()
                if arrived is None:
                    self._channel.wait(_LOOK_EVERY)
        except Exception as error:
            _log.exception("service: the thread of task %d has failed", self.task)
            self._failure = error
            self._orderly = False
            self._leave(f"the service's thread has failed: {error}", "its service has failed")

    def _on_finished(self) -> bool:
        over = self.requests.closed and not self._inside()
        # What is under way to a task that is lost may never arrive.
        if self._hurry or (over and self._lost):
            until = time.monotonic() + _LAST_WORDS
            while not self._channel.idle and time.monotonic() < until:
                self._channel.poll()
                self._channel.wait(_LOOK_EVERY)
            return True
        return over and self._channel.idle

    def _lose(self, task: int, why: str) -> None:
        """Go on without a task: what it owes fails, what it was to get goes back."""
        self._lost.add(task)
        self._depart(task, why)
        self._orderly = False
        lost = self._incoming.give_up(task)
        _log.warning("service: %s; %d answers under way to it were taken back", why, lost)
        self.requests.peer_lost(task, UnavailableError(why))

    def _depart(self, task: int, why: str | None) -> None:
        with self._departure:
            self._departed.setdefault(task, why)
            self._departure.notify_all()

    def _handle(self, source: int, message: Message) -> None:
        if source in self._lost:
            return  # a last request of the dead must not take anything: nobody would give it back
        self.requests.acknowledged(source)
        number = message.number
        if message.kind is Kind.REQUEST:
            self._perform(self._incoming.accept(source, message), message.metadata)
        elif message.kind in (Kind.RESULT, Kind.ERROR):
            self.requests.answered(source, message)
        elif message.kind is Kind.RECEIVED:
            self._incoming.acknowledged(source, number)
        elif message.kind is Kind.WITHDRAW:
            self._incoming.withdraw(source, number, protocol.error_from(message.metadata))
        elif message.kind is Kind.DISOWN:
            self._incoming.give_up(source, number)
        elif message.kind is Kind.PING:
            self._send(source, protocol.encode(Kind.PONG))
        elif message.kind is Kind.LEAVE and message.metadata.get("reason"):
            self._lose(source, f"task {source} has left ({message.metadata['reason']})")
        elif message.kind is Kind.LEAVE:
            self._left.add(source)
            self._depart(source, None)
