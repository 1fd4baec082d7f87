"""Ask several tasks at once, and wait for all answers no longer than until a deadline."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strategies.errors import DeadlineExceededError, OpError, UnavailableError
from strategies.remote.containers import Address
from strategies.remote.outgoing import Answer
from strategies.remote.service import Service

__all__ = ["Asked", "Question", "ask", "begin"]

# Seconds that a task has, after a deadline, to say whether the request has succeeded after all.
_DECISION = 2.0


class Question(NamedTuple):
    """A request to another task; see `Service.start`."""

    address: Address
    operation: str
    arguments: Mapping[str, Any]
    values: Sequence[Any] = ()


def ask(
    service: Service, questions: Sequence[Question], timeout: float | None = None
) -> list[Answer]:
    """Ask, and return the answers; see `begin` and `Asked.answers`."""
    return begin(service, questions).answers(timeout)


def begin(service: Service, questions: Sequence[Question]) -> Asked:
    """Send all questions.

    Raises:
        RuntimeError: in the thread that takes answers, which must not wait for one.
        CancelledError: the service is closed.
    """
    if questions and not service.may_wait:
        operation = questions[0].operation
        raise RuntimeError(f"{operation}: called where answers arrive, which must not wait")
    asked = Asked(service, questions)
    try:
        for index in range(len(questions)):
            asked.send(index)
    except BaseException:
        asked.disown()
        raise
    return asked


class Asked:
    """Questions under way."""

    def __init__(self, service: Service, questions: Sequence[Question]) -> None:
        self._service = service
        self._questions = questions
        self._numbers: dict[int, int] = {}
        self._answers: list[Answer | None] = [None] * len(questions)
        self._changed = threading.Condition()

    def send(self, index: int) -> None:
        """Send one of the questions; a task that is gone is an answer."""
        question = self._questions[index]

        def take(answer: Answer) -> None:
            with self._changed:
                self._answers[index] = answer
                self._changed.notify()

        try:
            self._numbers[index] = self._service.start(
                question.address, question.operation, take, question.arguments, question.values
            )
        except UnavailableError as error:
            self._answers[index] = Answer({}, (), error)

    def disown(self) -> None:
        """Say that nobody wants the answers any more."""
        for index, number in self._numbers.items():
            if self._answers[index] is None:
                with contextlib.suppress(OpError):
                    self._service.disown(number)

    def answers(self, timeout: float | None = None, *, began: float | None = None) -> list[Answer]:
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
                    self._withdraw(index, timeout)
                self._wait(time.monotonic() + _DECISION)
                for index in self._open():
                    self._give_up(index)
                self._wait(None)
        except BaseException:
            self.disown()
            raise
        return [answer for answer in self._answers if answer is not None]

    def _open(self) -> list[int]:
        return [index for index, answer in enumerate(self._answers) if answer is None]

    def _wait(self, until: float | None) -> bool:
        # Ends without a deadline, too: a task that does not answer is given up by the service.
        with self._changed:
            left = None if until is None else max(until - time.monotonic(), 0)
            return self._changed.wait_for(lambda: None not in self._answers, left)

    def _withdraw(self, index: int, timeout: float | None) -> None:
        question = self._questions[index]
        error = DeadlineExceededError(
            f"{question.operation}: not done within {timeout} s (object: {question.address})"
        )
        self._service.withdraw(self._numbers[index], error)

    def _give_up(self, index: int) -> None:
        question = self._questions[index]
        if self._service.disown(self._numbers[index]):
            error = UnavailableError(
                f"{question.operation}: task {question.address.task} does not say whether it "
                f"succeeded within the timeout (object: {question.address})"
            )
            with self._changed:
                self._answers[index] = Answer({}, (), error)
