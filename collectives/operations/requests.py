"""Operations that go on while the caller does something else.

`Communicator.allreduce_async` and its kind return a `Request` at once. One thread per communicator
carries out the requests, one after the other in the order of issue, on a private duplicate of the
communicator: it shares no message with the blocking operations, which may be called meanwhile.
(Requests of `isend` and `irecv` know no order: `collectives.operations.point_to_point`.)

    caller     allreduce_async(a)   allreduce_async(b)   barrier()   wait(a)   wait(b)
    thread            |------ allreduce a ------|------ allreduce b ------|

The thread starts at the first request, sleeps while there is none, and ends with the communicator.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from collectives.arrays import streams
from collectives.errors import CollectiveError, CollectiveTimeout, MismatchError, some
from collectives.operations import call_sites, groups
from collectives.operations.group import Group
from collectives.operations.heads import Envelope
from collectives.transport.transport import this_thread

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Job", "Progress", "Request", "asynchronous", "background"]

log = logging.getLogger(__name__)

# Seconds that closing, and the end of the program, wait for requests under way: a rank that does
# not need a result may leave early, and the others still need its part.
_DRAIN = 5.0

# Seconds within which an operation that waits sees that it shall stop.
_STOP = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class Job:
    """One operation under way, and what became of it.

    Args:
        name: of the operation, for errors and warnings.
        drive: moves it on for so many seconds at most, or until it is over; 0: once. None where
            another thread carries it out.
    """

    def __init__(self, name: str, drive: Callable[[float | None], None] | None = None) -> None:
        self.name = name
        self.origin = call_sites.origin()
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
            concurrent.futures.wait([self.future], timeout)
        return self.future.done()


class Request(Generic[T]):
    """An operation under way, started by a method that ends in `_async`, `isend` or `irecv`.

    The array that was given to it must not change, and `out=` must not be read, until it is done.
    A request must be waited for: one that is dropped before is named in a warning, with its error
    if it had one. Any thread may wait, several at once and more than once.
    """

    def __init__(self, job: Job) -> None:
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
        no other request meanwhile: let it be short, and let it wait for no later request. Functions
        are called in the order in which they were added. What one raises is logged, and that is
        all. An error of the operation has to be looked at, by `exception` or `wait`, there or
        elsewhere.

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


class _Task(NamedTuple):
    """A job, and what the thread has to do for it."""

    job: Job
    run: Callable[[Any], Any]


class Progress:
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
        job = Job(name)
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

    def close(self) -> None:
        """Wait for requests under way, and end the thread; closing twice is harmless.

        Requests that do not become complete within a few seconds are stopped, fail, and are named
        in one warning. *Collective.*
        """
        if os.getpid() == self._process and self._finish(_DRAIN) and self._private is not None:
            self._private.close()
            self._private = None

    def _finish(self, drain: float) -> bool:
        """Take no more requests, and tell whether all were done within `drain` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._tasks, drain)
            unfinished = [task.job for task in self._tasks if not task.job.future.done()]
            self._tasks.clear()
        names = [str(job) for job in unfinished if not job.settled]
        for job in unfinished:
            job.settled = True
            job.fail(CollectiveError(f"{job}: the communicator was closed before it was done"))
        if names:
            log.warning(
                "%d request%s not done when their communicator was closed: %s",
                len(names), "s" * (len(names) > 1), some(names),
            )  # fmt: skip
        if self._thread is not None:
            if unfinished:
                self._stop.set()
            self._thread.join(_STOP)
        return not unfinished

    def _start(self) -> None:
        self._private = self._duplicate()
        self._thread = threading.Thread(
            target=self._work, args=(self._private,), name="unisono-requests", daemon=True
        )
        self._thread.start()
        _started.add(self)

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
        call_sites.given.site, call_sites.given.entry = job.origin
        try:
            result = task.run(private)
        except BaseException as error:
            # After these the ranks are still in step, and the next request can be carried out.
            if not isinstance(error, (MismatchError, TypeError, ValueError)):
                self._failed = f"{job} failed: {type(error).__name__}: {error}"
            job.fail(error)
        else:
            job.succeed(result)


# Those whose threads were started.
_started: weakref.WeakSet[Progress] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """End the threads before the interpreter does; their communicators go with MPI."""
    give_up = time.monotonic() + _DRAIN
    for progress in list(_started):
        if progress._process == os.getpid():
            progress._finish(max(0.0, give_up - time.monotonic()))


def background(group: Group) -> Progress:
    """Make what carries out the requests of a group, which keeps it."""
    return Progress(lambda: groups.background(group))


def asynchronous(
    operation: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Group, P], Request[T]]:
    """Make the twin of a blocking operation that returns a `Request` at once.

    The operation is called with the same arguments on the private communicator; `timeout` begins
    when it is its turn.
    """
    name = f"{operation.__name__}_async"

    @functools.wraps(operation)
    def start(group: Group, /, *args: P.args, **kwargs: P.kwargs) -> Request[T]:
        ordered = streams.order((*args, *kwargs.values()))

        def run(private: Any) -> T:
            ordered()  # after what this thread's streams still do for the arrays
            return operation(private, *args, **kwargs)

        return group.kept(background).submit(name, run)

    start.__name__ = name
    start.__qualname__ = f"{operation.__qualname__}_async"
    start.__doc__ = f"""Start `{operation.__name__}`, and return a `Request` for its result.

    *Collective*: all ranks start the same requests in the same order; blocking operations may be
    called between them in any order. Arguments, result and errors as `{operation.__name__}`;
    `timeout` begins when the requests issued before are done. The array must not change before the
    request is done.
    """
    return start
