"""Background threads: one way to start, stop and end them.

A subclass of `BackgroundThread` implements `_run`. Its thread

* starts when it is first needed, by `start`, as a daemon;
* stops within a time limit, by `stop`, unless it calls `stop` itself;
* is stopped at the exit of the program: the thread that started last stops first, and all threads
  share `EXIT_SECONDS`, within which they finish work that other ranks wait for;
* does not exist in a forked child, where `start` and `stop` do nothing.
"""

from __future__ import annotations

import abc
import os
import threading
import time
from functools import partial

from collectives.core.process_hooks import ExitStage, at_exit, call_all, in_child

__all__ = ["EXIT_SECONDS", "BackgroundThread"]

EXIT_SECONDS = 5.0
"""Seconds within which all background threads finish their work when the program exits."""

# A dict, because a set has no order; the values are unused.
_running: dict[BackgroundThread, None] = {}  # ordered by start


class BackgroundThread(abc.ABC):
    """A thread that runs `_run` from the first `start` to `stop`.

    Args:
        name: thread name after "unisono-".
    """

    def __init__(self, name: str) -> None:
        self._name = f"unisono-{name}"
        # Threads do not exist in a forked child, where the object still does.
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards the state that the thread waits for
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._exited = threading.Event()  # of the last thread

    @abc.abstractmethod
    def _run(self) -> None:
        """Do the work; return soon after `_stopping` was set."""

    def _wake(self) -> None:  # noqa: B027 (most threads wait for `_changed`)
        """Make `_run` see that `_stopping` was set, if it does not wait for `_changed`."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the process that owns the thread."""
        return os.getpid() != self._process

    def is_current(self) -> bool:
        """Return whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread, unless it was started or stopped before."""
        # Without the lock first: `start` runs in every request, and the thread usually exists.
        if self._thread is None and not self.is_forked:
            with self._changed:
                # Two threads may have passed the first test.
                if self._thread is None and not self._stopping:
                    self._start_thread()

    def _start_thread(self) -> None:
        self._exited = threading.Event()
        self._thread = threading.Thread(
            target=self._run_and_forget, args=(self._exited,), name=self._name, daemon=True
        )
        _running[self] = None  # first, because the thread removes it when it ends
        try:
            self._thread.start()
        except BaseException:  # such as no more threads
            self._thread = None
            del _running[self]
            raise

    def _run_and_forget(self, exited: threading.Event) -> None:
        try:
            self._run()
        finally:
            # After `nonblocking` has handed its work over, `_thread` is another thread.
            if self._thread in (None, threading.current_thread()):
                _running.pop(self, None)
            exited.set()

    def stop(self, timeout: float | None = None) -> bool:
        """Stop the thread, and wait for its end unless the caller is this thread.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            Whether the thread has ended, or will without further waiting.
        """
        # The thread belongs to the parent, and its condition may be locked for ever.
        if self.is_forked:
            return False
        with self._changed:
            # Set before `_wake`, so that a thread that wakes up sees it.
            self._stopping = True
            self._changed.notify_all()
        self._wake()
        return self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread; arguments and result as for `stop`."""
        thread = self._thread
        # A thread cannot wait for its own end.
        if thread is None or thread is threading.current_thread() or self.is_forked:
            return True
        # Not by `Thread.join` alone: if a signal handler raises in it, Python before 3.13 marks the
        # running thread as ended.
        if not self._exited.wait(timeout):
            return False
        thread.join()
        return True

    def stop_at_exit(self, timeout: float) -> None:
        """Stop because the program exits."""
        self.stop(timeout)


def _stop_all() -> None:
    # One limit for all threads, so that the exit of a program has a bound.
    deadline = time.monotonic() + EXIT_SECONDS

    def stop(thread: BackgroundThread) -> None:
        thread.stop_at_exit(max(0.0, deadline - time.monotonic()))

    # The last one first, because it may use the threads that existed when it started.
    call_all(partial(stop, thread) for thread in reversed(list(_running)))


at_exit(ExitStage.THREADS, _stop_all)
in_child(_running.clear)
