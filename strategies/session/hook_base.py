"""`Hook` interface and triggers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from strategies.checkpoint.storage import Location
from strategies.core.validation import integer, number

__all__ = ["Hook", "HookList", "Session", "Timer", "Values"]

Values = Mapping[str, Any]


class Session(Protocol):
    """The part of a session that hooks use; see `TrainingSession`."""

    @property
    def step(self) -> int:
        """Number of steps done."""

    @property
    def is_chief(self) -> bool:
        """Whether this process writes shared files."""

    @property
    def last_step(self) -> int | None:
        """Step at which the training ends; None if no hook defines it."""

    def request_stop(self) -> None:
        """Stop the training after this step."""

    def request_save(self) -> None:
        """Write a checkpoint after this step."""


class Hook:
    """Base of hooks: actions of a session around its steps. Override the methods that you need.

    If a session is in step, an error of a hook on one rank is raised on all ranks.

    Attributes:
        order: position among the hooks; see `strategies.session.hooks`.
    """

    order = 50

    def begin(self, session: Session) -> None:
        """Called once, before the chief restores a checkpoint."""

    def after_create(self, session: Session) -> None:
        """Called when the state is ready: at the start, and after each recovery."""

    def before_run(self, session: Session) -> None:
        """Called before each step."""

    def after_run(self, session: Session, values: Values) -> None:
        """Called after each step with its result if that is a dict, otherwise with {}."""

    def after_save(self, session: Session, path: Location) -> None:
        """Called on the chief when a checkpoint is written or started in the background."""

    def end(self, session: Session) -> None:
        """Called at the end after the last checkpoint is complete, unless there was an error."""

    def close(self) -> None:
        """Called last, also after an error; not synchronized with other ranks."""


class HookList:
    """The hooks of a session, called in their order.

    Args:
        hooks: in any order; hooks with equal `order` keep theirs.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = sorted(hooks, key=lambda hook: hook.order)
        # Only methods that a hook overrides: a step with few hooks costs few calls.
        self._before_run, self._after_run = (
            [getattr(hook, name) for hook in self._hooks if _has(hook, name)]
            for name in ("before_run", "after_run")
        )

    def call(self, name: str, session: Session, *arguments: Any) -> None:
        """Call one method of all hooks."""
        for hook in self._hooks:
            getattr(hook, name)(session, *arguments)

    def before_step(self, session: Session) -> None:
        """Call `before_run` of the hooks that override it."""
        for call in self._before_run:
            call(session)

    def after_step(self, session: Session, values: Values) -> Exception | None:
        """Call `after_run` of the hooks that override it; return the error of the first to fail."""
        try:
            for call in self._after_run:
                call(session, values)
        except Exception as error:
            return error
        return None

    def close(self) -> None:
        """Close all hooks, also after one whose `close` fails."""
        with ExitStack() as stack:
            for hook in reversed(self._hooks):  # the stack calls the last one first
                stack.callback(hook.close)


def _has(hook: Hook, name: str) -> bool:
    return getattr(type(hook), name) is not getattr(Hook, name)


class Timer:
    """Decides when an action is due that repeats every `steps` steps or `seconds` seconds.

    It is due at the first step, and never twice at one step.

    Args:
        what: name of the owner, for errors.
        steps: number of steps between two actions; or
        seconds: minimum number of seconds between them.

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
        """Return whether the action is due after this step."""
        last = self._last_step
        if last is None:
            return True
        if self._steps is not None:
            return step - last >= self._steps
        assert self._seconds is not None
        return step != last and time.monotonic() - self._last_time >= self._seconds

    def reset(self) -> None:
        """Restart, because training has returned to a checkpoint."""
        # Due at the next step: steps from before the return would make the action late.
        self._last_step = None

    def done(self, step: int) -> tuple[int, float] | None:
        """Record the action; return the steps and seconds since the last one."""
        now, last = time.monotonic(), self._last_step
        passed = None if last is None else (step - last, now - self._last_time)
        self._last_step, self._last_time = step, now
        return passed
