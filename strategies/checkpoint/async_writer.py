"""Background thread for one checkpoint at a time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

__all__ = ["AsyncWriter"]


# Where ranks fill the cores, the program goes first: a lower priority, and rests of this many times
# what a piece of the work took. A step takes 1.2 times as long meanwhile, 1.6 to 1.8 without the
# rests, and the writing 2.2 s instead of 0.6 (`benchmarks/checkpoints.py`).
_NICER = 10
_NICEST = 19  # there is no lower priority
_RESTS = 3.0
_LONGEST_REST = 0.1  # seconds: a device that is slow is not made slower


class AsyncWriter:
    """A thread that does one piece of work; whoever waits for it gets its error.

    At the end of the program Python waits for the thread, so that what was begun is finished.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._awaited = threading.Event()
        self._rested = 0.0  # when the last rest ended

    def start(self, work: Callable[[], object]) -> None:
        """Begin some work; what was begun before has been waited for."""
        assert self._thread is None
        self._awaited.clear()
        self._rested = time.perf_counter()

        def run() -> None:
            try:
                with contextlib.suppress(OSError):  # of this thread alone, on Linux
                    nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
                    os.setpriority(os.PRIO_PROCESS, 0, min(nice, _NICEST))
                work()
            except BaseException as error:  # handed over by `finish`
                self._error = error

        self._thread = threading.Thread(target=run, name="unisono-checkpoint")
        self._thread.start()

    def throttle(self) -> None:
        """In the work, after a piece of it: leave the core to the program, unless it waits."""
        worked = time.perf_counter() - self._rested
        self._awaited.wait(min(_RESTS * worked, _LONGEST_REST))
        self._rested = time.perf_counter()

    def wait(self) -> None:
        """Wait until the work is done, and leave its error to `finish`."""
        if self._thread is not None:
            self._awaited.set()
            self._thread.join()

    def finish(self) -> None:
        """Wait until the work is done, which rests no more; harmless when there is none.

        Raises:
            BaseException: what the work raised; once.
        """
        self.wait()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
