"""Replica threads, kept between runs.

A new thread would begin with nothing of what PyTorch and the libraries below it keep for each: two
replicas of a perceptron took 30 ms for a step in new threads and 20 in old ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["CoreAffinity", "start"]

Act = Callable[[], None]

# Seconds after which a thread that nobody needs ends: far longer than a step, and its end costs
# nothing but a new thread later.
IDLE_SECONDS = 10.0

_idle: list[queue.SimpleQueue[Act]] = []
_lock = threading.Lock()


def start(act: Act) -> None:
    """Call a function, which raises nothing, in a thread of its own."""
    with _lock:
        if _idle:
            _idle.pop().put(act)
            return
    tasks: queue.SimpleQueue[Act] = queue.SimpleQueue()
    tasks.put(act)
    threading.Thread(target=_work, args=(tasks,), name="replica", daemon=True).start()


def _work(tasks: queue.SimpleQueue[Act]) -> None:
    while True:
        try:
            act = tasks.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with _lock:
                if tasks in _idle:
                    _idle.remove(tasks)
                    return
            continue  # it has been taken meanwhile
        act()
        del act  # what it holds may be large
        with _lock:
            _idle.append(tasks)


class CoreAffinity:
    """On which cores the replicas of one run compute: each on its own, where there are enough.

    A system wakes threads where the one that wakes them runs, and moves them apart only after some
    time: two replicas of a perceptron that began on one core took 7.0 ms for a step, on two 4.0.
    A replica that finds another one where it is moves once, and may move on after that.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # replica -> core
        self._lock = threading.Lock()

    def spread(self, i: int) -> None:
        """Let replica `i`, which is this thread, leave a core where another one has begun."""
        core = _core_of()
        if core is None:
            return
        here = core()
        with self._lock:
            others = {taken for number, taken in self._taken.items() if number != i}
            allowed = os.sched_getaffinity(0) if here in others else set()
            free = sorted(allowed - others, key=lambda n: (n < here, n))  # the next one first
            self._taken[i] = free[0] if free else here
        if free:
            with contextlib.suppress(OSError):  # of a core that is not allowed any more
                try:
                    os.sched_setaffinity(0, free[:1])
                finally:
                    os.sched_setaffinity(0, allowed)


@functools.cache
def _core_of() -> Callable[[], int] | None:
    """Return what tells on which core the calling thread is; None where nobody does."""
    library: Any = ctypes.CDLL(None)
    if not hasattr(os, "sched_setaffinity") or not hasattr(library, "sched_getcpu"):
        return None
    found: Callable[[], int] = library.sched_getcpu
    return found
