"""Built-in hooks of a session.

A session calls its hooks in the order of this table, whatever their order in the argument. By
default your own hooks run after the hooks that check values and before the hooks that write. So a
loss that is not finite is found before anything is written.

| hook | `order` | action |
| --- | --- | --- |
| `StopAtStep` | 10 | ends the training at a step |
| `StepCounter` | 20 | counts steps per second |
| `LogValues` | 30 | writes values into the log |
| `NanGuard` | 40 | ends the training when a value is not finite |
| your own | 50 | |
| `Summaries` | 60 | metrics, TensorBoard and a line of progress, on the chief |
| `SaveCheckpoints` | 70 | requests a checkpoint when it is due |
| `Profiler` | 80 | a timeline of some steps |
| `RunAtEnd` | 90 | computes a last value |

The methods of a hook are called in this order: `begin`, `after_create`, (`before_run`, `after_run`,
`after_save`)*, `end`. After a recovery, `after_create` is called again.
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
from strategies.session.metrics_writer import phrase

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
    """Stop the training at a step.

    Args:
        last_step: step to stop at, counted from the first run; or
        num_steps: number of steps of this run.

    Raises:
        ValueError: not exactly one of them is given, or it is negative.

    Attributes:
        last_step: step to stop at; with `num_steps` known after the session has begun.
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
        """Set the last step the first time; stop at once if no step remains."""
        if self.last_step is None:
            assert self._num_steps is not None
            self.last_step = session.step + self._num_steps
        # A restored step may be the last one already.
        self.after_run(session, {})

    def after_run(self, session: Session, values: Values) -> None:
        """Stop at the last step."""
        assert self.last_step is not None
        if session.step >= self.last_step:
            session.request_stop()


class StepCounter(Hook):
    """Count steps per second and log them on the chief.

    Args:
        every_steps: number of steps to average over.

    Attributes:
        steps_per_second: the last value; None before the first.
    """

    order = 20

    def __init__(self, every_steps: int = 100) -> None:
        self.steps_per_second: float | None = None
        self._timer = Timer("StepCounter", steps=every_steps)

    def after_create(self, session: Session) -> None:
        """Start the timer."""
        # Again after a recovery, whose time does not count.
        self._timer.done(session.step)

    def after_run(self, session: Session, values: Values) -> None:
        """Update and log the value if it is due."""
        if not self._timer.due(session.step):
            return
        passed = self._timer.done(session.step)
        assert passed is not None
        # A step may take less than the resolution of the clock.
        self.steps_per_second = passed[0] / max(passed[1], 1e-9)
        if session.is_chief:
            _log.info("step %d: %.4g steps/s", session.step, self.steps_per_second)


class LogValues(Hook):
    """Log values in `strategies.session` at level INFO, on the chief.

    Args:
        every_steps: number of steps between two logs; or
        every_seconds: minimum number of seconds between them; or
        at_end: whether to log only the last values.

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
                "LogValues: expected one of at_end, steps and seconds, got at_end and another"
            )
        self._timer = (
            None if at_end else Timer("LogValues", steps=every_steps, seconds=every_seconds)
        )
        self._last: Values = {}

    def after_create(self, session: Session) -> None:
        """Restart the timer."""
        if self._timer is not None:
            self._timer.reset()

    def after_run(self, session: Session, values: Values) -> None:
        """Log the values if it is due."""
        if self._timer is None:
            # Kept until `end`, which gets no values.
            self._last = values
        elif self._timer.due(session.step):
            # On all ranks, so that their timers stay alike; `_write` checks for the chief.
            self._timer.done(session.step)
            self._write(session, values)

    def end(self, session: Session) -> None:
        """Log the last values."""
        if self._timer is None:
            self._write(session, self._last)

    def _write(self, session: Session, values: Values) -> None:
        if session.is_chief:
            _log.info("step %d: %s", session.step, phrase(values) or "no values")


class NanLossError(Exception):
    """The loss is not finite."""


class NanGuard(Hook):
    """Stop the training when a value is NaN or infinite, before anything is written.

    Reading a value that a device computes waits for it.

    Args:
        name: name of the value.
        fail: whether to raise `NanLossError` on all ranks instead of stopping normally.
        every_steps: number of steps between two checks.
    """

    order = 40

    def __init__(self, name: str = "loss", *, fail: bool = True, every_steps: int = 1) -> None:
        self._name, self._fail = name, fail
        self._timer = Timer("NanGuard", steps=every_steps)

    def after_create(self, session: Session) -> None:
        """Restart the timer."""
        self._timer.reset()

    def after_run(self, session: Session, values: Values) -> None:
        """Check the value if it is due."""
        if not self._timer.due(session.step):
            return
        self._timer.done(session.step)
        if self._name not in values:
            raise errors.InvalidArgumentError(
                f"NanGuard: expected the step to return {self._name!r}, got {list(values)}"
            )
        # Waits for a device that still computes the value.
        value = float(values[self._name])
        if math.isfinite(value):
            return
        text = f"NanGuard: expected a finite {self._name}, got {value} (step {session.step})"
        if self._fail:
            raise NanLossError(text)
        _log.error("%s; stopping", text)
        session.request_stop()


class SaveCheckpoints(Hook):
    """Request checkpoints when they are due; the session writes them.

    The initial state counts as saved, because it was restored or is saved at the start.

    Args:
        every_steps: number of steps between two checkpoints; or
        every_seconds: minimum number of seconds between them, by the chief's clock.

    Raises:
        ValueError: not exactly one of them is given.
    """

    order = 70

    def __init__(
        self, *, every_steps: int | None = None, every_seconds: float | None = None
    ) -> None:
        self._timer = Timer("SaveCheckpoints", steps=every_steps, seconds=every_seconds)

    def after_create(self, session: Session) -> None:
        """Start the timer."""
        self._timer.done(session.step)

    def after_run(self, session: Session, values: Values) -> None:
        """Request a checkpoint if it is due."""
        # The chief alone decides: clocks differ, and one request suffices for all ranks.
        if session.is_chief and self._timer.due(session.step):
            session.request_save()

    def after_save(self, session: Session, path: Location) -> None:
        """Restart the timer, also for checkpoints that others requested."""
        self._timer.done(session.step)


class Profiler(Hook):
    """Write a timeline of some steps for Perfetto, on all ranks.

    For sessions in step on the world communicator; see `collectives.start_timeline`.

    Args:
        directory: directory of the timeline, created if it is missing.
        first_step: number of steps before the timeline starts.
        num_steps: number of steps in it.
    """

    order = 80

    def __init__(self, directory: str, *, first_step: int = 10, num_steps: int = 5) -> None:
        self._directory = directory
        self._first = integer("Profiler", "first_step", first_step, least=0)
        self._last = self._first + integer("Profiler", "num_steps", num_steps)
        self._running = False

    def before_run(self, session: Session) -> None:
        """Start the timeline before its first step."""
        # `==`: a run that resumes after this step writes no timeline.
        if session.step == self._first and not self._running:
            cc.start_timeline(self._directory)
            self._running = True

    def after_run(self, session: Session, values: Values) -> None:
        """Stop the timeline after its last step."""
        if session.step >= self._last:
            self.end(session)

    def end(self, session: Session) -> None:
        """Stop the timeline."""
        if self._running:
            cc.stop_timeline()
            self._running = False


class RunAtEnd(Hook):
    """Compute a value at the end on all ranks, such as the accuracy of the trained model.

    Args:
        function: called without arguments.

    Attributes:
        value: result of the function; None before, or if the training did not reach its end.
    """

    order = 90

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.value: Any = None

    def end(self, session: Session) -> None:
        """Call the function."""
        self.value = self._function()
