"""Steps of workers and chief with spare replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.accumulators.gradient_sum import Gradient, GradientSpec
from strategies.accumulators.remote import AnyAccumulation, open_accumulation
from strategies.accumulators.state_machine import Apply
from strategies.averaging.optimizer import ArrayOptimizer
from strategies.core import array_ops
from strategies.core.sparse import Rows
from strategies.errors import OpError, UnavailableError
from strategies.optimizers.gradient_pairs import Pair
from strategies.rpc.operation import OperationOwner, PendingOperation, finish, perform
from strategies.rpc.service import Service
from strategies.rpc.wire import Array
from strategies.spare_replica.chief_loop import ChiefLoop
from strategies.spare_replica.token_queue import (
    Deregister,
    Heartbeat,
    TakeToken,
    TokenQueue,
    open_rounds,
)

__all__ = ["SpareSteps", "StepReport"]

_log = logging.getLogger(__name__)

_NAME = "spare replicas"
_REMIND_AFTER = 60.0  # seconds after which the chief's wait for others to leave is reported


@dataclass(frozen=True)
class StepReport:
    """What became of the gradients of all workers.

    Attributes:
        global_step: the chief's step.
        used: per worker, how many of its gradients were averaged.
        dropped: per worker, how many came too late.
        lost: workers that died or failed, and why.
    """

    global_step: int
    used: dict[int, int]
    dropped: dict[int, int]
    lost: dict[int, str]


@dataclass(frozen=True)
class _TaskShard:
    """The variables whose gradients are averaged on one task."""

    positions: list[int]
    accumulation: AnyAccumulation


@dataclass(frozen=True)
class _ChiefCopy:
    """The chief's copy of a variable, as optimizers take it; no replica computes with it."""

    name: str
    value: Array


class SpareSteps:
    """One worker's part in the steps; on task 0 also the chief's.

    Args:
        service: its tasks are the workers.
        aggregate: how many gradients make a step.
        tasks: on which they are averaged.
        step: the first one.

    Attributes:
        local_step: of the values that this worker has.
    """

    def __init__(
        self, service: Service, *, aggregate: int, tasks: Sequence[int], step: int
    ) -> None:
        self.local_step = step
        self._service = service
        self._worker = service.task
        self._aggregate = aggregate
        self._tasks = tasks
        self._shards: list[_TaskShard] = []
        self._loop: ChiefLoop | None = None
        self._rounds = open_rounds(
            service, aggregate=aggregate, total=service.size, step=step, name=_NAME
        )
        if isinstance(self._rounds, TokenQueue):
            self._rounds.on_lost = self._drop_worker
        self._rounds.submit(Heartbeat(self._worker))
        self._rounds.report()  # when this is answered, the chief will notice if this worker dies

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return bool(self._shards)

    def start(self, optimizer: ArrayOptimizer, pairs: list[Pair]) -> None:
        """Open the accumulators; the chief begins to make steps.

        Args:
            optimizer: updates the chief's copies of the variables.
            pairs: of all variables, which have their first values.
        """
        parts = [
            GradientSpec(pair.where, array_ops.dtype_name(pair.value), tuple(pair.value.shape))
            for pair in pairs
        ]
        assigned = _balance([pair.value.nbytes for pair in pairs], len(self._tasks))

        def shard(task: int, positions: list[int]) -> _TaskShard:
            own = [parts[i] for i in positions]
            accumulation = open_accumulation(
                self._service,
                own,
                mean=True,
                name=f"{_NAME}: gradients",
                step=self.local_step,
                most=self._aggregate,  # also of those that come before the chief waits for them
                task=task,
            )
            return _TaskShard(positions, accumulation)

        pairs_of_tasks = zip(self._tasks, assigned, strict=True)
        self._shards = [shard(task, positions) for task, positions in pairs_of_tasks if positions]
        if isinstance(self._rounds, TokenQueue):
            masters = [
                _ChiefCopy(pair.key, np.array(array_ops.to_host(pair.value))) for pair in pairs
            ]
            accumulations = [shard.accumulation for shard in self._shards]
            self._loop = ChiefLoop(self._rounds, accumulations, self._updating(optimizer, masters))
            self._rounds.on_failure = self._loop.stop
            self._loop.start()
            if self._rounds.failure is not None:
                self._loop.stop()

    def deliver(self, pairs: list[Pair], examples: float | None = None) -> None:
        """Deliver gradients, and wait for newer values, which the variables then have.

        All that goes to one task goes in one message.

        Raises:
            OpError: see `SpareReplicaStrategy.apply_gradients`.
        """
        deliveries: list[tuple[OperationOwner, PendingOperation]] = []
        for shard in self._shards:
            own = [_on_host(pairs[i]) for i in shard.positions]
            apply = Apply(own, self.local_step, self._worker, examples)
            deliveries.append((shard.accumulation, apply))
        turn = TakeToken(self._worker, self.local_step)
        _all(deliveries, (self._rounds, turn))
        self.local_step = turn.step
        for pair, value in zip(pairs, turn.values, strict=bool(turn.values)):
            _take(pair, value)

    def report(self) -> StepReport:
        """Return what became of the gradients so far."""
        step, lost = self._rounds.report()
        tally = self._shards[0].accumulation.state()[2] if self._shards else {}
        workers = range(self._service.size)
        used, dropped = ({w: tally.get(w, [0, 0])[i] for w in workers} for i in range(2))
        return StepReport(step, used, dropped, lost)

    def leave(self) -> None:
        """Take part no longer; the chief waits until all have left, and ends."""
        try:
            perform(self._rounds, Deregister(self._worker), "close", None)
        except UnavailableError as error:
            _log.warning("close: the chief is gone: %s", error)
        if isinstance(self._rounds, TokenQueue):
            if self._loop is None:
                why = "apply_gradients: the chief has left without a gradient, expected one"
                self._rounds.fail(UnavailableError(why))
            while not self._rounds.nobody.wait(_REMIND_AFTER):
                _log.warning("close: workers %s have not left yet", self._rounds.active_workers())
        self.stop()

    def abort(self, reason: str) -> None:
        """Take part no longer, without waiting for anybody."""
        self._rounds.submit(Deregister(self._worker, reason))

    def stop(self) -> None:
        """End the chief's thread."""
        if self._loop is not None:
            self._loop.stop()
            self._loop.join()

    def _updating(
        self, optimizer: ArrayOptimizer, masters: list[_ChiefCopy]
    ) -> Callable[[list[Sequence[Gradient]]], Sequence[Array]]:
        positions = [i for shard in self._shards for i in shard.positions]

        def update(results: list[Sequence[Gradient]]) -> Sequence[Array]:
            means = dict(zip(positions, (g for part in results for g in part), strict=True))
            optimizer.apply_gradients([(means[i], own) for i, own in enumerate(masters)])
            return [own.value.copy() for own in masters]

        return update

    def _drop_worker(self, worker: int) -> None:
        """Go on without a worker that has not left in good order."""
        try:
            why = self._service.departures([worker], timeout=0)[worker]
        except OpError:
            why = None
        assert isinstance(self._rounds, TokenQueue)
        self._rounds.lose(worker, why or "it has ended without leaving")


def _on_host(pair: Pair) -> Any:
    """Return the gradient of a variable as messages carry it."""
    gradient = None if pair.gradient is None else array_ops.to_host(pair.gradient)
    return gradient if pair.rows is None else Rows(pair.rows, gradient)


def _take(pair: Pair, value: Array) -> None:
    """Let a variable have a value."""
    if isinstance(pair.value, np.ndarray):
        pair.value[...] = value
        return
    new = array_ops.overwrite(pair.value, array_ops.on_same_device(pair.value, value))
    if pair.settle is not None:
        pair.settle(new)


def _balance(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Share things among `count` places, the largest first, each to the place with least so far."""
    loads = [0] * count
    places: list[list[int]] = [[] for _ in range(count)]
    for size, position in sorted(((s, -i) for i, s in enumerate(sizes)), reverse=True):
        place = loads.index(min(loads))
        loads[place] += size
        places[place].append(-position)
    return [sorted(place) for place in places]


def _all(
    deliveries: list[tuple[OperationOwner, PendingOperation]],
    turn: tuple[OperationOwner, PendingOperation],
) -> None:
    """Deliver everything and wait for a turn, all at the same time.

    Raises:
        OpError: the first error of a delivery, else that of the turn. All deliveries have ended by
            then: their arrays may change.
    """
    attempts = [*deliveries, turn]
    try:
        for where, attempt in attempts:
            where.submit(attempt)
        errors = []
        for where, attempt in deliveries:
            try:
                finish(where, attempt, "apply_gradients")
            except OpError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        finish(*turn, "apply_gradients")
    except BaseException:
        for where, attempt in attempts:
            where.abandon(attempt)
        raise
