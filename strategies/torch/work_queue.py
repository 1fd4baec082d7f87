"""Work queue of a process group: operations in order, by any thread.

What has to be complete when it returns is carried out by the thread that calls, unless others are
in line; then it stands in line, too. What is asynchronous stands in line, and a thread carries it
out; or, sooner, the first thread that waits for something in line. So all ranks carry out their
operations in the order in which they were called, and a wait that follows at once costs no change
of thread.

    caller    all_reduce(a)      all_reduce(b, async_op=True)   wait(b)
              |-- here --|                                      |-- here, or by the thread --|

Callbacks run where the operation was carried out, before the next one. An operation that one of
them calls is carried out at once: whoever is in line would wait for ever.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import distributed

from collectives import extend
from strategies.torch.work import translated

__all__ = ["WorkQueue", "QueuedOperation"]

# Seconds that the end of the program waits for what is in line.
_DRAIN = 5.0


class QueuedOperation:
    """An operation in line; a `strategies.torch.work.WorkSource`.

    Args:
        line: in which it is.
        run: carries it out.
    """

    source = -1

    def __init__(self, line: WorkQueue, run: Callable[[], Any]) -> None:
        self._line = line
        self._run: Callable[[], Any] | None = run
        self._origin = extend.current_origin()  # whichever thread carries it out
        self._over = threading.Event()
        self._callbacks: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether it is over."""
        return self._over.is_set()

    def finish(self, timeout: float | None) -> bool:
        """Wait until it is over, or carry it out; tells whether it is over."""
        if timeout is None and not self._over.is_set():
            self._line.run_in_caller(self)
        return self._over.wait(timeout)

    def call_back(self, function: Callable[[], Any]) -> None:
        """Call a function when it is over: now, or by the thread that carries it out."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(function)
                return
        function()

    def carry_out(self) -> None:
        """Carry it out."""
        run, self._run = self._run, None  # whose arrays would live on with a forgotten future
        assert run is not None
        try:
            with extend.calls_from(self._origin):
                run()
        except BaseException as error:
            self.error = translated(error)
        while True:
            with self._lock:
                if not self._callbacks:
                    self._over.set()
                    return
                function = self._callbacks.pop(0)
            function()


class WorkQueue:
    """Where the operations of one process group stand in line."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._turn = threading.Lock()  # held by the thread that carries something out
        self._runner = 0  # its number, where that is from the line
        self._jobs: deque[QueuedOperation] = deque()  # the first one may be under way
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, run: Callable[[], Any]) -> None:
        """Carry out an operation after those in line; returns when it is complete.

        Raises:
            Exception: what it raises.
        """
        self._check_process()
        if not self._jobs and self._turn.acquire(blocking=False):
            try:
                run()
            except Exception as error:
                raise translated(error) from error.__cause__
            finally:
                self._turn.release()
        elif self._runner == threading.get_ident():  # a callback of the line's own
            run()
        else:
            operation = self.submit(run)
            operation.finish(None)
            if operation.error is not None:
                raise operation.error

    def submit(self, run: Callable[[], Any]) -> QueuedOperation:
        """Put an operation in line, and return at once."""
        self._check_process()
        operation = QueuedOperation(self, run)
        if self._runner == threading.get_ident():
            operation.carry_out()
            return operation
        with self._changed:
            if self._closed:
                raise distributed.DistBackendError("the process group was destroyed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="unisono-process-group", daemon=True
                )
                self._thread.start()
                _started.add(self)
            self._jobs.append(operation)
            self._changed.notify()
        return operation

    def run_in_caller(self, last: QueuedOperation) -> None:
        """Carry out what is in line up to this operation, unless another thread is about it."""
        if self._runner != threading.get_ident() and self._turn.acquire(blocking=False):
            try:
                self._carry_out(last)
            finally:
                self._turn.release()

    def close(self, drain: float = _DRAIN) -> bool:
        """Wait for what is in line, and end the thread; tells whether that was in time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(drain)
            return not self._thread.is_alive()
        return True

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise distributed.DistBackendError(
                "a forked child is not a rank: call this in the parent"
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
            with self._turn:
                self._carry_out(None)

    def _carry_out(self, last: QueuedOperation | None) -> None:
        """Carry out what is in line; the caller has the turn."""
        self._runner = threading.get_ident()
        try:
            while self._jobs and not (last is not None and last.done()):
                self._jobs[0].carry_out()
                self._jobs.popleft()
        finally:
            self._runner = 0


_started: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Let threads end before the interpreter does: other ranks may need what is in line."""
    give_up = time.monotonic() + _DRAIN
    for line in list(_started):
        if line._process == os.getpid():
            line.close(max(0.0, give_up - time.monotonic()))
