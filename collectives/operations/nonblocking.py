"""Asynchronous operations, run by one thread per communicator.

One thread per communicator carries out the requests of `Communicator.allreduce_async` and its kind,
one after the other in the order of issue, on a private duplicate of the communicator: it shares no
message with the blocking operations, which may be called meanwhile. (Requests of `isend` and
`irecv` know no order: `collectives.p2p.endpoint`.)

    caller     allreduce_async(a)   allreduce_async(b)   barrier()   wait(a)   wait(b)
    thread            |------ allreduce a ------|------ allreduce b ------|

The thread starts at the first request, sleeps while there is none, and ends with the communicator.
Where a callback closes that, it is this thread that waits for the later requests, so another one
carries them out.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from collectives.arrays import streams
from collectives.calls.group import Group
from collectives.calls.requests import Request, RequestState, warn_unwaited
from collectives.core.errors import CollectiveError
from collectives.operations import split
from collectives.tracing import call_sites
from collectives.transport.transport import this_thread

__all__ = ["RequestThread", "nonblocking_twin", "request_thread"]

log = logging.getLogger(__name__)

# Seconds that closing, and the end of the program, wait for requests under way: a rank that does
# not need a result may leave early, and the others still need its part.
_DRAIN = 5.0

# Seconds within which an operation that waits sees that it shall stop.
_STOP = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class _Task(NamedTuple):
    """A job, and what the thread has to do for it."""

    job: RequestState
    run: Callable[[Any], Any]


class RequestThread:
    """Carries out the requests of one communicator, in the order of issue.

    Args:
        duplicate: makes the private communicator; called once, at the first request, by the thread
            that makes it. *Collective.*
    """

    def __init__(self, duplicate: Callable[[], Group]) -> None:
        self._duplicate = duplicate
        self._private: Group | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._stop = threading.Event()
        # Guards what follows, and is notified of every change of it.
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()  # in the order of issue; the first is under way
        self._closed = False
        self._failed: str | None = None  # which request made the communicator unusable, and how

    def submit(self, name: str, run: Callable[[Any], T]) -> Request[T]:
        """Let the thread call `run(private communicator)`.

        Args:
            name: of the operation, for errors and warnings.
            run: a blocking operation.

        Raises:
            CollectiveError: the communicator was closed, or this process is a fork of the rank.
        """
        job = RequestState(name)
        if os.getpid() != self._process:
            raise CollectiveError(f"{job}: a forked child is not a rank: start it in the parent")
        with self._starting:
            if self._thread is None and not self._closed:
                self._start()
        with self._changed:
            if self._closed:
                raise CollectiveError(f"{job}: the communicator was closed")
            self._tasks.append(_Task(job, run))
            self._changed.notify_all()
        return Request(job)

    def close_nowait(self) -> None:
        """Refuse further requests, and let the thread end after those under way; does not wait."""
        if os.getpid() == self._process:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def close(self) -> bool:
        """Wait for requests under way, and end the thread; closing twice is harmless.

        Requests that do not become complete within a few seconds are stopped, fail, and are named
        in one warning. *Collective.*

        Returns:
            Whether all were complete; else an operation may still use its arrays and its ranks.
        """
        if os.getpid() != self._process:
            return False
        finished = self._finish(_DRAIN)
        with self._starting:
            private, self._private = self._private, None
        if finished and private is not None:
            private.close()
        return finished

    def _finish(self, drain: float) -> bool:
        """Take no more requests, and tell whether all were done within `drain` seconds."""
        with self._changed:
            self._closed = True
            if threading.current_thread() is self._thread:
                self._hand_over()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._tasks, drain)
            unfinished = [task.job for task in self._tasks if not task.job.future.done()]
            self._tasks.clear()
        warn_unwaited(unfinished)
        for job in unfinished:
            job.fail(CollectiveError(f"{job}: the communicator was closed before it was done"))
        if self._thread is not None:
            if unfinished:
                self._stop.set()
            self._thread.join(_STOP)
        return not unfinished

    def _start(self) -> None:
        self._private = self._duplicate()
        self._thread = self._started_thread(self._private)
        _started.add(self)

    def _started_thread(self, private: Group) -> threading.Thread:
        thread = threading.Thread(
            target=self._work, args=(private,), name="unisono-requests", daemon=True
        )
        thread.start()
        return thread

    def _hand_over(self) -> None:
        """Leave what comes after the first request, in whose callback this is, to a new thread."""
        if self._tasks:  # empty if `close` has given up
            self._tasks.popleft()
        left = self._private if self._tasks else None
        self._thread = None if left is None else self._started_thread(left)

    def _work(self, private: Group) -> None:
        this_thread.stop = self._stop
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks[0]
            self._carry_out(task, private)
            with self._changed:
                if self._thread is not threading.current_thread():
                    return  # a callback has closed
                if self._tasks:  # empty if `close` has given up
                    self._tasks.popleft()
                self._changed.notify_all()
            del task  # it holds arrays and the result, perhaps the last ones for a long time

    def _carry_out(self, task: _Task, private: Group) -> None:
        job = task.job
        if self._failed is not None:
            job.fail(CollectiveError(f"{job}: not carried out, since {self._failed}"))
            return
        job.future.set_running_or_notify_cancel()
        try:
            with call_sites.calls_from(job.origin):
                result = task.run(private)
        except BaseException as error:
            # What a rank refuses alone leaves the ranks in step: the next one can be carried out.
            if private.unusable is not None:
                self._failed = f"{job} failed: {type(error).__name__}: {error}"
            job.fail(error)
        else:
            job.succeed(result)


# Those whose threads were started.
_started: weakref.WeakSet[RequestThread] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """End the threads before the interpreter does; their communicators go with MPI."""
    give_up = time.monotonic() + _DRAIN
    for progress in list(_started):
        if progress._process == os.getpid():
            progress._finish(max(0.0, give_up - time.monotonic()))


def request_thread(group: Group) -> RequestThread:
    """Make what carries out the requests of a group, which keeps it."""
    group_ref = weakref.ref(group)  # the thread must not keep a group that the program drops

    def duplicate() -> Group:
        whole = group_ref()
        assert whole is not None  # the caller of `submit` holds it
        return split.background_group(whole)

    progress = RequestThread(duplicate)
    weakref.finalize(group, progress.close_nowait).atexit = False
    return progress


def nonblocking_twin(
    operation: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Group, P], Request[T]]:
    """Make the twin of a blocking operation that returns a `Request` at once.

    The operation is called with the same arguments on the private communicator; `timeout` begins
    when it is its turn.
    """
    name = f"{operation.__name__}_async"

    @functools.wraps(operation)
    def start(group: Group, /, *args: P.args, **kwargs: P.kwargs) -> Request[T]:
        ordered = streams.capture_streams((*args, *kwargs.values()))

        def run(private: Any) -> T:
            try:
                ordered()  # after what this thread's streams still do for the arrays
            except Exception as error:  # of which the other ranks do not hear
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
