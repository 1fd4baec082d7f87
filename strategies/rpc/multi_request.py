"""Requests to several tasks with a common deadline."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strategies.errors import DeadlineExceededError, OpError, UnavailableError
from strategies.rpc import client
from strategies.rpc.client import PendingRequests, Reply
from strategies.rpc.registry import Address

__all__ = ["MultiRequest", "RequestTo"]


class RequestTo(NamedTuple):
    """A request to another task; see `Service.start`."""

    address: Address
    operation: str
    arguments: Mapping[str, Any]
    values: Sequence[Any] = ()


class MultiRequest:
    """Questions under way, from construction; that a task is gone is an answer.

    Raises:
        CancelledError: the service is closed.
    """

    def __init__(self, requests: PendingRequests, questions: Sequence[RequestTo]) -> None:
        self._requests = requests
        self._questions = questions
        self._numbers: dict[int, int] = {}
        self._answers: list[Reply | None] = [None] * len(questions)
        self._missing = len(questions)
        self._lock = threading.Lock()
        self._asleep = threading.Lock()  # free when there is nothing to wait for
        if questions:
            self._asleep.acquire()
        try:
            for index, question in enumerate(questions):
                take = functools.partial(self._take, index)
                try:
                    self._numbers[index] = requests.start(*question, take)
                except UnavailableError as error:
                    take(Reply({}, (), error))
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Say that nobody wants the answers any more."""
        for index in self._open():
            with contextlib.suppress(OpError):
                self._requests.disown(self._numbers[index])

    def answers(self, timeout: float | None = None, *, began: float | None = None) -> list[Reply]:
        """Wait for all answers; those that do not come in time are withdrawn.

        Args:
            timeout: in seconds.
            began: by the monotonic clock, when that time began; now, if None.

        An answer may be an error: `DeadlineExceededError` if a request was withdrawn, and
        `UnavailableError` if the task does not even answer that.
        """
        try:
            since = time.monotonic() if began is None else began
            if not self._wait(None if timeout is None else since + timeout):
                for index in self._open():
                    late = self._error(index, f"not done within {timeout} s")
                    self._requests.withdraw(self._numbers[index], DeadlineExceededError(late))
                self._wait(time.monotonic() + client.DECISION)
                for index in self._open():
                    if self._requests.disown(self._numbers[index]):
                        silent = self._error(
                            index, "its task does not say whether it succeeded after all"
                        )
                        self._take(index, Reply({}, (), UnavailableError(silent)))
                self._wait(None)
        except BaseException:
            self.abandon()
            raise
        return [answer for answer in self._answers if answer is not None]

    def _open(self) -> list[int]:
        """Return those that were sent and not answered."""
        return [index for index in self._numbers if self._answers[index] is None]

    def _take(self, index: int, answer: Reply) -> None:
        self._answers[index] = answer
        with self._lock:
            self._missing -= 1
            last = not self._missing
        if last:
            self._asleep.release()

    def _wait(self, until: float | None) -> bool:
        # Ends without a deadline, too: a task that does not answer is given up by the service.
        left = -1 if until is None else max(until - time.monotonic(), 0)
        if not self._asleep.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            return False
        self._asleep.release()
        return True

    def _error(self, index: int, what: str) -> str:
        question = self._questions[index]
        return f"{question.operation}: {what} (object: {question.address})"
