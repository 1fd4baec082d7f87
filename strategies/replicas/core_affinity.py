"""Core affinity of replica threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["CoreAffinity"]


class CoreAffinity:
    """Spreads the replicas of one run over the cores, one each if there are enough.

    Linux wakes a thread on the core of the thread that wakes it, and separates the two only after a
    while: a step of two replicas of a perceptron took 7.0 ms on one core and 4.0 ms on two. A
    replica that starts on the core of another replica moves once; later the scheduler may move it.
    """

    def __init__(self) -> None:
        # Of this run only, so that a later run does not avoid cores without replicas.
        self._taken: dict[int, int] = {}  # replica -> core
        self._lock = threading.Lock()

    def spread(self, i: int) -> None:
        """Move this thread, which runs replica `i`, off the core of another replica."""
        core = _core_of()
        if core is None:
            return
        # Read outside of the lock; the result is a hint, and the thread may move at any time.
        here = core()
        with self._lock:
            others = {taken for number, taken in self._taken.items() if number != i}
            # Only if a conflict exists: a system call per replica and run is not free.
            allowed = os.sched_getaffinity(0) if here in others else set()
            free = sorted(allowed - others, key=lambda n: (n < here, n))  # the next core first
            self._taken[i] = free[0] if free else here
        if free:
            with contextlib.suppress(OSError):  # the core is no longer allowed
                try:
                    # On Linux 0 is the calling thread. Setting one core moves it at once.
                    os.sched_setaffinity(0, free[:1])
                finally:
                    # All cores again, so that the scheduler may balance the load later.
                    os.sched_setaffinity(0, allowed)


@functools.cache
def _core_of() -> Callable[[], int] | None:
    """Return a function that returns the core of the calling thread; None if unsupported."""
    # `sched_getcpu` takes no system call on x86 (vDSO); Python has no function for it.
    library: Any = ctypes.CDLL(None)
    if not hasattr(os, "sched_setaffinity") or not hasattr(library, "sched_getcpu"):
        return None
    found: Callable[[], int] = library.sched_getcpu
    return found
