"""`strategy.run`: replicas that compute, synchronize and finish together.

With one replica in this process the function is called directly. With several, the first replica
runs in the thread that called `run`, and each other one in its own thread. The first replica's
thread merges at each sync point once all replicas have arrived. So one thread makes all collective
operations of a process, and a sync point wakes only the threads that wait for its result::

    run, replica 0   start |-- compute --| wait | hold: agree, merge |--- compute ---| join, agree
    replica 1              |----- compute ------| wait               |-- compute --|

An exception in one replica stops the other replicas at their next sync point, on all ranks.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from strategies.cluster import local_devices as devices
from strategies.core.thread_pool import ThreadPool
from strategies.replicas import context, per_replica, thread_context
from strategies.replicas.context import ReplicaContext, ReplicaStrategy, SyncPoint
from strategies.replicas.core_affinity import CoreAffinity

__all__ = ["run", "selected"]

log = logging.getLogger(__name__)

# Kept between runs, as PyTorch and the libraries below it keep state per thread: two replicas of a
# perceptron took 30 ms for a step in new threads and 20 ms in kept ones.
_replica_threads = ThreadPool("replica", idle_seconds=10.0)


class _Stop(BaseException):
    """Ends a replica because another one failed; not an `Exception`, so user code passes it."""

    # Only the replica that has failed carries the error.
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("another replica has failed")
        self.error = error


def run(
    strategy: ReplicaStrategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function on every replica of this process; return the regrouped results."""
    strategy.ranks.start()

    def body(i: int) -> Any:
        return fn(*per_replica.select(args, i), **per_replica.select(kwargs, i))

    error = None
    result = None
    replicas = _run_single if len(strategy.devices) == 1 else _run_threads
    try:
        # In the `try`, because other ranks wait at the end of the run.
        if not isinstance(args, (list, tuple)):
            raise ValueError(
                f"run: args is not a list or tuple of arguments, got {type(args).__name__}"
            )
        result = per_replica.regroup(replicas(strategy, body), "run")
    except _Stop as stop:
        # The error behind a stop is the cause; a stop itself is never shown to the user.
        error = stop.error
    except Exception as caught:
        error = caught
    # Also without an error: no rank starts its next step while another is still in this one.
    strategy.ranks.agree("run: its end", error)
    return result


def _run_single(strategy: ReplicaStrategy, body: Callable[[int], Any]) -> list[Any]:
    """Run the only replica in this thread."""
    # Remembered, because the function may catch `BaseException` and reach another sync point.
    stops: list[_Stop] = []

    def meet(meeting: SyncPoint) -> Any:
        if not stops:
            try:
                return _serve_sync_points(strategy, [meeting])[0]
            except _Stop as stop:
                stops.append(stop)
        raise stops[0]

    with selected(strategy, 0), context.entered(strategy, ReplicaContext(strategy, 0, meet)):
        result = body(0)
    if stops:  # the function has caught the exception
        raise stops[0]
    return [result]


def selected(strategy: ReplicaStrategy, i: int) -> AbstractContextManager[None]:
    """Select the device of a replica for this thread."""
    return devices.selected(strategy.devices[i]) if strategy.is_placed else nullcontext()


def _run_threads(strategy: ReplicaStrategy, body: Callable[[int], Any]) -> list[Any]:
    """Run each replica in a thread; the first one in this thread."""

    # GPU work runs in streams per thread, so each thread waits for its own before others read.
    def hold(meetings: list[SyncPoint]) -> list[Any]:
        answers = _serve_sync_points(strategy, meetings)
        devices.finish(strategy.devices)
        return answers

    threads = _ReplicaThreads(len(strategy.devices), hold)
    # New for each run: where threads run is known only now.
    cores = CoreAffinity()

    def entered(i: int) -> Any:
        own = strategy.devices[i : i + 1]

        def meet(meeting: SyncPoint) -> Any:
            # The merging thread reads this replica's arrays, in another stream.
            devices.finish(own)
            return threads.meet(i, meeting)

        replica = ReplicaContext(strategy, i, meet)
        cores.spread(i)
        with selected(strategy, i), context.entered(strategy, replica):
            result = body(i)
            # The results are read by the thread that called `run`.
            devices.finish(own)
        return result

    # Variables may have been written in this thread's streams; replicas read them in others.
    devices.finish(strategy.devices)
    try:
        threads.run(entered)
    except BaseException as error:
        threads.stop(error)
        raise
    return threads.results


def _serve_sync_points(strategy: ReplicaStrategy, meetings: list[SyncPoint]) -> list[Any]:
    """Merge at a sync point, together with the other ranks."""
    first = meetings[0]
    try:
        # All ranks must be at the same point before `merge` starts collective operations.
        strategy.ranks.agree(f"run: {first.name}")
        with selected(strategy, 0), context.entered(strategy, None):
            return first.merge([meeting.payload for meeting in meetings])
    except Exception as error:
        raise _Stop(error) from error


class _ReplicaThreads:
    """The replicas of one run: the first in the thread that calls `run`, the others in threads.

    Args:
        count: number of replicas.
        hold: merges at a sync point that all replicas have reached; returns a result for each.
    """

    def __init__(self, count: int, hold: Callable[[list[SyncPoint]], list[Any]]) -> None:
        self.results: list[Any] = [None] * count
        self._hold = hold
        # This thread counts as started.
        self._started = 1
        self._lock = threading.Condition()
        self._ended = [False] * count
        self._errors: list[BaseException | None] = [None] * count
        self._meetings: list[SyncPoint | None] = [None] * count
        self._answers: list[Any] = [None] * count
        self._stopped: _Stop | None = None

    def run(self, body: Callable[[int], Any]) -> None:
        """Run all replicas to their end.

        Raises:
            Exception: the error of a replica.
            RuntimeError: the replicas have reached different sync points.
            _Stop: a sync point has failed.
        """
        for i in range(1, len(self.results)):
            # Captured here, in the thread that called `run`, for each replica.
            _replica_threads.submit(partial(thread_context.capture_modes(), self._work, i, body))
            self._started += 1
        # A copy, so that context variables set by the replica do not leak into the caller.
        contextvars.copy_context().run(self._work, 0, body)
        error = self._errors[0]
        if error is not None and not isinstance(error, (Exception, _Stop)):
            raise error  # Ctrl-C does not wait for the other replicas
        if self._stopped:  # raise it even if the function has caught it
            raise self._stopped
        self._come_together()

    def _work(self, i: int, body: Callable[[int], Any]) -> None:
        error: BaseException | None = None
        result = None
        try:
            result = body(i)
        except BaseException as caught:
            error = caught
        with self._lock:
            self.results[i], self._errors[i], self._ended[i] = result, error, True
            # Only the last one wakes the others: each wake-up takes time from computing replicas.
            if self._all_came() or self._all_ended():
                self._lock.notify_all()

    def meet(self, i: int, meeting: SyncPoint) -> Any:
        """In the thread of replica `i`: wait for the other replicas and return the result."""
        with self._lock:
            # After a stop, a sync point must not look as if this replica had arrived.
            if not self._stopped:
                self._meetings[i] = meeting
        return self._wait(i) if i else self._lead()

    def _wait(self, i: int) -> Any:
        """In the thread of a replica other than the first: wait."""
        with self._lock:
            if self._all_came():  # earlier wake-ups would take time from computing replicas
                self._lock.notify_all()
            # The leader sets the meeting to None once the answer is there.
            self._lock.wait_for(lambda: self._stopped or self._meetings[i] is None)
            if self._stopped:
                raise _Stop
            return self._answers[i]

    def _lead(self) -> Any:
        """In the thread of the first replica: merge at the sync point."""
        if self._stopped:
            raise self._stopped
        try:
            answers = self._hold(self._come_together())
        except (Exception, _Stop) as error:
            # `from None` for a stop, whose cause is already attached.
            raise self._end(error) from (None if isinstance(error, _Stop) else error)
        with self._lock:
            self._answers = answers
            # Answers before meetings, under one lock: a waiting replica checks its meeting first.
            self._meetings = [None] * len(answers)
            self._lock.notify_all()
        return answers[0]

    def _come_together(self) -> list[SyncPoint]:
        """Wait for all replicas; return the sync points that they have reached, or [] at the end.

        Raises:
            Exception: the error of a replica.
            RuntimeError: the replicas have reached different sync points.
        """
        with self._lock:
            self._lock.wait_for(self._all_came)
            failed = [(i, error) for i, error in enumerate(self._errors) if error is not None]
            found = list(self._meetings)
        # Only one error can be raised; the rest would be lost.
        for i, error in failed[1:]:
            log.warning("replica %d has failed as well: %s", i, error, exc_info=error)
        # The lowest replica's error, so that the choice does not depend on timing.
        if failed:
            raise failed[0][1]
        names = [meeting.name if meeting else "its end" for meeting in found]
        if len(set(names)) > 1:
            listed = ", ".join(f"{name!r} by replica {i}" for i, name in enumerate(names))
            raise RuntimeError(f"run: replicas are at different sync points, got {listed}")
        return [meeting for meeting in found if meeting]

    def _end(self, error: BaseException) -> _Stop:
        """Stop all replicas at their current or next wait; return the exception to raise."""
        if not isinstance(error, _Stop):
            error = _Stop(error if isinstance(error, Exception) else None)
        with self._lock:
            self._stopped = self._stopped or error
            self._lock.notify_all()
        return error

    def stop(self, error: BaseException) -> None:
        """After the first replica's end, stop the others; wait for them except on Ctrl-C."""
        self._end(error)
        if isinstance(error, (Exception, _Stop)):
            with self._lock:
                # Otherwise `_all_ended` would wait for this thread itself.
                self._ended[0] = True  # not set yet if a thread could not start
                self._lock.wait_for(self._all_ended)

    def _all_came(self) -> bool:
        """Return whether every replica is at a sync point or has ended."""
        return all(
            meeting or ended for meeting, ended in zip(self._meetings, self._ended, strict=True)
        )

    def _all_ended(self) -> bool:
        # Replicas that never started cannot end.
        return sum(self._ended) == self._started
