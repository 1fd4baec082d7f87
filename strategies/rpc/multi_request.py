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
    """Several requests, sent on construction; the error of a lost task counts as its reply.

    Raises:
        CancelledError: the service is closed.
    """

    def __init__(self, requests: PendingRequests, questions: Sequence[RequestTo]) -> None:
        self._requests = requests
        self._questions = questions
        # Sparse: a request to a lost task has no number, only an error as its reply.
        self._numbers: dict[int, int] = {}
        # Each place is written once, by the thread that ends its request, so it needs no lock.
        self._answers: list[Reply | None] = [None] * len(questions)
        self._missing = len(questions)
        self._lock = threading.Lock()
        self._asleep = threading.Lock()  # locked until the last reply arrives
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
        """Disown all requests without a reply."""
        for index in self._open():
            with contextlib.suppress(OpError):
                # The channel may be closed by now; nothing is owed to the caller any more.
                self._requests.disown(self._numbers[index])

    def answers(self, timeout: float | None = None, *, began: float | None = None) -> list[Reply]:
        """Wait for all replies, and withdraw the requests that miss the deadline.

        Args:
            timeout: seconds; None waits without a limit.
            began: monotonic time at which the timeout starts; None for now.

        Returns:
            One reply per request, in their order. The error of a reply is `DeadlineExceededError`
            if the request was withdrawn, and `UnavailableError` if the task does not answer the
            withdrawal.
        """
        try:
            since = time.monotonic() if began is None else began
            if not self._wait(None if timeout is None else since + timeout):
                for index in self._open():
                    late = self._error(index, f"not done within {timeout} s")
                    self._requests.withdraw(self._numbers[index], DeadlineExceededError(late))
                # A request may succeed before its withdrawal arrives, so its task has the last
                # word.
                self._wait(time.monotonic() + client.DECISION)
                for index in self._open():
                    if self._requests.disown(self._numbers[index]):
                        silent = self._error(
                            index, "its task does not say whether it succeeded after all"
                        )
                        self._take(index, Reply({}, (), UnavailableError(silent)))
                # A request that could not be disowned has a reply whose callback is still running.
                self._wait(None)
        except BaseException:
            self.abandon()
            raise
        return [answer for answer in self._answers if answer is not None]

    def _open(self) -> list[int]:
        """Return the indices of requests that were sent and not answered."""
        return [index for index in self._numbers if self._answers[index] is None]

    def _take(self, index: int, answer: Reply) -> None:
        self._answers[index] = answer
        with self._lock:
            self._missing -= 1
            last = not self._missing
        if last:
            self._asleep.release()

    def _wait(self, until: float | None) -> bool:
        # Ends even without a deadline: the service fails the requests of an unresponsive task.
        left = -1 if until is None else max(until - time.monotonic(), 0)
        if not self._asleep.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            return False
        # Released again, so that a second wait returns at once.
        self._asleep.release()
        return True

    def _error(self, index: int, what: str) -> str:
        question = self._questions[index]
        return f"{question.operation}: {what} (object: {question.address})"
