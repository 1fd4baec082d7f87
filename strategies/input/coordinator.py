"""`Coordinator`: stops threads together and raises their first exception."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from strategies.errors import OutOfRangeError
from strategies.rpc.wait_limits import current_settings

__all__ = ["Coordinator", "LooperThread"]

_log = logging.getLogger(__name__)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class Coordinator:
    """A common stop sign for threads.

    Any thread may ask all to stop, and all ask from time to time whether they should. The first
    request counts: if it carries an exception, `join` raises it with its traceback.

    Args:
        clean_stop_exception_types: exceptions that mean a normal end and are not raised again;
            `OutOfRangeError` if None.

    Attributes:
        joined: whether `join` has come to its end.
        error: the exception of the request to stop, if it had one.
    """

    def __init__(
        self, clean_stop_exception_types: tuple[type[BaseException], ...] | None = None
    ) -> None:
        self._clean = (
            (OutOfRangeError,) if clean_stop_exception_types is None else clean_stop_exception_types
        )
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.joined = False
        self.error: BaseException | None = None
        self._threads: set[threading.Thread] = set()
        self._idle: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # they wait for the stop

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Ask all threads to stop; only the first request matters.

        Args:
            ex: why: an exception or what `sys.exc_info()` gives; None for a normal end.

        Raises:
            BaseException: `ex` itself, unless it is a clean one, if `join` is over and so nobody
                else would see it.
        """
        error = ex[1] if isinstance(ex, tuple) else ex
        if isinstance(error, self._clean):
            error = None
        with self._lock:
            if not self.joined or error is None:
                if not self._stop.is_set():
                    self.error = error
                    self._stop.set()
                return
        raise error

    def clear_stop(self) -> None:
        """Begin anew: nobody has asked to stop, and no exception is kept."""
        with self._lock:
            self.joined = False
            self.error = None
            self._stop.clear()

    def should_stop(self) -> bool:
        """Return whether anybody has asked to stop."""
        return self._stop.is_set()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Sleep until somebody asks to stop, or for `timeout` seconds; return whether any did."""
        return self._stop.wait(timeout)

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Turn an exception inside the block into a request to stop."""
        try:
            yield
        except BaseException as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread, *, waits_for_stop: bool = False) -> None:
        """Let `join` also wait for this thread.

        Args:
            thread: the thread to wait for.
            waits_for_stop: whether the thread only waits for the stop. Once all other threads have
                ended, `join` requests the stop.
        """
        with self._lock:
            self._threads.add(thread)
            if waits_for_stop:
                self._idle.add(thread)

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        *,
        stop_grace_period_secs: float = 120.0,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until all threads have ended, or a while after somebody asked to stop.

        Once all sources of queue runners have ended, so that the remaining threads only wait for
        the stop, it requests the stop.

        After each `UNISONO_STALL_WARNING` seconds it calls the method `stall_reason` of threads
        that have one, such as those of a `QueueRunner`, and logs the first reason of each thread.

        Args:
            threads: to wait for besides those that are registered.
            stop_grace_period_secs: seconds that threads get to end after a request to stop.
            ignore_live_threads: say nothing about threads that are still running then.

        Raises:
            BaseException: the one of the first request to stop, if it had one.
            RuntimeError: threads are still running after that time.
        """
        with self._lock:
            waited = self._threads.union(threads or ())
        # A thread that ends and a stop that is asked for are two events, and one can only wait for
        # one of them: look at the other a few times per second.
        checked = time.monotonic()
        can_stall = {thread for thread in waited if hasattr(thread, "stall_reason")}
        busy = [thread for thread in waited if thread not in self._idle]
        while not self._stop.is_set() and any(thread.is_alive() for thread in busy):
            if can_stall and time.monotonic() - checked > current_settings().stall_warning:
                checked = time.monotonic()
                for thread in [thread for thread in can_stall if thread.is_alive()]:
                    why = thread.stall_reason()
                    if why is not None:
                        _log.warning("Coordinator.join: %s (thread: %s)", why, thread.name)
                        can_stall.discard(thread)
            for thread in busy:
                if thread.is_alive():
                    thread.join(0.05)
                    break
        if any(thread.is_alive() for thread in waited):
            self.request_stop()  # for the threads that wait for it
        # One deadline for all of them: a grace for each would add up.
        deadline = time.monotonic() + stop_grace_period_secs
        for thread in waited:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        alive = sorted(thread.name for thread in waited if thread.is_alive())
        with self._lock:
            self.joined = True
            self._threads.clear()
            error = self.error
        if error is not None:
            raise error
        if alive and not ignore_live_threads:
            raise RuntimeError(
                "Coordinator.join: stopped with threads still running "
                f"{stop_grace_period_secs} s after the request to stop: {' '.join(alive)}"
            )

    def raise_requested_exception(self) -> None:
        """Raise the exception of the request to stop, if there was one."""
        if self.error is not None:
            raise self.error


class LooperThread(threading.Thread):
    """A thread that calls a function again and again until the coordinator says stop.

    An exception in it asks the coordinator to stop. It is a daemon and registers itself.

    Args:
        coord: whose stop ends the loop.
        timer_interval_secs: seconds from the beginning of one call to that of the next; None to
            call back to back. The first call comes at once.
        target: function to call; None if `run_loop` is overridden.
        args: positional arguments of `target`.
        kwargs: keyword arguments of `target`.

    Raises:
        ValueError: no coordinator, or arguments without a target.
    """

    def __init__(
        self,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(coord, Coordinator):
            raise ValueError(f"LooperThread: expected a Coordinator, got {type(coord).__name__}")
        if target is None and (args or kwargs):
            raise ValueError("LooperThread: args and kwargs need a target")
        super().__init__(daemon=True)
        self._coord = coord
        self._interval = timer_interval_secs
        self._function = target
        self._arguments = (tuple(args), dict(kwargs or {}))
        coord.register_thread(self)

    @classmethod
    def loop(
        cls,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> LooperThread:
        """Make a thread and start it."""
        looper = cls(coord, timer_interval_secs, target, args, kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """Call `start_loop`, then `run_loop` until the stop, then `stop_loop`."""
        with self._coord.stop_on_exception():
            self.start_loop()
            due = time.monotonic()
            while not self._coord.should_stop():
                self.run_loop()
                if self._interval is not None:
                    due += self._interval
                    self._coord.wait_for_stop(max(0.0, due - time.monotonic()))
            self.stop_loop()

    def start_loop(self) -> None:
        """Called once before the loop; to be overridden."""

    def run_loop(self) -> None:
        """Called in each round; calls the target."""
        if self._function is not None:
            args, kwargs = self._arguments
            self._function(*args, **kwargs)

    def stop_loop(self) -> None:
        """Called once after the loop; to be overridden."""
