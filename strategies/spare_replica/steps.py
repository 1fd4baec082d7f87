"""Steps of workers and chief with spare replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from strategies.variables.stored_variable import StoredVariable

__all__ = ["SpareSteps", "StepReport"]

_log = logging.getLogger(__name__)

_NAME = "spare replicas"
_REMIND_AFTER = 60.0  # seconds in `leave` until a warning names the remaining workers


@dataclass(frozen=True)
class StepReport:
    """Use of the gradients of all workers.

    Attributes:
        global_step: the chief's step.
        used: worker -> number of averaged gradients.
        dropped: worker -> number of late gradients.
        lost: worker that died or failed -> reason.
    """

    global_step: int
    used: dict[int, int]
    dropped: dict[int, int]
    lost: dict[int, str]


@dataclass(frozen=True)
class _TaskShard:
    """The variables whose gradients one task averages."""

    positions: list[int]
    accumulation: AnyAccumulation


class SpareSteps:
    """Steps of one worker; on task 0 also of the chief.

    Args:
        service: service whose tasks are the workers.
        aggregate: number of gradients per step.
        tasks: tasks that average gradients.
        step: first step.

    Attributes:
        local_step: step of this worker's values.
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
            # Only on the chief's task; other tasks have a `RemoteTokenQueue`.
            self._rounds.on_lost = self._drop_worker
        self._rounds.submit(Heartbeat(self._worker))
        # Requests are handled in order, so the reply confirms the heartbeat: from now on the chief
        # detects the death of this worker.
        self._rounds.report()

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return bool(self._shards)

    def start(self, optimizer: ArrayOptimizer, pairs: list[Pair]) -> None:
        """Open the accumulators; the chief starts to make steps.

        Args:
            optimizer: optimizer of the chief's copies of the variables.
            pairs: pairs of all variables, with their initial values.
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
                most=self._aggregate,  # also limits gradients that arrive before the first take
                task=task,
            )
            return _TaskShard(positions, accumulation)

        pairs_of_tasks = zip(self._tasks, assigned, strict=True)
        # Tasks without a variable get no accumulator: no worker would send it a gradient.
        self._shards = [shard(task, positions) for task, positions in pairs_of_tasks if positions]
        if isinstance(self._rounds, TokenQueue):
            masters = [StoredVariable(pair.key) for pair in pairs]
            for master, pair in zip(masters, pairs, strict=True):
                # The chief updates copies of its own: its variables change only in `deliver`, like
                # those of other workers.
                master.initialize(array_ops.to_host(pair.value))
            accumulations = [shard.accumulation for shard in self._shards]
            self._loop = ChiefLoop(self._rounds, accumulations, self._updating(optimizer, masters))
            # Without waiting for the thread, which may be the caller or wait for its locks.
            self._rounds.on_failure = partial(self._loop.stop, timeout=0)
            self._loop.start()
            # A failure before `on_failure` was set did not stop the loop.
            if self._rounds.failure is not None:
                self._loop.stop()

    def deliver(self, pairs: list[Pair], examples: float | None = None) -> None:
        """Send gradients, wait for newer values, and store these in the variables.

        All gradients for one task go into one message.

        Raises:
            OpError: see `SpareReplicaStrategy.apply_gradients`.
        """
        deliveries: list[tuple[OperationOwner, PendingOperation]] = []
        for shard in self._shards:
            own = [_on_host(pairs[i]) for i in shard.positions]
            apply = Apply(own, self.local_step, self._worker, examples)
            deliveries.append((shard.accumulation, apply))
        # Sent with the gradients, not after them, which saves a round trip per step.
        turn = TakeToken(self._worker, self.local_step)
        _all(deliveries, (self._rounds, turn))
        self.local_step = turn.step
        # A token of the first step has no values: the workers have them already.
        for pair, value in zip(pairs, turn.values, strict=bool(turn.values)):
            _take(pair, value)

    def report(self) -> StepReport:
        """Return the use of all gradients so far."""
        step, lost = self._rounds.report()
        # All shards get the same pushes, so one tally suffices.
        tally = self._shards[0].accumulation.state()[2] if self._shards else {}
        workers = range(self._service.size)
        used, dropped = ({w: tally.get(w, [0, 0])[i] for w in workers} for i in range(2))
        return StepReport(step, used, dropped, lost)

    def leave(self) -> None:
        """Deregister this worker; the chief waits until all workers have left, then stops."""
        try:
            perform(self._rounds, Deregister(self._worker), "close", None)
        except UnavailableError as error:
            _log.warning("close: the chief is gone: %s", error)
        if isinstance(self._rounds, TokenQueue):
            # Without a loop no step will be published, so waiting turns must fail.
            if self._loop is None:
                why = "apply_gradients: the chief has left without a gradient, expected one"
                self._rounds.fail(UnavailableError(why))
            # The chief is the last: other workers still need steps.
            while not self._rounds.nobody.wait(_REMIND_AFTER):
                _log.warning("close: workers %s have not left yet", self._rounds.active_workers())
        self.stop()

    def abort(self, reason: str) -> None:
        """Deregister this worker without waiting."""
        # No wait: this worker fails, and the reply would not help it.
        self._rounds.submit(Deregister(self._worker, reason))

    def stop(self) -> None:
        """Stop the chief's thread."""
        if self._loop is not None:
            self._loop.stop()

    def _updating(
        self, optimizer: ArrayOptimizer, masters: list[StoredVariable]
    ) -> Callable[[list[Sequence[Gradient]]], Sequence[Array]]:
        positions = [i for shard in self._shards for i in shard.positions]

        def update(results: list[Sequence[Gradient]]) -> Sequence[Array]:
            # Shards have the variables in another order than the caller.
            means = dict(zip(positions, (g for part in results for g in part), strict=True))
            optimizer.apply_gradients([(means[i], own.named()) for i, own in enumerate(masters)])
            # While these views exist, the next update writes to other memory. The views are
            # writable, because PyTorch warns about read-only memory.
            return [own.initialized_value[...] for own in masters]

        return update

    def _drop_worker(self, worker: int) -> None:
        """Remove a worker whose heartbeat ended without `leave`."""
        try:
            # Without waiting: this runs in the thread that receives messages.
            why = self._service.departures([worker], timeout=0)[worker]
        except OpError:
            # The worker has not left the service, so only its heartbeat was withdrawn.
            why = None
        assert isinstance(self._rounds, TokenQueue)
        self._rounds.lose(worker, why or "it has ended without leaving")


def _on_host(pair: Pair) -> Any:
    """Return the gradient of a pair in host memory."""
    gradient = None if pair.gradient is None else array_ops.to_host(pair.gradient)
    return gradient if pair.rows is None else Rows(pair.rows, gradient)


def _take(pair: Pair, value: Array) -> None:
    """Store a value in a variable."""
    if isinstance(pair.value, np.ndarray):
        # In place, because models and optimizers refer to the array.
        pair.value[...] = value
        return
    new = array_ops.overwrite(pair.value, array_ops.on_same_device(pair.value, value))
    if pair.settle is not None:
        # Arrays that never change are replaced, and the variable takes the new one.
        pair.settle(new)


def _balance(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Distribute items over `count` places: largest first, each to the least loaded place."""
    loads = [0] * count
    places: list[list[int]] = [[] for _ in range(count)]
    # Deterministic, also for equal sizes: all ranks must compute the same shares.
    for size, position in sorted(((s, -i) for i, s in enumerate(sizes)), reverse=True):
        place = loads.index(min(loads))
        loads[place] += size
        places[place].append(-position)
    return [sorted(place) for place in places]


def _all(
    deliveries: list[tuple[OperationOwner, PendingOperation]],
    turn: tuple[OperationOwner, PendingOperation],
) -> None:
    """Send all deliveries and wait for a turn, all in parallel.

    Raises:
        OpError: first error of a delivery, else the error of the turn. All deliveries have ended
            then, and their arrays may change.
    """
    attempts = [*deliveries, turn]
    try:
        for where, attempt in attempts:
            where.submit(attempt)
        errors = []
        # All deliveries are awaited before an error is raised, since they refer to the caller's
        # arrays.
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
