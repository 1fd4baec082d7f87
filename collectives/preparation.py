"""The time in which this process has made what it needs once, such as compiled code.

The first calls of a program compile, or wait for the process of their machine that does: seconds,
on a busy machine many. No other rank is late because of it, so no limit of a wait counts it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

__all__ = ["preparing", "seconds"]

_lock = threading.Lock()
_seconds = 0.0


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Count the time of a block as preparation."""
    global _seconds
    began = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _seconds += time.monotonic() - began


def seconds() -> float:
    """Return how long this process has prepared so far, all its threads together."""
    return _seconds
