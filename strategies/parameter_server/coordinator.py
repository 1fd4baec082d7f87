"""Cluster coordinator: schedules closures on free workers.

::

    coordinator   schedule schedule schedule  ...  join --------> done
                     |        |        |                    ^
    worker 1         `-> call |        `-> call ------------|
    worker 2                  `-> call, dies                |
    worker 3                       again `----> call -------'

Calls are made in any order, each at least once: what a lost worker had begun is begun again by
another one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass
from typing import Any

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

_LOOK_EVERY = 1.0  # seconds between two looks whether a silent worker is still wanted


@dataclass(frozen=True)
class PerWorkerDataset:
    """Batches of which every worker makes its own; given to calls, which get those of their worker.

    Attributes:
        number: among those of the coordinator.
        maker: name of the function that makes them.
    """

    number: int
    maker: str

    def __iter__(self) -> Iterator[Any]:
        return PerWorkerIterator(self.number, self.maker)


@dataclass(frozen=True)
class PerWorkerIterator:
    """The iterator of every worker over its own batches; goes on from call to call.

    Attributes:
        number: of the dataset, as is its maker.
        maker: name of the function that makes the batches.
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
    """Lets the workers of a `ParameterServerStrategy` make calls; open it with `with` on all tasks.

    The chief coordinates, or worker 0 where there is none; the other workers make the calls, inside
    the strategy's scope, one at a time. They and the ps tasks call `serve`.

    Args:
        strategy: asynchronous. *Collective* over all tasks.

    Raises:
        ValueError: the strategy is synchronous, or there is no worker beside the coordinator; on
            all tasks.
        FailedPreconditionError: the strategy has a coordinator; on all tasks.

    Attributes:
        coordinates: whether this is the task that schedules.
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
        self._lost: dict[int, str] = {}  # worker -> why
        self._lock = threading.Lock()
        ranks = ProcessGroup(cluster.comm)
        ranks.run_then_agree("ClusterCoordinator", self._check)
        if self._rank in self._workers:
            number = self._workers.index(self._rank)
            context = InputContext(len(self._workers), number, len(strategy.devices))
            _sides[strategy.shared_name, self._rank] = _Side(strategy, context)
        if self.coordinates:
            strategy.leave()  # it computes no gradients
        ranks.agree("ClusterCoordinator")
        self._threads = [
            threading.Thread(
                target=self._drive, args=(worker,), name=f"coordinator-{worker}", daemon=True
            )
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
        """Let a worker call `fn(*args, **kwargs)`; does not wait.

        Args:
            fn: at the top of a module, or its name, such as "package.module:function". It finds the
                strategy by `strategies.get_strategy()`, and variables in `strategy.variables`.
            args: what `Task.submit` takes; in place of a `PerWorkerDataset` or `PerWorkerIterator`
                the function gets that of its worker. Arrays must not change before the call ends.
            kwargs: the same by name.

        Returns:
            Where the result will be.

        Raises:
            ValueError: the function has no name by which workers can import it, or an argument is
                the result of another call.
            Exception: an earlier call's error, once.
            UnavailableError: no worker is left.
        """
        self._require()
        name = name_of(fn, "schedule")
        given: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}  # by position or name
        if any(isinstance(leaf, RemoteValue) for leaf in leaves(list(given.values()))):
            raise ValueError(
                "schedule: an argument is the result of a call, expected its value: result.fetch()"
            )
        own = {
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
        if len(self._lost) == len(self._workers):  # nobody would ever take it
            self._queue.fail_all(self._all_lost())
            self._queue.wait()
        return closure.result

    def _all_lost(self) -> UnavailableError:
        listed = "; ".join(self._lost.values())
        return UnavailableError(f"no worker is left ({listed}): start again from a checkpoint")

    def join(self, timeout: float | None = None) -> None:
        """Wait until all calls have been made.

        Args:
            timeout: seconds to wait; None for any time.

        Raises:
            Exception: the first error of a call, once; calls that were not begun are cancelled.
            UnavailableError: a ps is lost, or all workers are.
            DeadlineExceededError: not all were made in time.
        """
        self._require()
        self._queue.wait(timeout)

    def done(self) -> bool:
        """Tell whether all calls have been made; raises errors as `join`."""
        self._require()
        return self._queue.done()

    def fetch(self, value: Any, timeout: float | None = None) -> Any:
        """Return a structure with the values of all `RemoteValue` in it, for which this waits."""
        return map_leaves(
            lambda leaf: leaf.fetch(timeout) if isinstance(leaf, RemoteValue) else leaf, value
        )

    def create_per_worker_dataset(
        self, dataset_fn: Callable[[InputContext], Any] | str
    ) -> PerWorkerDataset:
        """Let each worker make batches of its own, when a call first needs them.

        Args:
            dataset_fn: at the top of a module, or its name; called with an `InputContext`. What it
                raises is raised by the calls that need its batches.
        """
        self._require()
        self._datasets += 1
        return PerWorkerDataset(self._datasets, name_of(dataset_fn, "create_per_worker_dataset"))

    def serve(self, timeout: float | None = None) -> None:
        """On workers and ps tasks: make calls until the coordinator has left.

        Args:
            timeout: seconds to wait for that; None for any time.

        Raises:
            UnavailableError: the coordinator is lost.
            DeadlineExceededError: it has not left in time.
        """
        if self.coordinates:
            raise FailedPreconditionError("serve: this is the coordinator, expected another task")
        why = self._strategy.service.departures([self._chief], timeout)[self._chief]
        if why is not None:
            raise UnavailableError(
                f"serve: the coordinator is lost: {why}; start again from a checkpoint"
            )

    def close(self) -> None:
        """Make no more calls; those that have begun are awaited. Harmless when repeated."""
        self._queue.close("the coordinator is closed")
        for thread in self._threads:
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
        """Give calls to one worker, until it is lost or there will be no more."""
        while (closure := self._queue.get()) is not None:
            try:
                value = closure.call(worker)
            except UnavailableError as error:
                if isinstance(error.__cause__, RemoteTraceback):  # the call's own: a ps is lost
                    self._queue.fail(closure, error)
                    continue
                log.warning("coordinator: a call is made again: %s", error)
                self._queue.put_back(closure)
                if not self._is_back(worker):
                    self._lose(worker, error)
                    return
            except BaseException as error:
                self._queue.fail(closure, error)
            else:
                self._queue.finish(closure, value)

    def _is_back(self, worker: int) -> bool:
        """Wait until a silent worker answers; False if it is dead."""
        while not self._queue.closed:
            try:
                future = Task(self._strategy.service, worker).submit(_ping)
            except Exception:
                return False
            while not self._queue.closed:
                with contextlib.suppress(LateError, UnavailableError):
                    return bool(future.result(_LOOK_EVERY))
                if future.done():
                    break
        return False

    def _lose(self, worker: int, error: UnavailableError) -> None:
        with self._lock:
            self._lost[worker] = error.message
            none_left = len(self._lost) == len(self._workers)
        if none_left:
            self._queue.fail_all(self._all_lost())


# On the workers.


class _Side:
    """What a worker keeps for the calls that it makes."""

    def __init__(self, strategy: ParameterServerStrategy, context: InputContext) -> None:
        self._strategy = strategy
        self._context = context
        self._busy = threading.Lock()
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[int, Iterator[Any]] = {}

    def call(
        self, name: str, given: Mapping[int | str, Any], own: Mapping[int | str, Sequence[Any]]
    ) -> Any:
        """Make a call.

        Args:
            name: of the function.
            given: arguments by position or name.
            own: [number, maker, whether an iterator] of those that the worker has itself.
        """
        with self._busy, self._strategy.scope():
            known = {**given, **{key: self._own_dataset(*what) for key, what in own.items()}}
            arguments = [known[key] for key in sorted(k for k in known if isinstance(k, int))]
            named = {key: value for key, value in known.items() if isinstance(key, str)}
            try:
                return function_named(name)(*arguments, **named)
            except StopIteration as error:
                raise OutOfRangeError("next: this worker has no more batches") from error

    def _own_dataset(self, number: int, maker: str, iterator: bool) -> Any:
        """Return this worker's dataset, or its iterator."""
        if number not in self._datasets:
            self._datasets[number] = function_named(maker)(self._context)
        if not iterator:
            return self._datasets[number]
        if number not in self._iterators:
            self._iterators[number] = iter(self._datasets[number])
        return self._iterators[number]


_sides: dict[tuple[str, int], _Side] = {}
"""(name of the strategy, rank) -> the worker of this process; tests have several."""


def _perform(shared_name: str, worker: int, *call: Any) -> Any:
    """Make a call on this worker; see `_Side.call`."""
    return _sides[shared_name, worker].call(*call)


def _ping() -> bool:
    """Answer."""
    return True
