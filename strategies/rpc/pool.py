"""Thread pool for incoming requests.

Threads begin when there is work, and end by themselves when there has been none for a while.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from strategies.rpc.wait_limits import current_settings

__all__ = ["CALLS", "UPDATES", "Pool"]

_log = logging.getLogger(__name__)

_RETIRE_AFTER = 5.0  # seconds without work


class Pool:
    """At most so many threads, which do jobs in the order in which they were submitted.

    Args:
        name: of the threads.
        most: says how many there may be.
    """

    def __init__(self, name: str, most: Callable[[], int]) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Let a thread do a job; what it raises is logged."""
        with self._changed:
            self._jobs.append(job)
            if len(self._jobs) <= self._idle:
                self._changed.notify()
            elif self._threads < self._most():
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def withdraw(self, job: Callable[[], None]) -> bool:
        """Take back a job; False if it has begun."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                _log.exception("%s: a job has failed", self._name)
            del job  # and what it refers to, before the next one comes

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs, _RETIRE_AFTER)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None


UPDATES = Pool("updates", lambda: current_settings().update_threads)
CALLS = Pool("calls", lambda: current_settings().call_threads)
