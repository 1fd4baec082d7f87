"""Thread pool whose threads start on demand and end when idle.

`concurrent.futures.ThreadPoolExecutor` keeps its threads, and joins them at exit: a job that waits
for another process would block the exit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from collectives import extend

__all__ = ["ThreadPool"]

_log = logging.getLogger(__name__)


class ThreadPool:
    """Threads that do jobs in the order of submission.

    Args:
        name: thread name after "unisono-".
        max_threads: returns how many threads there may be; None for no limit.
        idle_seconds: seconds without a job after which a thread ends.
    """

    def __init__(
        self, name: str, max_threads: Callable[[], int] | None = None, idle_seconds: float = 5.0
    ) -> None:
        self._name = f"unisono-{name}"
        self._max_threads = max_threads
        self._idle_seconds = idle_seconds
        self._reset()
        # A forked child has no threads; a lock held by one of them would never be released.
        extend.in_child(self._reset)

    def _reset(self) -> None:
        """Forget threads and jobs, which a forked child does not have."""
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Let a thread do a job; an exception is logged."""
        with self._changed:
            self._jobs.append(job)
            # Compared with the number of jobs, because several may wait for the same idle thread.
            if len(self._jobs) <= self._idle:
                self._changed.notify()
            elif self._max_threads is None or self._threads < self._max_threads():
                self._threads += 1
                # Daemon threads do not block the exit, unlike those of an executor.
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def withdraw(self, job: Callable[[], None]) -> bool:
        """Remove a job from the queue; return False if it has begun."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException:  # also SystemExit, which would end the thread uncounted
                _log.exception("%s: a job has failed", self._name)
            del job  # frees the job's objects before the next wait

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            # Under the lock: a job submitted at the timeout is either seen here or starts a thread.
            self._changed.wait_for(lambda: self._jobs, self._idle_seconds)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            # Counted under the lock, so that `submit` never relies on a thread that ends.
            self._threads -= 1
            return None
