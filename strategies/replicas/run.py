"""`strategy.run`: replicas that compute, synchronize and finish together.

With one replica in this process the function is called as it is. With several, the first one
computes in the thread that called `run`, each other one in a thread of its own. The first holds
their meetings, when all have come, so that all collective operations of a process come from one
thread, and nobody has to be woken for a meeting but those who wait for its end:

    run, replica 0   start |-- compute --| wait | hold: agree, merge |--- compute ---| join, agree
    replica 1              |----- compute ------| wait               |-- compute --|

An exception in one replica stops the others where they meet next, on all ranks.
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
from strategies.replicas import context, per_replica, thread_context, thread_pool
from strategies.replicas.context import ReplicaContext, ReplicaStrategy, SyncPoint

__all__ = ["run", "selected"]

log = logging.getLogger(__name__)


class _Stop(BaseException):
    """Ends a replica whose others have failed; not an error of its own, so no `Exception`."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("another replica has failed")
        self.error = error


def run(
    strategy: ReplicaStrategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function on every replica of this process; returns what they returned, regrouped."""
    strategy.ranks.start()

    def body(i: int) -> Any:
        return fn(*per_replica.select(args, i), **per_replica.select(kwargs, i))

    error = None
    result = None
    replicas = _run_single if len(strategy.devices) == 1 else _run_threads
    try:
        if not isinstance(args, (list, tuple)):
            raise ValueError(
                f"run: args is not a list or tuple of arguments, got {type(args).__name__}"
            )
        result = per_replica.regroup(replicas(strategy, body), "run")
    except _Stop as stop:
        error = stop.error
    except Exception as caught:
        error = caught
    strategy.ranks.agree("run: its end", error)
    return result


def _run_single(strategy: ReplicaStrategy, body: Callable[[int], Any]) -> list[Any]:
    """Let the only replica compute in this thread."""
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
    if stops:  # and the function has caught it
        raise stops[0]
    return [result]


def selected(strategy: ReplicaStrategy, i: int) -> AbstractContextManager[None]:
    """Let this thread compute on the device of a replica."""
    return devices.selected(strategy.devices[i]) if strategy.is_placed else nullcontext()


def _run_threads(strategy: ReplicaStrategy, body: Callable[[int], Any]) -> list[Any]:
    """Let each replica compute in a thread, the first one in this."""

    def hold(meetings: list[SyncPoint]) -> list[Any]:
        answers = _serve_sync_points(strategy, meetings)
        devices.finish(strategy.devices)
        return answers

    threads = _ReplicaThreads(len(strategy.devices), hold)
    cores = thread_pool.CoreAffinity()

    def entered(i: int) -> Any:
        own = strategy.devices[i : i + 1]

        def meet(meeting: SyncPoint) -> Any:
            devices.finish(own)
            return threads.meet(i, meeting)

        replica = ReplicaContext(strategy, i, meet)
        cores.spread(i)
        with selected(strategy, i), context.entered(strategy, replica):
            result = body(i)
            devices.finish(own)
        return result

    devices.finish(strategy.devices)
    try:
        threads.run(entered)
    except BaseException as error:
        threads.stop(error)
        raise
    return threads.results


def _serve_sync_points(strategy: ReplicaStrategy, meetings: list[SyncPoint]) -> list[Any]:
    """Let the replicas of this process meet those of the other ranks."""
    first = meetings[0]
    try:
        strategy.ranks.agree(f"run: {first.name}")
        with selected(strategy, 0), context.entered(strategy, None):
            return first.merge([meeting.payload for meeting in meetings])
    except Exception as error:
        raise _Stop(error) from error


class _ReplicaThreads:
    """The replicas of one run: the first in the thread that calls `run`, the others beside it.

    Args:
        count: how many there are.
        hold: holds the meeting to which all have come; returns an answer for each.
    """

    def __init__(self, count: int, hold: Callable[[list[SyncPoint]], list[Any]]) -> None:
        self.results: list[Any] = [None] * count
        self._hold = hold
        self._started = 1
        self._lock = threading.Condition()
        self._ended = [False] * count
        self._errors: list[BaseException | None] = [None] * count
        self._meetings: list[SyncPoint | None] = [None] * count
        self._answers: list[Any] = [None] * count
        self._stopped: _Stop | None = None

    def run(self, body: Callable[[int], Any]) -> None:
        """Let all replicas compute, to their end.

        Raises:
            Exception: a replica's own.
            RuntimeError: they have come to different meetings.
            _Stop: a meeting has failed.
        """
        for i in range(1, len(self.results)):
            thread_pool.start(partial(thread_context.capture_modes(), self._work, i, body))
            self._started += 1
        contextvars.copy_context().run(self._work, 0, body)
        error = self._errors[0]
        if error is not None and not isinstance(error, (Exception, _Stop)):
            raise error  # Ctrl-C waits for nobody
        if self._stopped:  # also where the function has caught it
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
            if self._all_came() or self._all_ended():
                self._lock.notify_all()

    def meet(self, i: int, meeting: SyncPoint) -> Any:
        """In the thread of replica `i`: wait for the others, and return what came of it."""
        with self._lock:
            if not self._stopped:
                self._meetings[i] = meeting
        return self._wait(i) if i else self._lead()

    def _wait(self, i: int) -> Any:
        """In the thread of another replica than the first."""
        with self._lock:
            if self._all_came():  # who would wake for less takes time from those that compute
                self._lock.notify_all()
            self._lock.wait_for(lambda: self._stopped or self._meetings[i] is None)
            if self._stopped:
                raise _Stop
            return self._answers[i]

    def _lead(self) -> Any:
        """In the thread of the first replica: hold the meeting."""
        if self._stopped:
            raise self._stopped
        try:
            answers = self._hold(self._come_together())
        except (Exception, _Stop) as error:
            raise self._end(error) from (None if isinstance(error, _Stop) else error)
        with self._lock:
            self._answers = answers
            self._meetings = [None] * len(answers)
            self._lock.notify_all()
        return answers[0]

    def _come_together(self) -> list[SyncPoint]:
        """Wait for all replicas; returns the meeting that they have come to, or [] at their end.

        Raises:
            Exception: a replica's own.
            RuntimeError: they have come to different meetings.
        """
        with self._lock:
            self._lock.wait_for(self._all_came)
            failed = [(i, error) for i, error in enumerate(self._errors) if error is not None]
            found = list(self._meetings)
        for i, error in failed[1:]:
            log.warning("replica %d has failed as well: %s", i, error, exc_info=error)
        if failed:
            raise failed[0][1]
        names = [meeting.name if meeting else "its end" for meeting in found]
        if len(set(names)) > 1:
            listed = ", ".join(f"{name!r} by replica {i}" for i, name in enumerate(names))
            raise RuntimeError(f"run: the replicas do not meet at the same point, got {listed}")
        return [meeting for meeting in found if meeting]

    def _end(self, error: BaseException) -> _Stop:
        """Let replicas stop where they wait, or will; returns how."""
        if not isinstance(error, _Stop):
            error = _Stop(error if isinstance(error, Exception) else None)
        with self._lock:
            self._stopped = self._stopped or error
            self._lock.notify_all()
        return error

    def stop(self, error: BaseException) -> None:
        """After the first replica's end: stop the others; wait for them unless this is Ctrl-C."""
        self._end(error)
        if isinstance(error, (Exception, _Stop)):
            with self._lock:
                self._ended[0] = True  # also where another one could not begin
                self._lock.wait_for(self._all_ended)

    def _all_came(self) -> bool:
        """Whether every replica waits for the others, or has ended."""
        return all(
            meeting or ended for meeting, ended in zip(self._meetings, self._ended, strict=True)
        )

    def _all_ended(self) -> bool:
        return sum(self._ended) == self._started
