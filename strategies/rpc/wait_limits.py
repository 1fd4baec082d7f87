"""Settings of waits and thread counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from collectives.core import settings
from collectives.core.settings import Settings

__all__ = ["current_settings", "is_unlimited", "no_wait_limit", "wait_limit"]

_unlimited: ContextVar[bool] = ContextVar("unlimited", default=False)


@functools.cache
def current_settings() -> Settings:
    """Return the settings of this process, as they were when it first asked.

    Raises:
        ValueError: a variable has a value that cannot be used.
    """
    return settings.from_environment()


def wait_limit(timeout: float | None) -> float | None:
    """Return how long a call may wait that was given this timeout: `UNISONO_WAIT_LIMIT` if None."""
    return current_settings().wait_limit if timeout is None and not _unlimited.get() else timeout


def is_unlimited() -> bool:
    """Return whether this thread is inside of `no_wait_limit`."""
    return _unlimited.get()


@contextmanager
def no_wait_limit() -> Iterator[None]:
    """Let this thread wait without the limit of the settings: it is its work to wait."""
    before = _unlimited.set(True)
    try:
        yield
    finally:
        _unlimited.reset(before)
