"""Requests of asynchronous operations: the user's handle and its state.

`Communicator.allreduce_async` and its kind return a `Request` at once, and so do `isend` and
`irecv`. Behind it is a `RequestState`: what carries out the operation hands over there what becomes
of it, a thread (`collectives.operations.nonblocking`) or whoever moves the messages between two
ranks (`collectives.p2p.progress_engine`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from collectives.core.errors import CollectiveError, CollectiveTimeout, some
from collectives.tracing import call_sites
from collectives.transport.header import Envelope

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RequestState", "Request", "warn_unwaited"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestState:
    """One operation under way, and what became of it.

    Args:
        name: of the operation, for errors and warnings.
        drive: moves it on for so many seconds at most, or until it is over; 0: once. None where
            another thread carries it out.
    """

    def __init__(self, name: str, drive: Callable[[float | None], None] | None = None) -> None:
        self.name = name
        self.origin = call_sites.current_origin()
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.trace: TracebackType | None = None  # of the operation's error
        self.process = os.getpid()
        self.envelope: Envelope | None = None
        # Whether someone has waited for it, or a warning has named it.
        self.settled = False
        self._drive = drive

    def __str__(self) -> str:
        return f"{self.name} at {self.origin.site}"

    def succeed(self, result: Any) -> None:
        """Hand over the result, unless `close` gave up before."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Hand over an error, unless `close` gave up before."""
        self.trace = error.__traceback__
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_exception(error)

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is over, for so many seconds at most, and tell whether it is."""
        if not self.future.done() and self._drive is not None:
            self._drive(timeout)
        elif timeout != 0:
            # `Future.exception` would say by a TimeoutError that the time is over, which a signal
            # handler may raise as well.
            limit = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            concurrent.futures.wait([self.future], limit)
        return self.future.done()


class Request(Generic[T]):
    """An operation under way, started by a method that ends in `_async`, `isend` or `irecv`.

    The array that was given to it must not change, and `out=` must not be read, until it is done.
    A request must be waited for: one that is dropped before is named in a warning, with its error
    if it had one. Any thread may wait, several at once and more than once.
    """

    def __init__(self, job: RequestState) -> None:
        self._job = job

    def done(self) -> bool:
        """Tell whether `wait` would return, or raise, at once."""
        job = self._job
        return job.future.done() or (job.process == os.getpid() and job.wait(0))

    def wait(self, timeout: float | None = None) -> T:
        """Wait until the operation is complete, and return what it returned.

        Ctrl-C, or whatever a signal handler raises, interrupts a wait; the operation goes on.

        Args:
            timeout: seconds that this wait may take, no limit but the operation's own if None.

        Raises:
            CollectiveTimeout: the operation is not complete within `timeout`; it goes on, and may
                be waited for again.
            CollectiveError: an earlier request of this communicator failed, which the error names,
                or the communicator was closed.
            Exception: whatever the operation raised, with its traceback.
        """
        job = self._job
        if not self.complete(timeout):
            raise CollectiveTimeout(
                f"wait: {job} is not complete within {timeout:g} s, and goes on"
            )
        error = job.future.exception()
        if error is None:
            result: T = job.future.result()
            return result
        try:
            # Every wait adds its own lines to those of the operation, not to each other's.
            raise error.with_traceback(job.trace)
        finally:
            del error, job, self  # the traceback refers to this frame: no circle

    def complete(self, timeout: float | None = None) -> bool:
        """Wait as `wait`, and tell whether the operation is complete, whatever came of it.

        So an error that is raised here is one of the wait, never of the operation.

        Args:
            timeout: as for `wait`.

        Raises:
            CollectiveError: this process is a fork of the rank.
        """
        job = self._job
        if not job.future.done() and job.process != os.getpid():
            raise CollectiveError(f"wait: {job} goes on in the parent, not in a forked child")
        done = job.wait(timeout)
        job.settled = job.settled or done
        return done

    def exception(self) -> BaseException | None:
        """Return the error of an operation that is complete; None if it has none, or goes on."""
        if not self.done():
            return None
        self._job.settled = True
        return self._job.future.exception()

    @property
    def envelope(self) -> Envelope | None:
        """Source, tag, shape and dtype of what `irecv` receives, once its head has come.

        None before, and for other operations.
        """
        return self._job.envelope

    def add_done_callback(self, function: Callable[[Self], object]) -> None:
        """Call `function(request)` once when the operation is complete, whatever came of it.

        At once if it is complete already; else in the thread that completes it, which carries out
        no other request meanwhile: let it be short, and let it wait for no later request. It may
        close the communicator, which waits for the later requests as elsewhere. Functions are
        called in the order in which they were added. What one raises is logged, and that is all. An
        error of the operation has to be looked at, by `exception` or `wait`, there or elsewhere.

        Example:
            >>> import collectives as cc
            >>> comm = cc.init()
            >>> sums = []
            >>> request = comm.allreduce_async(2.0)
            >>> request.add_done_callback(lambda request: sums.append(request.wait()))
            >>> request.wait()
            array(2.)
        """
        held = [self]  # until it is complete, since somebody will look; no circle afterwards

        def call(future: concurrent.futures.Future[T]) -> None:
            request = held.pop()
            if future.exception() is None:
                request._job.settled = True
            function(request)

        self._job.future.add_done_callback(call)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._job}: {self._state()}>"

    def _state(self) -> str:
        future = self._job.future
        if not future.done():
            return "under way" if future.running() else "not begun"
        error = future.exception()
        return "done" if error is None else f"failed: {type(error).__name__}: {error}"

    def __del__(self) -> None:
        job = self._job
        if not job.settled and job.process == os.getpid():
            job.settled = True
            log.warning("nobody waited for %s (%s)", job, self._state())


def warn_unwaited(jobs: Sequence[RequestState]) -> None:
    """Warn of what nobody has waited for, and is not done when its communicator is closed."""
    names = [str(job) for job in jobs if not job.settled]
    for job in jobs:
        job.settled = True
    if names:
        log.warning(
            "%d request%s not done when their communicator was closed: %s",
            len(names), "s" * (len(names) > 1), some(names),
        )  # fmt: skip
