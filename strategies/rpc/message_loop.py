"""Message loop: the thread that exchanges messages with all other tasks.

The thread dispatches requests of other tasks to their handlers, and replies to the pending requests
of this task. It ends when all tasks have left.
"""

from __future__ import annotations

import logging
import math
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

_LOOK_EVERY = 0.1  # seconds between checks for dead and silent tasks
_LAST_WORDS = 1.0  # seconds to flush the LEAVE messages of a task that aborts
_REMIND_AFTER = 60.0  # seconds in `close` until a warning names the tasks that still serve


class MessageLoop(extend.BackgroundThread):
    """Message exchange with the other tasks, from construction to `close` or `abandon`.

    Args:
        comm: communicator whose ranks are the tasks; *collective*.
        timeout: seconds without a sign of life after which a task that owes a reply counts as
            unreachable.
        perform: handles a request of another task, given the request and its target; must not
            block.

    Attributes:
        task: number of this task.
        size: number of tasks.
        requests: pending requests of this task.
    """

    def __init__(
        self,
        comm: cc.Communicator,
        timeout: float,
        perform: Callable[[ServerRequest, Mapping[str, Any]], None],
    ) -> None:
        super().__init__("service")
        self.task = comm.rank
        self.size = comm.size
        self._channel = extend.open_channel(comm)
        self.requests = PendingRequests(self._send, comm.size, timeout)
        self._incoming = OpenRequests(self._send)
        self._perform = perform
        # Only the loop's thread changes these sets. `_departed` is a copy for other threads, and
        # `_departure` wakes them.
        self._left: set[int] = set()  # tasks that send no more requests
        self._lost: set[int] = set()  # tasks that died or aborted
        self._departed: dict[int, str | None] = {}  # task -> why it is lost; None: left cleanly
        self._departure = threading.Condition()
        self._orderly = True  # whether no task was lost: the channel is then drained at the end
        self._hurry = False
        self._has_given_up = False  # whether a LEAVE with a reason was sent
        self._failure: Exception | None = None
        self._ended = False
        # A single task has no peers, and needs no thread.
        if self.size > 1:
            self.start()

    def departures(self, tasks: Collection[int], timeout: float | None) -> dict[int, str | None]:
        """Wait until tasks have left or are lost; return the reasons, None for a clean leave.

        Raises:
            DeadlineExceededError: some of the tasks are still present after `timeout` seconds.
            CancelledError: this task left in the meantime.
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
                # Checked again under the lock: a departure since the first check has already
                # notified.
                if any(task not in self._departed for task in missing):
                    # Wakes up every second to check whether this task was closed.
                    self._departure.wait(min(left, 1.0))
        return {task: self._departed[task] for task in tasks}

    def close(self) -> None:
        """Serve until all tasks have left; harmless when repeated.

        Raises:
            InternalError: the thread has failed.
        """
        if self.is_forked:
            return
        self._leave("the service is closed", None)
        remind_at = time.monotonic() + _REMIND_AFTER
        try:
            # Joins in slices of a second, only to log the reminder.
            while not self.join(1.0):
                if time.monotonic() > remind_at:
                    remind_at = float("inf")
                    _log.warning("service: tasks %s have not left yet", sorted(self._inside()))
        except BaseException:
            # Ends the thread without waiting for the other tasks, so that MPI can be finalized.
            self.abandon("it was interrupted")
            raise
        self._end()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise InternalError("service: its thread has failed") from failure

    def abandon(self, reason: str) -> None:
        """Leave without waiting; later requests of other tasks fail with `reason`."""
        if self.is_forked:
            return
        self._orderly = False
        self._leave("the service was given up", reason)
        # After LEAVE is queued, because the thread then flushes for `_LAST_WORDS` at most.
        self._hurry = True
        # Longer than the flush, because the thread first finishes the message that it handles.
        self.stop(2 * _LAST_WORDS)
        self._end()

    def stop_at_exit(self, timeout: float) -> None:
        """Leave before MPI is finalized."""
        # `abandon` waits 2 s at most, of the 5 s that all background threads share.
        self.abandon("its process ended")

    def _wake(self) -> None:
        self._channel.wake()

    def _leave(self, why: str, reason: str | None) -> None:
        # True once, so that a task sends one LEAVE however often it is closed.
        first = self.requests.close(f"{why} (task {self.task} of {self.size})")
        # And one with a reason, also after a clean LEAVE: the task serves no more requests.
        if first or (reason is not None and not self._has_given_up):
            self._has_given_up = reason is not None
            for other in range(self.size):
                if other != self.task:
                    self._send(other, protocol.encode(Kind.LEAVE, 0, {"reason": reason}))

    def _end(self) -> None:
        # Only after the thread has ended, because it polls the channel. A thread that is stuck
        # keeps the channel open.
        if not self._ended and self.join(0):
            self._ended = True
            # Freeing the communicator may synchronize all ranks inside MPI, and a lost task would
            # not come.
            self._channel.close(all_together=self._orderly)

    def _send(self, task: int, frames: list[Frame]) -> None:
        if not self._ended:
            self._channel.send(task, frames)

    def _inside(self) -> set[int]:
        """Return the other tasks that may still send requests."""
        return set(range(self.size)) - {self.task} - self._left - self._lost

    def _run(self) -> None:
        """Handle messages until all tasks have left."""
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
                # Sleeps only if no message was waiting, so that bursts are handled without pauses.
                if arrived is None:
                    self._channel.wait(_LOOK_EVERY)
        except Exception as error:
            _log.exception("service: the thread of task %d has failed", self.task)
            self._failure = error
            self._orderly = False
            # Fails pending requests here, and lets other tasks fail theirs at once, not after a
            # timeout.
            self._leave(f"the service's thread has failed: {error}", "its service has failed")

    def _on_finished(self) -> bool:
        # A closed task still serves: any task that has not sent LEAVE may send requests.
        over = self.requests.closed and not self._inside()
        # Messages to a lost task may never complete, so the channel may never become idle.
        if self._hurry or (over and self._lost):
            until = time.monotonic() + _LAST_WORDS
            while not self._channel.idle and time.monotonic() < until:
                self._channel.poll()
                self._channel.wait(_LOOK_EVERY)
            return True
        # Ends only when MPI has taken the last reply, since unsent data would be lost with the
        # channel.
        return over and self._channel.idle

    def _lose(self, task: int, why: str) -> None:
        """Mark a task as lost: fail requests to it, and undo the results it was to receive."""
        self._lost.add(task)
        # Before `give_up`, because undone requests may ask for the reason, such as the heartbeat of
        # a spare replica.
        self._depart(task, why)
        self._orderly = False
        # Before the callers here see the error: rows that the task was to receive are then back in
        # their queues.
        lost = self._incoming.give_up(task)
        _log.warning("service: %s; responses dropped: %d", why, lost)
        self.requests.peer_lost(task, UnavailableError(why))

    def _depart(self, task: int, why: str | None) -> None:
        with self._departure:
            # The first reason stays: a task that dies after a clean leave has still left cleanly.
            self._departed.setdefault(task, why)
            self._departure.notify_all()

    def _handle(self, source: int, message: Message) -> None:
        if source in self._lost:
            return  # its requests were undone already; data taken by a late one would be lost
        self.requests.acknowledged(source)
        number = message.number
        # Registered before it is performed, because a handler may answer at once.
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
            # A clean leave fails no pending request: that task serves until all tasks have left.
            self._left.add(source)
            self._depart(source, None)
