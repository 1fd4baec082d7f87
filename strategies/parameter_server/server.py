"""Server side of the parameter server: the schedule of updates on one ps task.

A `GroupServer` holds the variables. This module decides when gradients update them::

    asynchronous   push --> judge --> update --> reply: new values
    synchronous    push --> wait until all workers have pushed --> mean --> update --> reply to all
    warming up     push of the chief as above; of another worker: wait until the chief has made its
                   steps, then reply: new values; a gradient of older values is dropped

A worker is a *member* from its `join`, a request without a reply, until that request is undone
because the worker has left or died.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import NamedTuple

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
from strategies.parameter_server.options import TrainingOptions
from strategies.parameter_server.restore_server import RestoreServer
from strategies.parameter_server.snapshot_server import SnapshotServer
from strategies.parameter_server.staleness import Decision, StalenessTracker
from strategies.rpc.registry import ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.variables.group_server import GroupServer
from strategies.variables.variable_group import VariableState

__all__ = ["PARAMETERS", "ParameterServer"]

log = logging.getLogger(__name__)


class _Push(NamedTuple):
    """Gradients of one worker, and its own learning rates if any, by number of the part."""

    work: ServerRequest
    worker: int
    version: int
    examples: int | None  # rows that the gradients average; None if unknown
    gradients: dict[int, Gradient]
    rates: dict[int, float]


class ParameterServer:
    """Update schedule of the variables of one ps task.

    Args:
        name: name in messages.

    Attributes:
        values: server of the variables.
        snapshots: snapshots of the variables.
        restores: restores that tasks have begun.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.values = GroupServer(name)
        self._group = self.values.group
        self._options: TrainingOptions | None = None
        self._tracker = StalenessTracker()
        # Only the thread of the variables uses the state below, so it needs no lock.
        self._members: dict[int, ServerRequest] = {}  # worker -> its `join`
        self._waiting: dict[int, _Push] = {}  # worker -> its push in this round
        self._held: list[_Push] = []  # pushes that wait for the end of the warm-up
        self._warm_at: int | None = None  # version at the end of the warm-up; None before
        self._left: set[int] = set()  # workers that have left or died
        self.snapshots = SnapshotServer(self._group, self._resume, self._left.__contains__)
        self.restores = RestoreServer()

    def prepare(self, options: TrainingOptions) -> None:
        """Set the training options, before any worker joins.

        Raises:
            FailedPreconditionError: the options were already set.
        """
        if self._options is not None:
            raise FailedPreconditionError(
                f"ParameterServerStrategy: this name is taken, expected a new one, got "
                f"{self.name!r}; give each strategy of a cluster its own shared_name="
            )
        self._options = options
        self._tracker = StalenessTracker(options.staleness)
        # Without a warm-up it ends at version 0, so that no gradient is early.
        self._warm_at = None if options.warmup_steps else 0

    @property
    def options(self) -> TrainingOptions:
        """Options from `prepare`."""
        assert self._options is not None
        return self._options

    def load_own(self, states: Mapping[str, VariableState], updates: int) -> None:
        """Restore the result of `GroupServer.own_state`."""

        def load() -> None:
            self._group.load(states, updates)
            self.snapshots.made_own()
            self._after_load()

        # Between two requests, so that no worker sees half of the state.
        self.values.run(load)

    def serve(self, work: ServerRequest, request: Callable[[ServerRequest], None]) -> None:
        """Queue a request for the thread of the variables."""
        # `_end` runs when the request is withdrawn or its worker is lost, for pushes and for
        # `join`.
        self.values.serve(work, request, partial(self._end, work))

    def close(self) -> None:
        """Fail all waiting requests and stop the threads."""
        gone = CancelledError(f"{self.name}: the ps task has discarded its variables")

        def end() -> None:
            for push in self._pushes():
                push.work.fail(gone)
            self.snapshots.close(gone)

        self.values.close(end)

    # All methods below run in the thread of the variables.

    def join(self, work: ServerRequest) -> None:
        """Add a worker as a member until its request ends."""
        # Without a reply: the open request is the membership, and ends with its worker.
        self._members[work.arguments["worker"]] = work

    def _pushes(self) -> list[_Push]:
        """Return the waiting pushes."""
        return [*self._waiting.values(), *self._held]

    def push(self, work: ServerRequest) -> None:
        """Handle the gradients of a worker; the reply contains new values.

        Raises:
            UnavailableError: the worker is not a member any more, so that updates would not wait
                for it.
            ValueError: the gradients do not fit.
        """
        # All gradients are checked first: a push changes all variables of this ps or none.
        push = self._check(work)
        if push.worker not in self._members:
            # After a silence longer than the service's timeout, its `join` was undone: rounds do
            # not wait for it any more.
            raise UnavailableError(
                f"push: this ps counts the worker as gone, expected one of tasks "
                f"{sorted(self._members)}, got task {push.worker} ({self.name})"
            )
        if push.worker in self._waiting:
            # A second thread of the worker would replace the gradients of the first.
            raise InvalidArgumentError(
                f"push: this worker's last gradients still wait for those of others (worker: task "
                f"{push.worker})"
            )
        # Gradients of values from before the end of the warm-up are held, and then dropped.
        early = push.worker != self.options.chief and (
            self._warm_at is None or push.version < self._warm_at
        )
        if early:
            self._held.append(push)
        elif self.options.synchronous:
            # Held until `_resume` sees that the round is complete.
            self._waiting[push.worker] = push
        elif push.examples == 0:
            # A gradient of no rows changes nothing and is not recorded.
            self._reply(push, Decision(self._staleness(push), 0.0))
        else:
            decision = self._weigh(push)
            if decision.weight:
                factor = decision.weight * self._rate_scale
                self._group.update(push.gradients, push.rates, factor)
            self._reply(push, decision)
        self._resume()

    def _check(self, work: ServerRequest) -> _Push:
        """Check all gradients before the first variable changes."""
        told = work.arguments
        given, rates = self._group.gradients(told, work.values)
        # A worker can only have a version that this ps has sent.
        if not 0 <= told["version"] <= self._group.version:
            raise InvalidArgumentError(
                f"push: no such version, expected 0 .. {self._group.version}, got "
                f"{told['version']} (worker: task {told['worker']})"
            )
        return _Push(work, told["worker"], told["version"], told["examples"], given, rates)

    def _resume(self) -> None:
        """Update if the round is complete, and release held pushes after the warm-up."""
        chief = self.options.chief
        # During the warm-up a round consists of the chief alone, later of all members: it does not
        # wait for workers that have left.
        expected = {chief} if self._warm_at is None else self._members.keys()
        allowed = all(self.snapshots.allows(push.work) for push in self._waiting.values())
        if self._waiting and allowed and expected <= self._waiting.keys():
            # In rank order, so that the sum does not depend on the order of arrival.
            round_ = [push for _, push in sorted(self._waiting.items())]
            # Before the update, so that an error cannot leave the round waiting for ever.
            self._waiting.clear()
            try:
                self._update_together(round_)
            except Exception as error:  # for all workers of the round, not only the last
                for push in round_:
                    self.snapshots.fail(push.work, error)
        if self._warm_at is None:
            # The warm-up also ends when the chief leaves.
            if self._group.updates < self.options.warmup_steps and chief in self._members:
                return
            # Gradients of older values were computed without the warm-up, and are dropped below.
            self._warm_at = self._group.version
        # Replies may let a worker push again, so the list is taken first.
        held, self._held = self._held, []
        for push in held:
            late = Decision(self._staleness(push), 0.0)
            self._reply(push, self._tracker.record(push.worker, late))

    def _update_together(self, pushes: Sequence[_Push]) -> None:
        """Update by the mean of all workers' gradients, and reply to all."""
        weights = gradient_sums.weights([push.examples for push in pushes], "workers")
        # Gradients of no rows take part in the round, but not in the mean.
        useful = [(p, w) for p, w in zip(pushes, weights, strict=True) if w]
        # Before the update, which changes the version and with it the staleness.
        decisions = {p.worker: self._weigh(p) for p, _ in useful}
        useful = [(p, w) for p, w in useful if decisions[p.worker].weight]
        if useful:
            rates: dict[int, float] = {}
            for push, _ in reversed(useful):  # the first worker's rates override the rest
                rates |= push.rates
            means = self._group.means([(p.gradients, w) for p, w in useful])
            self._group.update(means, rates, self._rate_scale)
        for push in pushes:
            # Every worker of the round gets the new values, also one whose gradients were dropped.
            self._reply(push, decisions.get(push.worker, Decision(0, 0.0)))

    @property
    def _rate_scale(self) -> float:
        # The chief alone trains at the optimizer's own rate, whatever the number of workers.
        return 1.0 if self._warm_at is None else self.options.rate_scale

    def _staleness(self, push: _Push) -> int:
        return self._group.version - push.version

    def _weigh(self, push: _Push) -> Decision:
        return self._tracker.weigh(push.worker, self._staleness(push))

    def _reply(self, push: _Push, decision: Decision) -> None:
        self.snapshots.made(push.work)
        try:
            self.values.pull(push.work, staleness=decision.staleness, weight=decision.weight)
        except Exception as error:  # the other pushes of the round still need their replies
            push.work.fail(error)

    def _end(self, work: ServerRequest, error: OpError | None = None) -> None:
        """End a waiting request, with an error or, for None, without a reply."""
        if error is not None:
            work.fail(self._explain(work, error))  # no effect after a reply
        self._withdraw(work)
        self.snapshots.end(work, error)
        self.restores.end(work)
        # The end of a `join` request removes the member.
        for worker in [w for w, membership in self._members.items() if membership is work]:
            log.info("%s: worker on task %d has left", self.name, worker)
            del self._members[worker]
            self._left.add(worker)
            # One thread of the worker may still wait for its push while another thread left.
            for push in [push for push in self._pushes() if push.worker == worker]:
                push.work.fail(
                    FailedPreconditionError(
                        "push: the worker has left before its gradients were applied (worker: "
                        f"task {worker})"
                    )
                )
                self._withdraw(push.work)
            # The round may be complete without this worker.
            self._resume()
            self.snapshots.advance()

    def _withdraw(self, work: ServerRequest) -> None:
        """Drop the gradients of a request if they are still waiting."""
        self._waiting = {w: push for w, push in self._waiting.items() if push.work is not work}
        self._held = [push for push in self._held if push.work is not work]

    def _explain(self, work: ServerRequest, error: OpError) -> OpError:
        """Add to a deadline error the condition that the request waited for."""
        if any(push.work is work for push in self._held):
            done, wanted = self._group.updates, self.options.warmup_steps
            why = f"the chief has made {done} of {wanted} warm-up updates"
        elif any(push.work is work for push in self._waiting.values()):
            missing = sorted(self._members.keys() - self._waiting.keys())
            why = f"no gradients from tasks {missing}"
        else:
            return self.snapshots.explain(work, error)
        return DeadlineExceededError(f"{error.message}; {why}")

    def report(self, work: ServerRequest) -> None:
        """Reply with statistics of every worker's gradients."""
        records = [[worker, *astuple(r)] for worker, r in sorted(self._tracker.records.items())]
        work.reply(version=self._group.updates, records=records, members=sorted(self._members))

    def load(self, work: ServerRequest) -> None:
        """Restore a state; see `GroupServer.load`."""
        if self._waiting:
            # Their gradients were computed from values that would no longer exist.
            raise FailedPreconditionError(
                f"load_state_dict: gradients wait to be applied, expected none before the state is "
                f"loaded, got those of tasks {sorted(self._waiting)}"
            )
        read = self.restores.take(work) if "restore" in work.arguments else None
        self.values.load(work, read)
        self.snapshots.made(work)
        self._after_load()

    def assign(self, work: ServerRequest) -> None:
        """Set the values of some variables; see `GroupServer.assign`."""
        self.values.assign(work)
        self.snapshots.made(work)

    def _after_load(self) -> None:
        if self._group.updates < self.options.warmup_steps:
            # A state from within the warm-up continues it.
            self._warm_at = None
        self._resume()


_Request = Callable[[ParameterServer, ServerRequest], None]

# Operation -> its handler. Snapshots may hold the changes.
_CHANGES: dict[str, _Request] = {
    "assign": ParameterServer.assign,
    "load": ParameterServer.load,
    "push": ParameterServer.push,
}
_OTHERS: dict[str, _Request] = {
    "join": ParameterServer.join,
    "like": lambda server, work: server.values.like(work),
    "pull": lambda server, work: server.values.pull(work),
    "report": ParameterServer.report,
    "restore": lambda server, work: server.restores.begin(work),
    "restore_read": lambda server, work: server.restores.read(work),
    "rows": lambda server, work: server.values.rows(work),
    "snapshot": lambda server, work: server.snapshots.snapshot(work),
    "snapshot_hold": lambda server, work: server.snapshots.hold(work),
    "snapshot_read": lambda server, work: server.snapshots.read(work),
    "snapshot_resume": lambda server, work: server.snapshots.resume(work),
    "snapshot_take": lambda server, work: server.snapshots.take(work),
    "snapshot_write": lambda server, work: server.snapshots.write(work),
}


def _serve_change(request: _Request, server: ParameterServer, work: ServerRequest) -> None:
    server.serve(work, lambda work: server.snapshots.change(work, partial(request, server)))


def _serve(request: _Request, server: ParameterServer, work: ServerRequest) -> None:
    server.serve(work, partial(request, server))


PARAMETERS = register_type(
    ResourceType(
        "Parameters",
        lambda description, name: ParameterServer(name),
        # Any description fits: the options are compared among all tasks when the strategy is made.
        lambda server, description: None,
        {
            **{
                operation: partial(_serve_change, request)
                for operation, request in _CHANGES.items()
            },
            **{name: partial(_serve, request) for name, request in _OTHERS.items()},
        },
        ParameterServer.close,
    )
)
