"""Background thread that negotiates while the program computes."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["BackgroundThread", "CycleTime"]

# Seconds before the thread begins a round: calls that a program makes one after the other are
# carried out together, and a thread that waits for its result is there first.
_DELAY = 0.001

# Seconds between rounds in which nothing was ready: the first pause and the longest.
_SHORTEST, _LONGEST = 50e-6, 0.001

_HANDED_OVER = 1.0  # seconds that the end of the program waits for the thread


class CycleTime:
    """Time between rounds: none after one that has carried out calls, else more and more."""

    def __init__(self) -> None:
        self._seconds = _SHORTEST

    def after(self, fruitful: bool) -> None:
        """Sleep after a round, unless something has come of it."""
        if fruitful:
            self._seconds = _SHORTEST
        else:
            time.sleep(self._seconds)
            self._seconds = min(2 * self._seconds, _LONGEST)


class BackgroundThread:
    """The thread, which starts when it is first needed.

    Args:
        needed: whether there is something to do that no other thread does.
        meet: takes part in one round, and tells whether anything came of it.
        allowed: whether there may be a thread; else the calls are carried out by who waits.
    """

    def __init__(
        self, needed: Callable[[], bool], meet: Callable[[], bool], *, allowed: bool
    ) -> None:
        self._needed, self._meet, self._allowed = needed, meet, allowed
        self._starting = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        _all.add(self)

    def wake(self) -> None:
        """Let the thread take part."""
        if self._thread is None and self._allowed and not self._stopped:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="unisono-named-calls", daemon=True
                    )
                    self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_HANDED_OVER)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            time.sleep(_DELAY)
            pause = CycleTime()
            while self._needed() and not self._stopped:
                pause.after(self._meet())


_all: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter does."""
    for helper in list(_all):
        helper.stop()
