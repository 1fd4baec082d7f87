"""Negotiation thread: takes part in negotiations while the program computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from collectives import extend

__all__ = ["STOP_SECONDS", "CycleTime", "NegotiationThread"]

# Seconds before the thread starts a round. In this time the program can make further calls, which
# then run together, or start to wait and run the round itself.
_DELAY = 0.001

# Seconds between rounds in which nothing was ready: the first pause and the longest.
_SHORTEST, _LONGEST = 50e-6, 0.001

STOP_SECONDS = 1.0
"""Seconds to wait for the thread when it is stopped."""


class CycleTime:
    """Pause between rounds: none after a round that ran calls, otherwise increasing."""

    def __init__(self) -> None:
        self._seconds = _SHORTEST

    def after(self, fruitful: bool) -> None:
        """Sleep after a round without progress."""
        if fruitful:
            self._seconds = _SHORTEST
        else:
            time.sleep(self._seconds)
            self._seconds = min(2 * self._seconds, _LONGEST)


class NegotiationThread(extend.BackgroundThread):
    """Take part in negotiations for calls that no other thread waits for.

    Args:
        needed: returns whether there is such a call.
        negotiate: takes part in one round; returns whether it made progress.
        allowed: whether the thread may run; otherwise only waiting threads run rounds.
    """

    def __init__(
        self, needed: Callable[[], bool], negotiate: Callable[[], bool], *, allowed: bool
    ) -> None:
        super().__init__("named-calls")
        self._needed, self._negotiate, self._allowed = needed, negotiate, allowed
        self._called = threading.Event()

    def wake(self) -> None:
        """Start or wake the thread, because there may be a call."""
        # Without thread support of MPI only waiting threads may send messages.
        if self._allowed:
            self.start()
        # Setting a set event takes a lock, and calls are frequent.
        if not self._called.is_set():
            self._called.set()

    _wake = wake

    def stop_at_exit(self, timeout: float) -> None:
        """Stop the thread; pending calls of other ranks fail."""
        # Within the limit of the exit, however long other ranks take.
        self.stop(min(timeout, STOP_SECONDS))

    def _run(self) -> None:
        while not self._stopping:
            self._called.wait()
            # Cleared before the work: a call during the round sets it again.
            self._called.clear()
            time.sleep(_DELAY)
            pause = CycleTime()
            # Ends when a thread waits by itself, which then runs the rounds.
            while self._needed() and not self._stopping:
                pause.after(self._negotiate())
