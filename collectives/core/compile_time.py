"""Time that this process has spent on one-time work such as compiling.

The first calls of a program compile, or wait for the process of their machine that does: seconds,
on a busy machine many. No other rank is late because of it, so no limit of a wait counts it. Notes
in shared memory (`collectives.tracing.peer_status`) show the other ranks of a node when a rank does
so; those of other nodes ask (`collectives.transport.failure_detector`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Notes", "keep_noted", "measure", "total_seconds"]


class Notes(Protocol):
    """Memory that shows other processes what this one does."""

    def note_preparation(self, since: float) -> None:
        """Show since when this process prepares, by the monotonic clock; 0 if it does not."""


_lock = threading.Lock()
_seconds = 0.0
_open = 0  # blocks that have not ended
_since = 0.0  # when the first of these blocks began; 0 if there is none
_notes: weakref.WeakSet[Notes] = weakref.WeakSet()


def _forget() -> None:
    global _lock, _open, _since
    _lock = threading.Lock()  # another thread of the parent may have held it
    _open, _since = 0, 0.0
    _notes.clear()  # of the parent


os.register_at_fork(after_in_child=_forget)


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
        if before and not _open:
            _seconds += now - _since
        if not before or not _open:
            _since = now if _open else 0.0
            for notes in _notes:
                notes.note_preparation(_since)


def keep_noted(notes: Notes) -> None:
    """Show in `notes`, as long as they exist, when this process prepares."""
    with _lock:
        _notes.add(notes)
        notes.note_preparation(_since)


def total_seconds() -> float:
    """Return how long at least one thread of this process has prepared so far."""
    return _seconds
