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
    """Common stop signal for threads.

    Any thread may request the stop, and all threads check for it regularly. Only the first request
    is used: if it has an exception, `join` raises it with its traceback.

    Args:
        clean_stop_exception_types: exceptions that mean a normal end and are not raised again; None
            for `OutOfRangeError`.

    Attributes:
        joined: whether `join` has finished.
        error: exception of the stop request, or None.
    """

    def __init__(
        self, clean_stop_exception_types: tuple[type[BaseException], ...] | None = None
    ) -> None:
        self._clean = (
            (OutOfRangeError,) if clean_stop_exception_types is None else clean_stop_exception_types
        )
        # Guards the first request and `joined`: a request after `join` must raise.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.joined = False
        self.error: BaseException | None = None
        self._threads: set[threading.Thread] = set()
        # By weak reference: a thread that has ended need not stay here.
        self._idle: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # only wait for the stop

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Request the stop of all threads; only the first request is used.

        Args:
            ex: reason: an exception or the result of `sys.exc_info()`; None for a normal end.

        Raises:
            BaseException: `ex` itself, unless it is a clean one, if `join` has finished and can no
                longer raise it.
        """
        error = ex[1] if isinstance(ex, tuple) else ex
        # A clean exception is a normal end, and stops all threads as well.
        if isinstance(error, self._clean):
            error = None
        with self._lock:
            if not self.joined or error is None:
                if not self._stop.is_set():
                    self.error = error
                    self._stop.set()
                return
        # Raised in the caller, since no `join` will report it any more.
        raise error

    def clear_stop(self) -> None:
        """Reset the coordinator: drop the stop request and its exception."""
        with self._lock:
            self.joined = False
            self.error = None
            self._stop.clear()

    def should_stop(self) -> bool:
        """Return whether a stop was requested."""
        return self._stop.is_set()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait for a stop request, at most `timeout` seconds; return whether there was one."""
        return self._stop.wait(timeout)

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Turn an exception inside the block into a stop request."""
        try:
            yield
        except BaseException as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread, *, waits_for_stop: bool = False) -> None:
        """Add a thread for `join` to wait for.

        Args:
            thread: the thread.
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
        """Wait until all threads have ended, at most a grace period after a stop request.

        Once all sources of queue runners are exhausted, so that the remaining threads only wait for
        the stop, `join` requests the stop.

        After each UNISONO_STALL_WARNING seconds it calls `stall_reason` of the threads that have
        this method, such as threads of a `QueueRunner`. It logs the first reason of each thread.

        Args:
            threads: threads to wait for, in addition to the registered ones.
            stop_grace_period_secs: seconds that threads get to end after a stop request.
            ignore_live_threads: do not raise if threads are still running after the grace period.

        Raises:
            BaseException: exception of the stop request, if it had one.
            RuntimeError: threads are still running after the grace period.
        """
        with self._lock:
            # A copy: threads that are registered during `join` are not waited for.
            waited = self._threads.union(threads or ())
        # Python cannot wait for a thread and an event at once: join threads with a short timeout,
        # and check the stop in between.
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
                        # Once per thread, as the reason rarely changes.
                        can_stall.discard(thread)
            # The first live thread; the next rounds join the rest.
            for thread in busy:
                if thread.is_alive():
                    thread.join(0.05)
                    break
        if any(thread.is_alive() for thread in waited):
            self.request_stop()  # releases threads that only wait for the stop
        # One deadline for all threads: periods per thread would add up.
        deadline = time.monotonic() + stop_grace_period_secs
        for thread in waited:
            # A thread that was never started cannot be joined.
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        alive = sorted(thread.name for thread in waited if thread.is_alive())
        with self._lock:
            # Under the lock of `request_stop`, which raises from now on.
            self.joined = True
            self._threads.clear()
            error = self.error
        # The first error explains more than threads that do not end.
        if error is not None:
            raise error
        if alive and not ignore_live_threads:
            raise RuntimeError(
                "Coordinator.join: stopped with threads still running "
                f"{stop_grace_period_secs} s after the request to stop: {' '.join(alive)}"
            )

    def raise_requested_exception(self) -> None:
        """Raise the exception of the stop request, if it had one."""
        if self.error is not None:
            raise self.error


class LooperThread(threading.Thread):
    """Thread that calls a function repeatedly until the coordinator stops.

    An exception in the function requests the stop. The thread is a daemon and registers itself.

    Args:
        coord: coordinator whose stop ends the loop.
        timer_interval_secs: seconds between the starts of two calls; None for no pause. The first
            call starts at once.
        target: function to call; None if `run_loop` is overridden.
        args: positional arguments of `target`.
        kwargs: keyword arguments of `target`.

    Raises:
        ValueError: `coord` is not a `Coordinator`, or arguments are passed without a target.
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
        # A daemon, so that a target that blocks does not keep the process.
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
        """Create and start a thread."""
        looper = cls(coord, timer_interval_secs, target, args, kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """Call `start_loop`, then `run_loop` until the stop, then `stop_loop`."""
        with self._coord.stop_on_exception():
            self.start_loop()
            # Due times are fixed, so that slow calls do not shift later ones.
            due = time.monotonic()
            while not self._coord.should_stop():
                self.run_loop()
                if self._interval is not None:
                    due += self._interval
                    # Ends at the stop, instead of sleeping through it.
                    self._coord.wait_for_stop(max(0.0, due - time.monotonic()))
            self.stop_loop()

    def start_loop(self) -> None:
        """Called once before the loop; override it."""

    def run_loop(self) -> None:
        """Called in each iteration; calls the target."""
        if self._function is not None:
            args, kwargs = self._arguments
            self._function(*args, **kwargs)

    def stop_loop(self) -> None:
        """Called once after the loop; override it."""
