"""`Hook` interface and triggers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from strategies.checkpoint.storage import Location
from strategies.core.validation import integer, number

__all__ = ["Hook", "HookList", "Session", "Timer", "Values"]

Values = Mapping[str, Any]


class Session(Protocol):
    """What hooks may ask of a session; see `TrainingSession`."""

    @property
    def step(self) -> int:
        """How many steps have been done."""

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""

    @property
    def last_step(self) -> int | None:
        """Step at which the training is to end; None where no hook says it."""

    def request_stop(self) -> None:
        """End the training after this step."""

    def request_save(self) -> None:
        """Write a checkpoint after this step."""


class Hook:
    """Something that a session does beside the steps; subclasses have what they need of it.

    What a hook raises on one rank is raised on all ranks of a session in step.

    Attributes:
        order: place among the hooks; see `strategies.session.hooks`.
    """

    order = 50

    def begin(self, session: Session) -> None:
        """Called once, before the chief restores."""

    def after_create(self, session: Session) -> None:
        """Called when the state is there: at the beginning, and after each recovery."""

    def before_run(self, session: Session) -> None:
        """Called before each step."""

    def after_run(self, session: Session, values: Values) -> None:
        """Called after each step, with what it returned; empty where that is not a dict."""

    def after_save(self, session: Session, path: Location) -> None:
        """Called when a checkpoint is written, or on its way in the background; on the chief."""

    def end(self, session: Session) -> None:
        """Called at the end, unless it is an error; when the last checkpoint is there."""

    def close(self) -> None:
        """Called last, also after an error; not together with other ranks."""


class HookList:
    """The hooks of a session, which calls them in the order of their places.

    Args:
        hooks: in any order; those of one place stay in theirs.

    Attributes:
        before_run: what is called before each step: the methods of those hooks that have one.
        after_run: after each step.
        after_save: after each checkpoint.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = sorted(hooks, key=lambda hook: hook.order)
        self.before_run, self.after_run, self.after_save = (
            [getattr(hook, name) for hook in self._hooks if _has(hook, name)]
            for name in ("before_run", "after_run", "after_save")
        )

    def call(self, name: str, session: Session) -> None:
        """Call one method of all of them."""
        for hook in self._hooks:
            getattr(hook, name)(session)

    def close(self) -> None:
        """Close all of them."""
        for hook in self._hooks:
            hook.close()


def _has(hook: Hook, name: str) -> bool:
    return getattr(type(hook), name) is not getattr(Hook, name)


class Timer:
    """Says when something is due that is done every so many steps or seconds.

    It is due at the first step that it is asked about, and never twice at one step.

    Args:
        what: whose timer it is, for errors.
        steps: how many steps lie between; or
        seconds: how many seconds, at least.

    Raises:
        ValueError: not exactly one of them is given, or it is not above 0.
    """

    def __init__(
        self, what: str, *, steps: int | None = None, seconds: float | None = None
    ) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"{what}: expected either a number of steps or of seconds, got steps={steps!r} and "
                f"seconds={seconds!r}"
            )
        self._steps = None if steps is None else integer(what, "steps", steps)
        self._seconds = None if seconds is None else number(what, "seconds", seconds)
        self._last_step: int | None = None
        self._last_time = 0.0

    def due(self, step: int) -> bool:
        """Whether it is to be done after this step."""
        last = self._last_step
        if last is None:
            return True
        if self._steps is not None:
            return step - last >= self._steps
        assert self._seconds is not None
        return step != last and time.monotonic() - self._last_time >= self._seconds

    def reset(self) -> None:
        """Begin anew: training has gone back to a checkpoint."""
        self._last_step = None

    def done(self, step: int) -> tuple[int, float] | None:
        """Note that it was done; returns the steps and seconds since the last time."""
        now, last = time.monotonic(), self._last_step
        passed = None if last is None else (step - last, now - self._last_time)
        self._last_step, self._last_time = step, now
        return passed
