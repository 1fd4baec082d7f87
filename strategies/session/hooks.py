"""Built-in hooks of a session.

A session calls its hooks in the order of the table, whatever order they are given in; hooks of
one's own come between those that look at values and those that write, unless they say otherwise.
So a loss that is not a number is found before anything is written.

| hook | `order` | what it does |
| --- | --- | --- |
| `StopAtStep` | 10 | ends the training at a step |
| `StepCounter` | 20 | counts steps per second |
| `LogValues` | 30 | writes values into the log |
| `NanGuard` | 40 | ends the training when a value is not finite |
| one's own | 50 | |
| `Summaries` | 60 | metrics, TensorBoard and a line of progress, on the chief |
| `SaveCheckpoints` | 70 | says when a checkpoint is due |
| `Profiler` | 80 | a timeline of some steps |
| `RunAtEnd` | 90 | a last value |

Callbacks of one hook come in this order: `begin`, `after_create`, (`before_run`, `after_run`,
`after_save`)*, `end`. After a failure that training goes on from, `after_create` comes again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import collectives as cc
from strategies import errors
from strategies.checkpoint.storage import Location
from strategies.core.validation import integer
from strategies.session.hook_base import Hook, Session, Timer, Values

__all__ = [
    "SaveCheckpoints",
    "RunAtEnd",
    "Hook",
    "LogValues",
    "NanGuard",
    "NanLossError",
    "Profiler",
    "StepCounter",
    "StopAtStep",
]

_log = logging.getLogger("strategies.session")


class StopAtStep(Hook):
    """End the training at a step.

    Args:
        last_step: at which to stop, counted from the very beginning; or
        num_steps: how many steps to make in this run.

    Raises:
        ValueError: not exactly one of them is given, or it is negative.

    Attributes:
        last_step: as given; known after the session has begun where `num_steps` was.
    """

    order = 10

    def __init__(self, last_step: int | None = None, *, num_steps: int | None = None) -> None:
        if (last_step is None) == (num_steps is None):
            raise ValueError(
                f"StopAtStep: expected either last_step or num_steps, got {last_step!r} and "
                f"{num_steps!r}"
            )
        given = last_step if num_steps is None else num_steps
        integer("StopAtStep", "steps", given, least=0)
        self.last_step, self._num_steps = last_step, num_steps

    def after_create(self, session: Session) -> None:
        """Count from here the first time; stop at once where nothing is left."""
        if self.last_step is None:
            assert self._num_steps is not None
            self.last_step = session.step + self._num_steps
        self.after_run(session, {})

    def after_run(self, session: Session, values: Values) -> None:
        """Stop at the last step."""
        assert self.last_step is not None
        if session.step >= self.last_step:
            session.request_stop()


class StepCounter(Hook):
    """Count steps per second, over the last so many steps, and log them on the chief.

    Args:
        every_steps: how many.

    Attributes:
        steps_per_second: the last figure; None before there is one.
    """

    order = 20

    def __init__(self, every_steps: int = 100) -> None:
        self.steps_per_second: float | None = None
        self._timer = Timer("StepCounter", steps=every_steps)

    def after_create(self, session: Session) -> None:
        """Begin to count."""
        self._timer.done(session.step)

    def after_run(self, session: Session, values: Values) -> None:
        """Count."""
        if not self._timer.due(session.step):
            return
        passed = self._timer.done(session.step)
        assert passed is not None
        self.steps_per_second = passed[0] / max(passed[1], 1e-9)
        if session.is_chief:
            _log.info("step %d: %.4g steps/s", session.step, self.steps_per_second)


class LogValues(Hook):
    """Write values into the log `strategies.session`, level INFO, on the chief.

    Args:
        every_steps: how many steps lie between; or
        every_seconds: how many seconds; or
        at_end: whether only the last values are of interest.

    Raises:
        ValueError: not exactly one of them is given.
    """

    order = 30

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        at_end: bool = False,
    ) -> None:
        if at_end and (every_steps, every_seconds) != (None, None):
            raise ValueError(
                "LogValues: expected either at_end, or steps, or seconds, got at_end too"
            )
        self._timer = (
            None if at_end else Timer("LogValues", steps=every_steps, seconds=every_seconds)
        )
        self._last: Values = {}

    def after_create(self, session: Session) -> None:
        """Begin anew."""
        if self._timer is not None:
            self._timer.reset()

    def after_run(self, session: Session, values: Values) -> None:
        """Log where it is due."""
        if self._timer is None:
            self._last = values
        elif self._timer.due(session.step):
            self._timer.done(session.step)
            self._write(session, values)

    def end(self, session: Session) -> None:
        """Log the last values."""
        if self._timer is None:
            self._write(session, self._last)

    def _write(self, session: Session, values: Values) -> None:
        if session.is_chief:
            words = ", ".join(f"{name} {_short(value)}" for name, value in values.items())
            _log.info("step %d: %s", session.step, words or "no values")


class NanLossError(Exception):
    """The loss is not a number any more."""


class NanGuard(Hook):
    """End the training when a value is NaN or infinite, before it is written anywhere.

    Looking at a value that a device computes waits for it.

    Args:
        name: of the value.
        fail: whether to raise `NanLossError`, on all ranks, or to stop as if this was the end.
        every_steps: at which steps to look.
    """

    order = 40

    def __init__(self, name: str = "loss", *, fail: bool = True, every_steps: int = 1) -> None:
        self._name, self._fail = name, fail
        self._timer = Timer("NanGuard", steps=every_steps)

    def after_create(self, session: Session) -> None:
        """Begin anew."""
        self._timer.reset()

    def after_run(self, session: Session, values: Values) -> None:
        """Look."""
        if not self._timer.due(session.step):
            return
        self._timer.done(session.step)
        if self._name not in values:
            raise errors.InvalidArgumentError(
                f"NanGuard: expected the step to return {self._name!r}, got {list(values)}"
            )
        value = float(values[self._name])
        if math.isfinite(value):
            return
        text = f"NanGuard: expected a finite {self._name}, got {value} (step {session.step})"
        if self._fail:
            raise NanLossError(text)
        _log.error("%s; stopping", text)
        session.request_stop()


class SaveCheckpoints(Hook):
    """Say when a checkpoint is due; the session writes it.

    The state at the beginning counts as saved, since it was restored, or saved there.

    Args:
        every_steps: how many steps lie between; or
        every_seconds: how many seconds, at least, by the chief's clock.

    Raises:
        ValueError: not exactly one of them is given.
    """

    order = 70

    def __init__(
        self, *, every_steps: int | None = None, every_seconds: float | None = None
    ) -> None:
        self._timer = Timer("SaveCheckpoints", steps=every_steps, seconds=every_seconds)

    def after_create(self, session: Session) -> None:
        """Begin to count."""
        self._timer.done(session.step)

    def after_run(self, session: Session, values: Values) -> None:
        """Ask for a checkpoint where it is due."""
        if session.is_chief and self._timer.due(session.step):
            session.request_save()

    def after_save(self, session: Session, path: Location) -> None:
        """Count from here, whoever has asked."""
        self._timer.done(session.step)


class Profiler(Hook):
    """Write a timeline of some steps, for Perfetto; on all ranks.

    For sessions of the world communicator in step; see `collectives.start_timeline`.

    Args:
        directory: made where it is missing.
        first_step: the number of steps that have been done when it begins.
        num_steps: how many are in it.
    """

    order = 80

    def __init__(self, directory: str, *, first_step: int = 10, num_steps: int = 5) -> None:
        self._directory = directory
        self._first = integer("Profiler", "first_step", first_step, least=0)
        self._last = self._first + integer("Profiler", "num_steps", num_steps)
        self._running = False

    def before_run(self, session: Session) -> None:
        """Begin where it is time."""
        if session.step == self._first and not self._running:
            cc.start_timeline(self._directory)
            self._running = True

    def after_run(self, session: Session, values: Values) -> None:
        """End where it is time."""
        if session.step >= self._last:
            self.end(session)

    def end(self, session: Session) -> None:
        """End the timeline."""
        if self._running:
            cc.stop_timeline()
            self._running = False


class RunAtEnd(Hook):
    """Compute something at the end, on all ranks, such as the accuracy of what was trained.

    Args:
        function: called without arguments.

    Attributes:
        value: what it has returned; None before, and where the training did not come to its end.
    """

    order = 90

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.value: Any = None

    def end(self, session: Session) -> None:
        """Compute it."""
        self.value = self._function()


def _short(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) else f"{float(value):.4g}"
