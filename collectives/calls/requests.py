"""Requests of asynchronous operations: the user's handle and its state.

`Communicator.allreduce_async` and similar methods, `isend` and `irecv` return a `Request` at once.
Its `RequestState` receives the outcome from the executor: a thread
(`collectives.operations.nonblocking`) or the progress engine (`collectives.p2p.progress_engine`).
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
    """State and outcome of one asynchronous operation.

    Args:
        name: name of the operation, for errors and warnings.
        drive: makes progress until the operation ends, for at most the given seconds; 0 polls once.
            None if another thread runs the operation.
    """

    def __init__(self, name: str, drive: Callable[[float | None], None] | None = None) -> None:
        self.name = name
        # Of the caller: the operation may run in another thread.
        self.origin = call_sites.current_origin()
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.trace: TracebackType | None = None  # of the operation's error
        # In a forked child the operation never completes.
        self.process = os.getpid()
        self.envelope: Envelope | None = None
        # Whether the program has waited for the request, or a warning has named it.
        self.settled = False
        self._drive = drive

    def __str__(self) -> str:
        return f"{self.name} at {self.origin.site}"

    def succeed(self, result: Any) -> None:
        """Store the result, unless `close` has cancelled the request."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Store the error, unless `close` has cancelled the request."""
        # Kept apart: `raise` in `Request.wait` extends the traceback of the error object.
        self.trace = error.__traceback__
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_exception(error)

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds; return whether the operation has ended."""
        if not self.future.done() and self._drive is not None:
            # The caller moves the messages itself, so a request completes without a thread.
            self._drive(timeout)
        elif timeout != 0:
            # Not `Future.exception`: its TimeoutError is indistinguishable from one that a signal
            # handler raises.
            limit = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            concurrent.futures.wait([self.future], limit)
        return self.future.done()


class Request(Generic[T]):
    """Handle of an operation started by `isend`, `irecv` or a method that ends in `_async`.

    Until the operation is done, do not change the array that you passed and do not read `out=`.
    Wait for every request: dropping a request that was not waited for logs a warning with its
    error, if any. Several threads may wait for one request, at once and repeatedly.
    """

    def __init__(self, job: RequestState) -> None:
        self._job = job

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        job = self._job
        # A poll, because messages may only move in calls of this rank.
        return job.future.done() or (job.process == os.getpid() and job.wait(0))

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the operation, and return its result.

        Ctrl-C, or any exception of a signal handler, interrupts the wait but not the operation.

        Args:
            timeout: seconds of this wait; None waits until the limit of the operation itself.

        Raises:
            CollectiveTimeout: the operation is not complete within `timeout`. It continues, and you
                may wait again.
            CollectiveError: an earlier request of this communicator failed (the error names it), or
                the communicator was closed.
            Exception: any error of the operation, with its traceback.
        """
        job = self._job
        if not self.complete(timeout):
            raise CollectiveTimeout(
                f"wait: {job} is not complete within {timeout:g} s, and continues"
            )
        error = job.future.exception()
        if error is None:
            result: T = job.future.result()
            return result
        try:
            # Restore the operation's traceback, because `raise` would add each wait's lines to it.
            raise error.with_traceback(job.trace)
        finally:
            del error, job, self  # the traceback refers to this frame: avoid a reference cycle

    def complete(self, timeout: float | None = None) -> bool:
        """Wait as `wait` does, and return whether the operation has ended, even with an error.

        An exception from this method concerns the wait, never the operation.

        Args:
            timeout: seconds of this wait, as for `wait`.

        Raises:
            CollectiveError: this process is a fork of the rank.
        """
        job = self._job
        if not job.future.done() and job.process != os.getpid():
            raise CollectiveError(f"wait: {job} runs in the parent, not in a forked child")
        done = job.wait(timeout)
        # From now on the program knows the outcome, so no warning names the request.
        job.settled = job.settled or done
        return done

    def exception(self) -> BaseException | None:
        """Return the error of a completed operation; None if it succeeded or is not complete."""
        if not self.done():
            return None
        self._job.settled = True
        return self._job.future.exception()

    @property
    def envelope(self) -> Envelope | None:
        """Source, tag, shape and dtype of the message of an `irecv`, once its header has arrived.

        None before that, and for other operations.
        """
        return self._job.envelope

    def add_done_callback(self, function: Callable[[Self], object]) -> None:
        """Call `function(request)` once when the operation is complete, with or without an error.

        If the operation is already complete, call it at once. Otherwise the thread that completes
        the operation calls it, and runs no other request meanwhile. Keep the function short, and do
        not wait for a later request in it. It may close the communicator, which waits for later
        requests. Functions run in the order in which you added them. An exception in a function is
        logged and dropped. Check the error of the operation with `exception` or `wait`.

        Example:
            >>> import collectives as cc
            >>> comm = cc.init()
            >>> sums = []
            >>> request = comm.allreduce_async(2.0)
            >>> request.add_done_callback(lambda request: sums.append(request.wait()))
            >>> request.wait()
            array(2.)
        """
        held = [self]  # keeps the request alive until completion; then emptied to break the cycle

        def call(future: concurrent.futures.Future[T]) -> None:
            # Taken from the list, so that nothing keeps the request alive after the call.
            request = held.pop()
            # With an error the program must look at it, or a warning names it.
            if future.exception() is None:
                request._job.settled = True
            function(request)

        self._job.future.add_done_callback(call)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._job}: {self._state()}>"

    def _state(self) -> str:
        future = self._job.future
        if not future.done():
            # Only requests of the request thread are marked as running.
            return "under way" if future.running() else "not begun"
        error = future.exception()
        return "done" if error is None else f"failed: {type(error).__name__}: {error}"

    def __del__(self) -> None:
        job = self._job
        # The parent of a forked child warns of its own requests.
        if not job.settled and job.process == os.getpid():
            job.settled = True
            log.warning("%s was never waited for (%s)", job, self._state())


def warn_unwaited(jobs: Sequence[RequestState]) -> None:
    """Warn of unfinished requests of a closed communicator that the program never waited for."""
    names = [str(job) for job in jobs if not job.settled]
    for job in jobs:
        job.settled = True
    if names:
        log.warning(
            "%d request%s not done when their communicator was closed: %s",
            len(names), "s" * (len(names) > 1), some(names),
        )  # fmt: skip
