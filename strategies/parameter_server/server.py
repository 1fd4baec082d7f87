"""Server side of the parameter server: variables and updates of one ps task.

Requests come in by the service's thread and are worked off by a thread of the shard, one after the
other, so that what a worker gets is never half of an update. `PartStorage` are what is updated;
here is when, and by whose gradients.

::

    asynchronous   push --> judge --> update --> answer: new values
    synchronous    push --> wait until all workers have pushed --> mean --> update --> answer to all
    warming up     push of the chief as above; of another worker: wait until the chief has made its
                   steps, then answer: new values; a gradient of older ones is dropped

A worker is a *member* from its `join`, a request that is never answered, until that is given up:
because the worker has left, or is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy.typing as npt

from strategies.core import gradient_sums
from strategies.core.sparse import Gradient
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
)
from strategies.optimizers import Optimizer
from strategies.parameter_server.part_storage import PartStorage
from strategies.parameter_server.staleness import Decision, StalenessRule, StalenessTracker
from strategies.parameter_server.state_io import ServerState
from strategies.rpc.registry import ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest

__all__ = ["PARAMETERS", "ServerOptions", "ParameterServer"]

log = logging.getLogger(__name__)


class ServerOptions(NamedTuple):
    """How a shard is to be trained, equal on all ps tasks.

    Attributes:
        optimizer: of which each variable gets a copy of its own; None if each is given one.
        synchronous: whether an update takes the mean of all workers' gradients.
        staleness: what becomes of stale gradients.
        warmup_steps: updates that the chief makes alone at first.
        rate_scale: what the learning rate is multiplied by after the warm-up.
        chief: rank of the chief.
    """

    optimizer: Optimizer | None
    synchronous: bool
    staleness: StalenessRule
    warmup_steps: int
    rate_scale: float
    chief: int


class _Push(NamedTuple):
    """Gradients of one worker.

    Attributes:
        examples: how many rows they are the mean of; None if that is not told.
        gradients: number of the part -> gradient.
        rates: number of the part -> learning rate, where the worker says which.
    """

    work: ServerRequest
    worker: int
    version: int
    examples: int | None
    gradients: dict[int, Gradient]
    rates: dict[int, float]


class ParameterServer:
    """What one ps task holds.

    Args:
        name: in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rules: ServerOptions | None = None
        self._parts = PartStorage(name)
        self._ledger = StalenessTracker()
        self._members: dict[int, ServerRequest] = {}  # worker -> its `join`
        self._waiting: dict[int, _Push] = {}  # worker -> its push in this round
        self._held: list[_Push] = []  # until the warm-up is over
        self._warm_at: int | None = None  # version at which it was over
        self._before = 0  # updates that a checkpoint has brought
        self._line = ThreadPoolExecutor(1, thread_name_prefix=name)

    def prepare(self, rules: ServerOptions) -> None:
        """Say how this is trained; before any worker joins.

        Raises:
            FailedPreconditionError: that has been said.
        """
        if self._rules is not None:
            raise FailedPreconditionError(
                f"ParameterServerStrategy: this name is taken, expected a new one, got "
                f"{self.name!r}; give each strategy of a cluster its own shared_name="
            )
        self._rules = rules
        self._ledger = StalenessTracker(rules.staleness)
        self._warm_at = None if rules.warmup_steps else 0

    def add(
        self,
        name: str,
        value: npt.NDArray[Any] | Callable[[], npt.NDArray[Any]],
        *,
        optimizer: Optimizer | None = None,
        resident: bool = True,
    ) -> None:
        """Add a variable; before anybody asks for it.

        Args:
            name: in messages.
            value: shape (...), copied; or a function that makes it.
            optimizer: of this variable, which gets a copy; that of the rules if None.
            resident: whether workers hold a copy, which every answer brings up to date.
        """
        own = optimizer or self.rules.optimizer
        self._line.submit(self._parts.add, name, value, own, resident=resident).result()

    @property
    def rules(self) -> ServerOptions:
        """What `prepare` has said."""
        assert self._rules is not None
        return self._rules

    def serve(
        self, work: ServerRequest, request: Callable[[ParameterServer, ServerRequest], None]
    ) -> None:
        """Let the shard's thread answer a request, when it comes to it."""

        def answer() -> None:
            try:
                request(self, work)
            except Exception as error:
                work.fail(error)

        # Said at once: it may have to end before its turn. What ends it comes after it in line.
        work.wait(
            lambda error: self._defer(lambda: self._end(work, error), lambda: None),
            lambda: self._defer(lambda: self._end(work), lambda: None),
        )
        self._defer(answer, lambda: work.fail(CancelledError(f"{self.name}: it was discarded")))

    def close(self) -> None:
        """Fail all that waits, and end the threads."""
        gone = CancelledError(f"{self.name}: the ps task has discarded its variables")

        def end() -> None:
            for push in (*self._waiting.values(), *self._held):
                push.work.fail(gone)
            self._waiting.clear()
            self._held.clear()
            self._parts.close()

        self._defer(end, end)
        self._line.shutdown(wait=False)

    def _defer(self, function: Callable[[], object], instead: Callable[[], object]) -> None:
        try:
            self._line.submit(function)
        except RuntimeError:  # it is closed
            instead()

    # What follows runs in the shard's thread alone.

    def join(self, work: ServerRequest) -> None:
        """Count a worker in until its request ends."""
        self._members[work.arguments["worker"]] = work

    def _on_leave(self, worker: int) -> None:
        log.info("%s: worker on task %d has left", self.name, worker)
        del self._members[worker]
        # One of its threads may wait for gradients that it has pushed while another one left.
        pushes = [push for push in (*self._waiting.values(), *self._held) if push.worker == worker]
        for push in pushes:
            push.work.fail(
                FailedPreconditionError(
                    f"push: the worker has left before its gradients were applied, which nobody "
                    f"will do now (worker: task {worker})"
                )
            )
            self._withdraw(push.work)
        self._resume()

    def push(self, work: ServerRequest) -> None:
        """Take the gradients of a worker; answered with new values.

        Raises:
            UnavailableError: the worker is not a member any more: nobody would wait for it.
            ValueError: they do not fit.
        """
        push = self._check(work)
        if push.worker not in self._members:
            raise UnavailableError(
                f"push: this ps counts the worker as gone, expected one of tasks "
                f"{sorted(self._members)}, got task {push.worker} ({self.name})"
            )
        if push.worker in self._waiting:
            raise InvalidArgumentError(
                f"push: this worker's last gradients still wait for those of others (worker: task "
                f"{push.worker})"
            )
        early = push.worker != self.rules.chief and (
            self._warm_at is None or push.version < self._warm_at
        )
        if early or self.rules.synchronous:
            if early:
                self._held.append(push)
            else:
                self._waiting[push.worker] = push
            self._resume()
            return
        if push.examples == 0:
            self._reply(push, Decision(self._ledger.version - push.version, 0.0))
            return
        decision = self._ledger.weigh(push.worker, push.version)
        if decision.weight:
            self._update(push.gradients, push.rates, decision.weight)
        self._reply(push, decision)
        self._resume()

    def _check(self, work: ServerRequest) -> _Push:
        """Look at all gradients before the first variable is changed."""
        told = work.arguments
        given, rates = self._parts.gradients(told, work.values)
        if not 0 <= told["version"] <= self._ledger.version:
            raise InvalidArgumentError(
                f"push: no such version, expected 0 .. {self._ledger.version}, got "
                f"{told['version']} (worker: task {told['worker']})"
            )
        return _Push(work, told["worker"], told["version"], told["examples"], given, rates)

    def _resume(self) -> None:
        """Make the update of a round that is complete, and let go who waits for the warm-up."""
        chief = self.rules.chief
        expected = {chief} if self._warm_at is None else self._members.keys()
        if self._waiting and expected <= self._waiting.keys():
            round_ = [self._waiting[worker] for worker in sorted(self._waiting)]
            self._waiting.clear()
            try:
                self._update_together(round_)
            except Exception as error:  # everybody's, not only that of the last one
                for push in round_:
                    push.work.fail(error)
        version = self._ledger.version
        if self._warm_at is None:
            if self._updates < self.rules.warmup_steps and chief in self._members:
                return
            self._warm_at = version
        if self._held:
            held, self._held = self._held, []
            for push in held:
                late = Decision(version - push.version, 0.0)
                self._reply(push, self._ledger.record(push.worker, late))

    def _update_together(self, pushes: Sequence[_Push]) -> None:
        """Update by the mean of all workers' gradients, and answer all of them."""
        weights = gradient_sums.weights([push.examples for push in pushes], "workers")
        useful = [(p, w) for p, w in zip(pushes, weights, strict=True) if w]
        decisions = {p.worker: self._ledger.weigh(p.worker, p.version) for p, _ in useful}
        useful = [(p, w) for p, w in useful if decisions[p.worker].weight]
        if useful:
            rates: dict[int, float] = {}
            for push, _ in reversed(useful):  # so that those of the first worker count
                rates |= push.rates
            self._update(self._parts.means([(p.gradients, w) for p, w in useful]), rates)
        for push in pushes:
            self._reply(push, decisions.get(push.worker, Decision(0, 0.0)))

    def _update(
        self, given: Mapping[int, Gradient], rates: Mapping[int, float], factor: float = 1.0
    ) -> None:
        """Change variables by their gradients."""
        if self._warm_at is not None:
            factor *= self.rules.rate_scale
        self._parts.update(given, rates, factor, self._ledger.version + 1)
        self._ledger.version += 1

    @property
    def _updates(self) -> int:
        """How many there have been, also before the checkpoint from which training goes on."""
        return self._before + self._ledger.version

    def _reply(self, push: _Push, decision: Decision) -> None:
        self._answer(push.work, staleness=decision.staleness, weight=decision.weight)

    def _answer(self, work: ServerRequest, **facts: Any) -> None:
        """Answer with what the copies of a worker lack, as `Client` reads it."""
        told = work.arguments
        values, counts = self._parts.updates_since(told["version"], told.get("values_as"))
        work.reply(values, version=self._ledger.version, frames=counts, **facts)

    def _end(self, work: ServerRequest, error: OpError | None = None) -> None:
        """End a request if it waits: with an error, or because nobody wants an answer."""
        if error is not None:
            work.fail(self._explain(work, error))  # does nothing if it was answered
        self._withdraw(work)
        for worker in [w for w, membership in self._members.items() if membership is work]:
            self._on_leave(worker)

    def _withdraw(self, work: ServerRequest) -> None:
        """Forget the gradients that came with a request, if they still wait."""
        self._waiting = {w: push for w, push in self._waiting.items() if push.work is not work}
        self._held = [push for push in self._held if push.work is not work]

    def _explain(self, work: ServerRequest, error: OpError) -> OpError:
        """Say what a request has waited for until its time was over."""
        if any(push.work is work for push in self._held):
            why = f"the chief has made {self._updates} of {self.rules.warmup_steps} warm-up updates"
        elif any(push.work is work for push in self._waiting.values()):
            missing = sorted(self._members.keys() - self._waiting.keys())
            why = f"no gradients have come from tasks {missing}"
        else:
            return error
        return DeadlineExceededError(f"{error.message}; {why}")

    def pull(self, work: ServerRequest) -> None:
        """Answer with what is new of all resident variables."""
        self._answer(work)

    def rows(self, work: ServerRequest) -> None:
        """Answer with some rows of a variable."""
        told = work.arguments
        work.reply([self._parts.rows(told["part"], work.values[0], told.get("values_as"))])

    def assign(self, work: ServerRequest) -> None:
        """Let a variable take another value."""
        self._parts.assign(work.arguments["part"], work.values[0], self._ledger.version)
        work.reply()

    def report(self, work: ServerRequest) -> None:
        """Answer with what came of every worker's gradients."""
        records = [
            [worker, r.applied, r.dropped, r.total_staleness, r.most_staleness]
            for worker, r in sorted(self._ledger.records.items())
        ]
        work.reply(version=self._updates, records=records, members=sorted(self._members))

    def state(self, work: ServerRequest) -> None:
        """Answer with all that a checkpoint keeps."""
        states = self._parts.states().values()
        arrays = [array for held in states for array in held.arrays.values()]
        parts = [[held.counts, list(held.arrays)] for held in states]
        work.reply(arrays, parts=parts, updates=self._updates)

    def own_state(self) -> tuple[dict[str, ServerState], int]:
        """Return name of a part -> its state, as views, and the number of updates."""
        return self._line.submit(lambda: (self._parts.states(), self._updates)).result()

    def load_own(self, states: Mapping[str, ServerState], updates: int) -> None:
        """Go on from what `own_state` has returned."""
        self._line.submit(self._go_on_from, states, updates).result()

    def load(self, work: ServerRequest) -> None:
        """Go on from what `state` has answered."""
        if self._waiting:
            raise FailedPreconditionError(
                f"load_state_dict: gradients wait to be applied, expected none before the state is "
                f"loaded, got those of tasks {sorted(self._waiting)}"
            )
        told = work.arguments
        values = iter(work.values)
        states = {
            name: ServerState(counts, {kind: next(values) for kind in kinds})
            for name, (counts, kinds) in zip(self._parts.names(), told["parts"], strict=True)
        }
        self._go_on_from(states, told["updates"])
        work.reply()

    def _go_on_from(self, states: Mapping[str, ServerState], updates: int) -> None:
        self._parts.load(states, self._ledger.version)
        self._before = updates - self._ledger.version
        if self._updates < self.rules.warmup_steps:
            self._warm_at = None
        self._resume()


_OPERATIONS = ("assign", "join", "load", "pull", "push", "report", "rows", "state")


def _serve(operation: str, shard: ParameterServer, work: ServerRequest) -> None:
    shard.serve(work, getattr(ParameterServer, operation))


PARAMETERS = register_type(
    ResourceType(
        "Parameters",
        lambda description, name: ParameterServer(name),
        lambda shard, description: None,
        {operation: partial(_serve, operation) for operation in _OPERATIONS},
        ParameterServer.close,
    )
)
