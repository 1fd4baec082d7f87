"""Cluster coordinator: schedules closures on free workers.

::

    coordinator   schedule schedule schedule  ...  join --------> done
                     |        |        |                    ^
    worker 1         `-> call |        `-> call ------------|
    worker 2                  `-> call, dies                |
    worker 3                       again `----> call -------'

Calls run in any order, each at least once: another worker repeats the unfinished call of a lost
worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from collectives import extend
from strategies.core.process_group import ProcessGroup
from strategies.core.pytree import leaves, map_leaves
from strategies.errors import FailedPreconditionError, OutOfRangeError, UnavailableError
from strategies.parameter_server.closures import Closure, ClosureQueue, RemoteValue
from strategies.parameter_server.strategy import ParameterServerStrategy
from strategies.replicas.datasets import InputContext
from strategies.rpc.function_names import function_named, name_of
from strategies.rpc.functions import RemoteTraceback, Task

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator"]

log = logging.getLogger(__name__)

_LOOK_EVERY = 1.0  # seconds between checks whether the queue was closed


@dataclass(frozen=True)
class PerWorkerDataset:
    """Batches that every worker creates itself; as an argument of a call, the worker's own batches.

    Attributes:
        number: number among the datasets of the coordinator.
        maker: name of the function that creates the batches.
    """

    number: int
    maker: str

    def __iter__(self) -> Iterator[Any]:
        return PerWorkerIterator(self.number, self.maker)


@dataclass(frozen=True)
class PerWorkerIterator:
    """Iterator of every worker over its own batches, which continues across calls.

    Attributes:
        number: number of the dataset.
        maker: name of the function that creates the batches.
    """

    number: int
    maker: str

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise ValueError(
            "next: these batches are on the workers, expected the iterator as an argument of a "
            "call that is scheduled"
        )


class ClusterCoordinator:
    """Schedule calls on the workers of a `ParameterServerStrategy`.

    Open it with `with` on all tasks. The chief, or worker 0 without a chief, is the coordinator.
    The other workers run the calls inside the strategy's scope, one at a time. Workers and ps tasks
    call `serve`.

    Args:
        strategy: asynchronous strategy. *Collective* over all tasks.

    Raises:
        ValueError: the strategy is synchronous, or the coordinator is the only worker; on all
            tasks.
        FailedPreconditionError: the strategy already has a coordinator; on all tasks.

    Attributes:
        coordinates: whether this task is the coordinator.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        cluster = strategy.cluster
        training = cluster.training_ranks
        self._strategy = strategy
        self._chief, self._workers = training[0], training[1:]
        self._rank = cluster.comm.rank
        self.coordinates = self._rank == self._chief
        self._queue = ClosureQueue()
        self._datasets = 0
        self._lost: dict[int, str] = {}  # worker -> reason
        self._lock = threading.Lock()
        ranks = ProcessGroup(cluster.comm)
        ranks.run_then_agree("ClusterCoordinator", self._check)
        if self._rank in self._workers:
            number = self._workers.index(self._rank)
            # Registered before the agreement below: the coordinator may send calls after it.
            context = InputContext(len(self._workers), number, len(strategy.devices))
            _sides[strategy.shared_name, self._rank] = _Side(strategy, context)
        if self.coordinates:
            strategy.leave()  # the coordinator computes no gradients
        ranks.agree("ClusterCoordinator")
        # One thread per worker, because each waits for the call that its worker runs. All workers
        # are registered by now.
        self._threads = [
            _WorkerThread(self._queue, partial(self._drive, worker), worker)
            for worker in (self._workers if self.coordinates else ())
        ]
        for thread in self._threads:
            thread.start()

    def _check(self) -> None:
        if self._strategy.synchronous:
            raise ValueError(
                "ClusterCoordinator: calls are made by whichever worker is free, expected an "
                "asynchronous strategy, got a synchronous one"
            )
        if not self._workers:
            raise ValueError(
                f"ClusterCoordinator: expected a worker beside the coordinator, got none "
                f"({self._strategy.cluster.spec})"
            )
        if (self._strategy.shared_name, self._rank) in _sides:
            raise FailedPreconditionError("ClusterCoordinator: the strategy has a coordinator")

    def schedule(
        self,
        fn: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Queue the call `fn(*args, **kwargs)` for a worker, without waiting for it.

        Args:
            fn: function at the top level of a module, or its name, "package.module:function". It
                gets the strategy from `strategies.get_strategy()`, and variables from
                `strategy.variables`.
            args: positional arguments of the types that `Task.submit` accepts. A `PerWorkerDataset`
                or `PerWorkerIterator` is replaced by the worker's own. Arrays must not change
                before the call ends.
            kwargs: keyword arguments of the same types.

        Returns:
            Handle of the future result.

        Raises:
            ValueError: workers cannot import the function by name, or an argument is the result of
                another call.
            Exception: error of an earlier call, raised once.
            UnavailableError: all workers are lost.
        """
        self._require()
        name = name_of(fn, "schedule")
        given: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}  # by position or name
        if any(isinstance(leaf, RemoteValue) for leaf in leaves(list(given.values()))):
            raise ValueError(
                "schedule: an argument is the result of a call, expected its value: result.fetch()"
            )
        own = {
            # Datasets stay on the workers, so only their numbers and makers are sent.
            key: [value.number, value.maker, isinstance(value, PerWorkerIterator)]
            for key, value in given.items()
            if isinstance(value, (PerWorkerDataset, PerWorkerIterator))
        }
        plain = {key: value for key, value in given.items() if key not in own}
        shared_name = self._strategy.shared_name

        def call(worker: int) -> Any:
            task = Task(self._strategy.service, worker)
            return task.run(_perform, shared_name, worker, name, plain, own)

        closure = Closure(call)
        self._queue.put(closure)
        if len(self._lost) == len(self._workers):  # no thread is left to run the call
            self._queue.fail_all(self._all_lost())
            # `wait` raises the error that `fail_all` has recorded.
            self._queue.wait()
        return closure.result

    def _all_lost(self) -> UnavailableError:
        listed = "; ".join(self._lost.values())
        return UnavailableError(f"no worker is left ({listed}): start again from a checkpoint")

    def join(self, timeout: float | None = None) -> None:
        """Wait until all calls have finished.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            Exception: first error of a call, raised once; queued calls are cancelled.
            UnavailableError: a ps is lost, or all workers are lost.
            DeadlineExceededError: calls are unfinished after the timeout.
        """
        self._require()
        self._queue.wait(timeout)

    def done(self) -> bool:
        """Return whether all calls have finished; raises the errors of `join`."""
        self._require()
        return self._queue.done()

    def fetch(self, value: Any, timeout: float | None = None) -> Any:
        """Return a structure with every `RemoteValue` replaced by its value, waiting as needed."""
        return map_leaves(
            lambda leaf: leaf.fetch(timeout) if isinstance(leaf, RemoteValue) else leaf, value
        )

    def create_per_worker_dataset(
        self, dataset_fn: Callable[[InputContext], Any] | str
    ) -> PerWorkerDataset:
        """Return a dataset that each worker creates when a call first needs it.

        Args:
            dataset_fn: function at the top level of a module, or its name; called with an
                `InputContext`. Calls that need the batches raise its errors.
        """
        self._require()
        self._datasets += 1
        return PerWorkerDataset(self._datasets, name_of(dataset_fn, "create_per_worker_dataset"))

    def serve(self, timeout: float | None = None) -> None:
        """Run calls on workers and ps tasks until the coordinator has left.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            UnavailableError: the coordinator is lost.
            DeadlineExceededError: the coordinator has not left within the timeout.
        """
        if self.coordinates:
            raise FailedPreconditionError("serve: this is the coordinator, expected another task")
        # A pool of threads runs the calls meanwhile; this thread only waits.
        why = self._strategy.service.departures([self._chief], timeout)[self._chief]
        if why is not None:
            raise UnavailableError(
                f"serve: the coordinator is lost: {why}; start again from a checkpoint"
            )

    def close(self) -> None:
        """Wait for running calls, and cancel queued calls. Harmless when repeated."""
        self._queue.close("the coordinator is closed")
        for thread in self._threads:
            # A running call may still change variables, so its end is awaited.
            thread.join()
        _sides.pop((self._strategy.shared_name, self._rank), None)

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # the threads end with the service
            self._queue.close(f"the coordinator has failed: {error!r:.200}")
            self._threads.clear()
        self.close()

    def _require(self) -> None:
        if not self.coordinates:
            raise FailedPreconditionError(
                f"ClusterCoordinator: only task {self._chief} schedules calls, expected serve() on "
                f"others (task {self._rank})"
            )

    def _drive(self, worker: int) -> None:
        """Run calls on one worker until it is lost or the queue is closed."""
        while (closure := self._queue.get()) is not None:
            try:
                value = closure.call(worker)
            except UnavailableError as error:
                if isinstance(error.__cause__, RemoteTraceback):  # raised by the call: a ps is lost
                    # Another worker would not reach the ps either, so the call is not repeated.
                    self._queue.fail(closure, error)
                    continue
                log.warning("coordinator: a call is made again: %s", error)
                # First, so that another worker can take the call while this one is silent.
                self._queue.put_back(closure)
                if not self._is_back(worker):
                    self._lose(worker, error)
                    return
            except BaseException as error:
                # Includes SystemExit of a call, which must not end this thread.
                self._queue.fail(closure, error)
            else:
                self._queue.finish(closure, value)

    def _is_back(self, worker: int) -> bool:
        """Wait until a silent worker answers; return False if it is dead."""
        while not self._queue.closed:
            try:
                future = Task(self._strategy.service, worker).submit(_ping)
            except Exception:
                return False
            # In slices, to notice that the queue was closed. A silent worker may answer much later.
            while not (self._queue.closed or wait([future], _LOOK_EVERY).done):
                pass
            if future.done() and not isinstance(error := future.exception(), UnavailableError):
                # Returned, not raised: `CancelledError` of a closed service would end this thread
                # with an error, which aborts the job.
                return error is None
        return False

    def _lose(self, worker: int, error: UnavailableError) -> None:
        with self._lock:
            self._lost[worker] = error.message
            # Under the lock, so that only the thread of the last worker fails the calls.
            none_left = len(self._lost) == len(self._workers)
        if none_left:
            self._queue.fail_all(self._all_lost())


class _WorkerThread(extend.BackgroundThread):
    """Thread of the coordinator that runs calls on one worker."""

    def __init__(self, queue: ClosureQueue, drive: Callable[[], None], worker: int) -> None:
        super().__init__(f"coordinator-{worker}")
        self._queue = queue
        self._drive = drive

    def _run(self) -> None:
        self._drive()

    def _wake(self) -> None:
        self._queue.close("the program has ended")


# Worker side.


class _Side:
    """State of a worker between calls."""

    def __init__(self, strategy: ParameterServerStrategy, context: InputContext) -> None:
        self._strategy = strategy
        self._context = context
        self._busy = threading.Lock()
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[int, Iterator[Any]] = {}

    def call(
        self, name: str, given: Mapping[int | str, Any], own: Mapping[int | str, Sequence[Any]]
    ) -> Any:
        """Run a call.

        Args:
            name: name of the function.
            given: arguments by position or name.
            own: position or name -> (number, maker, whether an iterator) of per-worker arguments.
        """
        # After a silence, the coordinator may send a call while an earlier one is still running.
        with self._busy, self._strategy.scope():
            known = {**given, **{key: self._own_dataset(*what) for key, what in own.items()}}
            # Positional arguments have integers as keys, keyword arguments names.
            arguments = [known[key] for key in sorted(k for k in known if isinstance(k, int))]
            named = {key: value for key, value in known.items() if isinstance(key, str)}
            try:
                return function_named(name)(*arguments, **named)
            except StopIteration as error:
                # As in TensorFlow; a StopIteration could end a loop of the coordinator silently.
                raise OutOfRangeError("next: this worker has no more batches") from error

    def _own_dataset(self, number: int, maker: str, iterator: bool) -> Any:
        """Return this worker's dataset, or its iterator."""
        if number not in self._datasets:
            self._datasets[number] = function_named(maker)(self._context)
        if not iterator:
            return self._datasets[number]
        if number not in self._iterators:
            # Kept between calls, so that the next call continues with the next batch.
            self._iterators[number] = iter(self._datasets[number])
        return self._iterators[number]


_sides: dict[tuple[str, int], _Side] = {}
"""(strategy name, rank) -> worker of this process; tests have several."""


def _perform(shared_name: str, worker: int, *call: Any) -> Any:
    """Run a call on this worker; see `_Side.call`."""
    return _sides[shared_name, worker].call(*call)


def _ping() -> bool:
    """Return True, as a sign of life."""
    return True
