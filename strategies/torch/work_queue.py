"""Work queue of a process group: operations run in the order of their calls, in any thread.

A blocking call runs in the calling thread, or is queued if other operations are queued. An
asynchronous call is queued. A background thread runs the queued operations, or the first thread
that waits for one of them, whichever is earlier. So all ranks run their operations in the same
order, and a wait right after the call does not switch threads::

    caller    all_reduce(a)      all_reduce(b, async_op=True)   wait(b)
              |-- here --|                                      |-- here, or in the thread --|

Callbacks run in the thread that has run the operation, before the next operation. An operation
that a callback calls runs at once: in the queue it would wait for the callback.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import distributed

from collectives import extend
from strategies.torch.work import translated

__all__ = ["WorkQueue", "QueuedOperation"]


class QueuedOperation:
    """A queued operation; a `strategies.torch.work.WorkSource`.

    Args:
        queue: its queue.
        run: runs the operation.
    """

    source = -1

    def __init__(self, queue: WorkQueue, run: Callable[[], Any]) -> None:
        self._queue = queue
        self._run: Callable[[], Any] | None = run
        self._origin = extend.current_origin()  # for errors, whichever thread raises them
        self._over = threading.Event()
        self._callbacks: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it is complete."""
        return self._over.is_set()

    def finish(self, timeout: float | None) -> bool:
        """Wait until it is complete, or run it; return whether it is complete."""
        # With a timeout it only waits: an operation that has begun cannot be left.
        if timeout is None and not self._over.is_set():
            self._queue.run_in_caller(self)
        return self._over.wait(timeout)

    def call_back(self, function: Callable[[], Any]) -> None:
        """Call a function on completion: at once, or in the thread that runs the operation."""
        with self._lock:
            if not self._over.is_set():
                # Under the lock: `carry_out` sets `_over` under it as well, so no callback is lost.
                self._callbacks.append(function)
                return
        function()

    def carry_out(self) -> None:
        """Run it, then its callbacks; a thread that waits for it continues after them."""
        run, self._run = self._run, None  # a kept future must not keep the arrays
        assert run is not None
        try:
            with extend.calls_from(self._origin):
                run()
        except BaseException as error:
            # Also interrupts: the thread that waits gets them.
            self.error = translated(error)
        while True:
            with self._lock:
                if not self._callbacks:
                    # Set once no callback is left, so waiters continue after all of them.
                    self._over.set()
                    return
                function = self._callbacks.pop(0)
            # Outside of the lock, since a callback may add another one.
            function()


class WorkQueue(extend.BackgroundThread):
    """Operations of one process group, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__("process-group")
        self._turn = threading.Lock()  # held by the thread that runs queued operations
        self._runner = 0  # identifier of that thread; 0 without one
        self._jobs: deque[QueuedOperation] = deque()  # the first one may be in progress

    def run(self, run: Callable[[], Any]) -> None:
        """Run an operation after the queued ones, and return when it is complete.

        Raises:
            Exception: the operation raised it.
        """
        self._check_process()
        # The fast path: no operation is queued, and no thread runs one.
        if not self._jobs and self._turn.acquire(blocking=False):
            try:
                run()
            except Exception as error:
                raise translated(error) from error.__cause__
            finally:
                self._turn.release()
        elif self._runner == threading.get_ident():  # called by a callback
            # In the queue it would wait for the callback that called it.
            run()
        else:
            operation = self.submit(run)
            operation.finish(None)
            if operation.error is not None:
                raise operation.error

    def submit(self, run: Callable[[], Any]) -> QueuedOperation:
        """Queue an operation, and return at once."""
        self._check_process()
        operation = QueuedOperation(self, run)
        # As in `run`: the operations before it are complete.
        if self._runner == threading.get_ident():
            operation.carry_out()
            return operation
        self.start()
        with self._changed:
            if self._stopping:
                # Under the lock of `stop`, so that no operation is queued after the thread's end.
                raise distributed.DistBackendError("the process group was destroyed")
            self._jobs.append(operation)
            self._changed.notify()
        return operation

    def run_in_caller(self, last: QueuedOperation) -> None:
        """Run the queued operations up to `last`, unless another thread runs them."""
        # A thread that holds the turn must not take it again.
        if self._runner != threading.get_ident() and self._turn.acquire(blocking=False):
            try:
                self._carry_out(last)
            finally:
                self._turn.release()

    def _check_process(self) -> None:
        if self.is_forked:
            raise distributed.DistBackendError(
                "a forked child is not a rank: call this in the parent"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
            # Outside of `_changed`, since an operation may take long and `submit` needs that lock.
            with self._turn:
                self._carry_out(None)

    def _carry_out(self, last: QueuedOperation | None) -> None:
        """Run queued operations up to `last`, or all; the caller holds the turn."""
        self._runner = threading.get_ident()
        try:
            # Another thread may have run it while this one waited for the turn.
            while self._jobs and not (last is not None and last.done()):
                self._jobs[0].carry_out()
                # Removed at the end: until then `run` must not overtake it.
                self._jobs.popleft()
        finally:
            self._runner = 0
