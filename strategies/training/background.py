"""One piece of work at a time, beside the program."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

__all__ = ["Background"]


# Where ranks fill the cores, the program goes first: a step takes at most 1.3 times as long
# meanwhile, instead of 1.6, and the writing about twice as long (`benchmarks/checkpoints.py`).
_NICER = 10
_NICEST = 19  # there is no lower priority


class Background:
    """A thread that does one piece of work; whoever waits for it gets its error.

    At the end of the program Python waits for the thread, so that what was begun is finished.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin some work; what was begun before has been waited for."""
        assert self._thread is None

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

    def finish(self) -> None:
        """Wait until the work is done; harmless when there is none.

        Raises:
            BaseException: what the work raised; once.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
