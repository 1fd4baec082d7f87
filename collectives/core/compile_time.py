"""Time that this process has spent on one-time work such as compiling.

The first calls of a program compile, or wait for another process of the machine that compiles. That
takes seconds, and longer on a busy machine. No other rank is late because of it, so deadlines do
not count it. Other ranks of the node see it in shared memory (`collectives.tracing.peer_status`),
ranks of other nodes ask for it (`collectives.transport.failure_detector`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

from collectives.core.process_hooks import in_child

__all__ = ["Notes", "keep_noted", "measure", "total_seconds"]


class Notes(Protocol):
    """Memory that shows other processes what this one does."""

    def note_preparation(self, since: float) -> None:
        """Publish the start of preparation, by the monotonic clock; 0 if there is none now."""


_lock = threading.Lock()
_seconds = 0.0
_open = 0  # blocks in progress
_since = 0.0  # start of the first of these blocks; 0 without one
_notes: weakref.WeakSet[Notes] = weakref.WeakSet()


def _forget() -> None:
    global _lock, _open, _since
    _lock = threading.Lock()  # another thread of the parent may have held it
    _open, _since = 0, 0.0
    _notes.clear()  # they belong to the parent


in_child(_forget)


@contextlib.contextmanager
def measure() -> Iterator[None]:
    """Count the time of a block as preparation, and show it in the notes."""
    _add_blocks(1)
    try:
        yield
    finally:
        _add_blocks(-1)


def _add_blocks(number: int) -> None:
    global _open, _seconds, _since
    now = time.monotonic()
    with _lock:
        # In a forked child the parent's blocks also end, uncounted.
        before, _open = _open, max(0, _open + number)
        # The last block ends: overlapping blocks of several threads count once.
        if before and not _open:
            _seconds += now - _since
        if not before or not _open:
            _since = now if _open else 0.0
            # Only at the start of the first block and the end of the last one.
            for notes in _notes:
                notes.note_preparation(_since)


def keep_noted(notes: Notes) -> None:
    """Publish in `notes`, while they exist, when this process prepares."""
    with _lock:
        _notes.add(notes)
        notes.note_preparation(_since)


def total_seconds() -> float:
    """Return the seconds in which at least one thread of this process has prepared."""
    return _seconds
