"""Settings of waits and thread counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from collectives.core import settings
from collectives.core.settings import Settings

__all__ = ["current_settings", "is_unlimited", "no_wait_limit", "wait_limit"]

# A context variable: a new thread starts with the limit, whatever its creator does.
_unlimited: ContextVar[bool] = ContextVar("unlimited", default=False)


@functools.cache
def current_settings() -> Settings:
    """Return the settings of this process, read from the environment at the first call.

    Raises:
        ValueError: a variable has an invalid value.
    """
    return settings.from_environment()


def wait_limit(timeout: float | None) -> float | None:
    """Return `timeout` in seconds; for None UNISONO_WAIT_LIMIT, or None inside `no_wait_limit`."""
    return current_settings().wait_limit if timeout is None and not _unlimited.get() else timeout


def is_unlimited() -> bool:
    """Return whether this thread is inside `no_wait_limit`."""
    return _unlimited.get()


@contextmanager
def no_wait_limit() -> Iterator[None]:
    """Disable UNISONO_WAIT_LIMIT in this thread, for threads whose task is to wait."""
    before = _unlimited.set(True)
    try:
        yield
    finally:
        _unlimited.reset(before)
