"""Background thread for one checkpoint at a time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["AsyncWriter"]


# Where ranks occupy all cores, training has precedence: the thread has a lower priority and pauses
# after each piece, this many times as long as the piece took. A step then takes 1.2 times as long,
# without pauses 1.6 to 1.8 times; writing takes 2.2 s instead of 0.6 s
# (`benchmarks/checkpoints.py`).
_NICER = 10
_NICEST = 19  # lowest priority on Linux
_RESTS = 3.0
_LONGEST_REST = 0.1  # seconds; limits the delay where a slow device, not the CPU, takes the time


class AsyncWriter:
    """Run one job at a time in a thread; `finish` raises its error.

    At exit Python waits for the job, as for any job of an executor.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._result: Future[object] | None = None
        self._awaited = threading.Event()
        self._rested = 0.0  # end of the last pause

    def start(self, work: Callable[[], object]) -> None:
        """Start a job; `finish` must have completed the previous one."""
        # Two jobs at once would need twice the copies, and could finish in the wrong order.
        assert self._result is None
        # Reset before the job starts: `throttle` reads it in the job's thread.
        self._awaited.clear()
        self._rested = time.perf_counter()

        # A new executor per job, so that no idle thread remains between checkpoints.
        self._executor = ThreadPoolExecutor(1, "unisono-checkpoint", _lower_priority)
        self._result = self._executor.submit(work)
        self._executor.shutdown(wait=False)  # its thread ends with the work

    def throttle(self) -> None:
        """Pause the job after a piece of its work, unless the program waits for the job."""
        worked = time.perf_counter() - self._rested
        # `wait` of the event instead of `sleep`, so that `finish` ends a pause at once.
        self._awaited.wait(min(_RESTS * worked, _LONGEST_REST))
        self._rested = time.perf_counter()

    def wait(self) -> None:
        """Wait for the job without raising its error."""
        if self._executor is not None:
            self._awaited.set()
            self._executor.shutdown()

    def finish(self) -> None:
        """Wait for the job, which no longer pauses; harmless without a job.

        Raises:
            BaseException: error of the job; raised once.
        """
        self.wait()
        # Cleared before `result` raises: the error is raised once, and the next `start` is allowed.
        self._executor, result, self._result = None, self._result, None
        if result is not None and result.done():  # never done in a forked child
            result.result()


def _lower_priority() -> None:
    # On Linux each thread has its own priority (`man 7 sched`); 0 is the calling thread.
    with contextlib.suppress(OSError):  # affects only this thread on Linux
        nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
        os.setpriority(os.PRIO_PROCESS, 0, min(nice, _NICEST))
