"""Asynchronous operations, run by one thread per communicator.

The thread runs the requests of `Communicator.allreduce_async` and similar methods in the order of
issue. It uses a private duplicate of the communicator, whose messages cannot match those of
blocking operations, so you may call both at once. Requests of `isend` and `irecv` are unordered
(`collectives.p2p.endpoint`).

    caller     allreduce_async(a)   allreduce_async(b)   barrier()   wait(a)   wait(b)
    thread            |------ allreduce a ------|------ allreduce b ------|

The thread starts with the first request, sleeps without requests, and ends with the communicator.
A callback that closes the communicator makes this thread wait for the later requests, so a new
thread runs them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from collectives.arrays import streams
from collectives.calls.group import Group
from collectives.calls.requests import Request, RequestState, warn_unwaited
from collectives.core.background_threads import EXIT_SECONDS, BackgroundThread
from collectives.core.errors import CollectiveError
from collectives.operations import split
from collectives.tracing import call_sites
from collectives.transport.transport import this_thread

__all__ = ["RequestThread", "nonblocking_twin", "request_thread"]

# Seconds until a waiting operation notices the request to stop.
_STOP = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class _Task(NamedTuple):
    """A request in the queue: its state and its operation."""

    job: RequestState
    run: Callable[[Any], Any]


class RequestThread(BackgroundThread):
    """Thread that runs the requests of one communicator in the order of issue.

    Args:
        duplicate: creates the private communicator; called once, by the thread that submits the
            first request. *Collective.*
    """

    def __init__(self, duplicate: Callable[[], Group]) -> None:
        super().__init__("requests")
        self._duplicate = duplicate
        self._duplicating = threading.Lock()
        self._private: Group | None = None
        self._stop_operation = threading.Event()
        self._tasks: deque[_Task] = deque()  # the first one may be in progress
        self._failed: str | None = None  # why the communicator is unusable

    def submit(self, name: str, run: Callable[[Any], T]) -> Request[T]:
        """Queue `run(private communicator)` for the thread, and return its request.

        Args:
            name: name of the operation, for errors and warnings.
            run: a blocking operation.

        Raises:
            CollectiveError: the communicator was closed, or this process is a fork of the rank.
        """
        job = RequestState(name)
        if self.is_forked:
            raise CollectiveError(f"{job}: a forked child is not a rank: start it in the parent")
        # A lock of its own: duplicating is collective and may take long, and `_changed` is needed
        # meanwhile.
        with self._duplicating:
            if self._private is None and not self._stopping:
                # By the calling thread, because all ranks duplicate at the same place of the
                # program.
                self._private = self._duplicate()
        self.start()
        # Checked again, because `close` may have run since.
        with self._changed:
            if self._stopping:
                raise CollectiveError(f"{job}: the communicator was closed")
            self._tasks.append(_Task(job, run))
            self._changed.notify_all()
        return Request(job)

    def close_nowait(self) -> None:
        """Refuse further requests, and end the thread after the queued ones; does not wait."""
        if not self.is_forked:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()

    def close(self) -> bool:
        """Wait for submitted requests, and end the thread; closing twice is harmless.

        Requests that are not complete within a few seconds are stopped and fail; one warning names
        them. *Collective.*

        Returns:
            Whether all requests were complete. If not, an operation may still use its arrays and
            ranks.
        """
        if self.is_forked:
            return False
        # First the drain: the thread may still use the private group.
        finished = self._drain(EXIT_SECONDS)
        with self._duplicating:
            private, self._private = self._private, None
        # An unfinished operation may still receive into its memory, so the group is not closed.
        if finished and private is not None:
            private.close()
        return finished

    def stop_at_exit(self, timeout: float) -> None:
        """Complete the requests, because other ranks may need them; MPI frees the communicator."""
        self._drain(timeout)

    def _drain(self, timeout: float) -> bool:
        """Refuse further requests; return whether all complete within `timeout` seconds."""
        with self._changed:
            self._stopping = True
            if self.is_current():
                self._hand_over()
            self._changed.notify_all()
            # The thread removes a task after its end, so an empty queue means that all are done.
            self._changed.wait_for(lambda: not self._tasks, timeout)
            unfinished = [task.job for task in self._tasks if not task.job.future.done()]
            self._tasks.clear()
        warn_unwaited(unfinished)
        for job in unfinished:
            job.fail(CollectiveError(f"{job}: the communicator was closed before it was done"))
        # Only now, so that the requests keep this error instead of that of the stopped operation.
        if unfinished:
            self._stop_operation.set()
        self.stop(_STOP)
        return not unfinished

    def _hand_over(self) -> None:
        """Move the later requests to a new thread, because a callback closes the communicator."""
        if self._tasks:  # empty if `_drain` has given up
            # The task whose callback runs this; its outcome is delivered already.
            self._tasks.popleft()
        self._thread = None
        if self._tasks:
            self._start_thread()

    def _run(self) -> None:
        # Deadlines of this thread check the event, so that `_drain` can end a wait.
        this_thread.stop = self._stop_operation
        private = self._private
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._stopping)
                if not self._tasks:
                    return
                # Left in the queue while it runs, so that `_drain` waits for it.
                task = self._tasks[0]
            self._perform(task, private)
            with self._changed:
                # The new thread owns the queue now.
                if not self.is_current():
                    return  # a callback has closed the communicator
                if self._tasks:  # empty if `_drain` has given up
                    self._tasks.popleft()
                self._changed.notify_all()
            del task  # its arrays and its result may be large

    def _perform(self, task: _Task, private: Group | None) -> None:
        job = task.job
        if self._failed is not None:
            job.fail(CollectiveError(f"{job}: not carried out, since {self._failed}"))
            return
        assert private is not None
        job.future.set_running_or_notify_cancel()
        try:
            # Errors and records name the line that made the request, not this thread.
            with call_sites.calls_from(job.origin):
                result = task.run(private)
        except BaseException as error:
            # After an error before any communication the ranks are still in step.
            if private.unusable is not None:
                self._failed = f"{job} failed: {type(error).__name__}: {error}"
            job.fail(error)
        else:
            job.succeed(result)


def request_thread(group: Group) -> RequestThread:
    """Create the request thread of a group; the group owns it."""
    group_ref = weakref.ref(group)  # weak, so that the program can drop the group

    def duplicate() -> Group:
        whole = group_ref()
        assert whole is not None  # the caller of `submit` holds it
        return split.background_group(whole)

    thread = RequestThread(duplicate)
    weakref.finalize(group, thread.close_nowait).atexit = False
    return thread


def nonblocking_twin(
    operation: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Group, P], Request[T]]:
    """Return the asynchronous variant of a blocking operation, which returns a `Request` at once.

    The thread calls the operation with the same arguments on the private communicator; `timeout`
    starts when the operation starts.
    """
    name = f"{operation.__name__}_async"

    @functools.wraps(operation)
    def start(group: Group, /, *args: P.args, **kwargs: P.kwargs) -> Request[T]:
        # On the caller's thread: streams are per thread, and the caller's have the producing work.
        ordered = streams.capture_streams((*args, *kwargs.values()))

        def run(private: Any) -> T:
            try:
                ordered()  # wait for this thread's streams, which may still write the arrays
            except Exception as error:  # raised on this rank only, so fail the group
                private.mark_failed(name, error)
                raise
            return operation(private, *args, **kwargs)

        return group.state_of(request_thread).submit(name, run)

    start.__name__ = name
    start.__qualname__ = f"{operation.__qualname__}_async"
    start.__doc__ = f"""Start `{operation.__name__}`, and return a `Request` for its result.

    *Collective*: all ranks start the same requests in the same order; blocking operations may be
    called between them in any order. Arguments, result and errors as `{operation.__name__}`;
    `timeout` begins when the requests issued before are done. The array must not change before the
    request is done.
    """
    return start
