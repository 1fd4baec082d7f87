"""Threads that replicas run in, kept for the next run.

A new thread would begin with nothing of what PyTorch and the libraries below it keep for each: two
replicas of a perceptron took 30 ms for a step in new threads and 20 in old ones.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["start"]

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
