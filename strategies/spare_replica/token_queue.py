"""Token queue: the chief grants steps to workers.

A step ends when the chief has averaged enough gradients and updated the variables. It then
*publishes* the new step with the values. A worker that has sent its gradient waits for a token, its
*turn*, and receives step and values::

    step 4                          step 5                 tokens of step 5:
    worker 0  gradient, waits ----> values of 5 -> ...     max(workers, replicas_to_aggregate);
    worker 1  gradient, waits ----> values of 5 -> ...     unused tokens of step 4 expire
    worker 2  late ........ stale, values of 5 at once
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strategies.errors import CancelledError, OpError, OutOfRangeError, UnavailableError
from strategies.rpc.client import Reply
from strategies.rpc.operation import OperationOwner, PendingOperation, RemoteAttempts, serve
from strategies.rpc.registry import ResourceType, describe_difference, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service
from strategies.rpc.wire import Array

__all__ = ["Deregister", "RemoteTokenQueue", "TokenQueue", "Heartbeat", "TakeToken", "open_rounds"]


class TakeToken(PendingOperation):
    """Wait until a worker may start the next step.

    Args:
        worker: number of the worker.
        local_step: step of the gradient that the worker has sent.

    Attributes:
        step: step to start.
        values: values of the variables at that step; do not change them.
    """

    step = -1
    values: Sequence[Array] = ()

    def __init__(self, worker: int, local_step: int) -> None:
        self.worker = worker
        self.local_step = local_step


class Heartbeat(PendingOperation):
    """Register a worker; never completes, so that its end reveals that the worker is lost."""

    def __init__(self, worker: int) -> None:
        self.worker = worker


class Deregister(PendingOperation):
    """Remove a worker; with a reason if it failed."""

    def __init__(self, worker: int, reason: str | None = None) -> None:
        self.worker = worker
        self.reason = reason


class TokenQueue(OperationOwner):
    """Steps and workers, on the chief's task; thread-safe.

    Args:
        aggregate: number of gradients per step.
        total: number of workers.
        step: first step, which workers start without a token.
        name: name in errors.

    Attributes:
        on_lost: called with the number of a worker whose heartbeat ended; it calls `lose` with the
            reason.
        on_failure: called when no further step is possible.
        failure: reason why no further step is possible, or None.
    """

    def __init__(self, aggregate: int, total: int, step: int, name: str) -> None:
        self.aggregate = aggregate
        self.total = total
        self.first_step = step
        self.step = step
        self.lost: dict[int, str] = {}  # worker that died or failed -> reason
        self.nobody = threading.Event()  # set when all workers have left
        self.on_lost: Callable[[int], object] = lambda worker: self.lose(worker, "it has ended")
        self.on_failure: Callable[[], object] = lambda: None
        self._name = name
        self._lock = threading.Lock()
        self._inside = set(range(total))
        # The workers start the first step without tokens.
        self._tokens = max(total, aggregate) - total
        self._values: Sequence[Array] = ()
        self._turns: list[TakeToken] = []
        self.failure: OpError | None = None

    def submit(self, attempt: PendingOperation) -> None:
        """Run an operation; a turn waits for a token."""
        if isinstance(attempt, Deregister):
            with self._lock:
                attempt.complete()
            attempt.notify()
            self.lose(attempt.worker, attempt.reason)
        elif isinstance(attempt, TakeToken):
            with self._lock:
                self._turns.append(attempt)
            # A worker whose gradient was stale gets its turn at once.
            self._advance()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End a waiting turn with an error."""
        with self._lock:
            # Only turns wait; a heartbeat stays open and a deregistration ends at once.
            if attempt.done or not isinstance(attempt, TakeToken) or attempt not in self._turns:
                return
            self._turns.remove(attempt)
            attempt.complete(error)
        attempt.notify()

    def abandon(self, attempt: PendingOperation) -> None:
        """End an operation without a caller; for a heartbeat, report the worker as lost."""
        if isinstance(attempt, Heartbeat):
            with self._lock:
                # A worker that has left ends its heartbeat as well, which is no loss.
                known = attempt.worker not in self._inside
            if not known:
                self.on_lost(attempt.worker)
        else:
            self.withdraw(attempt, CancelledError(f"{self._name}: the caller was interrupted"))

    def publish(self, step: int, values: Sequence[Array]) -> None:
        """Start a step; the values must not change any more."""
        with self._lock:
            self.step = step
            self._values = values
            # Replaces the tokens that are left, because tokens of earlier steps expire.
            self._tokens = max(self.total, self.aggregate)
        self._advance()

    def fail(self, error: OpError) -> None:
        """End all turns that cannot be granted at once with an error."""
        with self._lock:
            if self.failure is not None:
                return
            # The first error is the cause; later ones follow from it.
            self.failure = error
        # The loop first, so that it publishes no step after the failure.
        self.on_failure()
        self._advance()

    def active_workers(self) -> list[int]:
        """Return the workers that have not sent a gradient for this step."""
        with self._lock:
            return sorted(self._inside - {turn.worker for turn in self._turns})

    def report(self) -> tuple[int, dict[int, str]]:
        """Return the step, and the lost workers with their reasons."""
        with self._lock:
            return self.step, dict(self.lost)

    def close(self) -> None:
        """Cancel all waiting turns."""
        self.fail(CancelledError(f"{self._name}: the chief has ended"))

    def lose(self, worker: int, why: str | None) -> None:
        """Remove a worker; `why` is None after a clean leave."""
        with self._lock:
            if worker not in self._inside:
                return
            self._inside.discard(worker)
            if why is not None:
                self.lost[worker] = why
            # With fewer workers than gradients per step, every worker is needed.
            left, needed = len(self._inside), min(self.aggregate, self.total)
            if not left:
                self.nobody.set()
            reasons = "; ".join(f"worker {w}: {why}" for w, why in sorted(self.lost.items()))
        # Without the lock, which `fail` takes.
        if left < needed:
            kind = UnavailableError if reasons else OutOfRangeError
            self.fail(
                kind(
                    f"apply_gradients: too few workers are left, expected at least {needed}, got "
                    f"{left} of {self.total} ({reasons or 'the others have left'})"
                )
            )

    def _advance(self) -> None:
        """Grant turns while tokens are available."""
        with self._lock:
            # In the order of arrival, so that a fast worker cannot take all tokens.
            over = [turn for turn in self._turns if self._give(turn)]
            self._turns = [turn for turn in self._turns if not turn.done]
        for turn in over:
            turn.notify()

    def _give(self, turn: TakeToken) -> bool:
        # With enough workers, each gets one token per step. With fewer workers than gradients per
        # step, fast workers take several.
        each = self.total >= self.aggregate
        if self.step > turn.local_step if each else self._tokens > 0:
            self._tokens -= 1
            turn.step, turn.values = self.step, self._values
            turn.complete()
        elif self.failure is not None:
            turn.complete(self.failure)
        return turn.done


class RemoteTokenQueue(RemoteAttempts):
    """Token queue of a chief on another task."""

    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values of an operation's request."""
        if isinstance(attempt, TakeToken):
            return "turn", {"worker": attempt.worker, "step": attempt.local_step}, []
        if isinstance(attempt, Deregister):
            return "leave", {"worker": attempt.worker, "reason": attempt.reason}, []
        assert isinstance(attempt, Heartbeat)
        return "stay", {"worker": attempt.worker}, []

    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        """Store the reply of a turn."""
        if isinstance(attempt, TakeToken):
            attempt.step, attempt.values = answer.metadata["step"], answer.values

    def report(self) -> tuple[int, dict[int, str]]:
        """Return the step, and the lost workers with their reasons."""
        answer = self.service.request(self.address, "report").metadata
        return answer["step"], dict(answer["lost"])


def open_rounds(
    service: Service, *, aggregate: int, total: int, step: int, name: str
) -> TokenQueue | RemoteTokenQueue:
    """Find or create the token queue of the chief, task 0; see `Service.open`."""
    description = {"replicas_to_aggregate": aggregate, "workers": total, "global_step": step}
    place, thing = service.open(_KIND, description, name=name, task=0)
    return RemoteTokenQueue(service, place) if thing is None else thing


def _turn(rounds: TokenQueue, work: ServerRequest) -> None:
    turn = TakeToken(work.arguments["worker"], work.arguments["step"])
    # Without confirmation: a reply takes nothing that must return if the worker dies.
    serve(rounds, turn, work, lambda done: work.reply(list(done.values), step=done.step))


def _stay(rounds: TokenQueue, work: ServerRequest) -> None:
    serve(rounds, Heartbeat(work.arguments["worker"]), work, lambda done: work.reply())


def _leave(rounds: TokenQueue, work: ServerRequest) -> None:
    leave = Deregister(work.arguments["worker"], work.arguments["reason"])
    if leave.reason is None:
        serve(rounds, leave, work, lambda done: work.reply())
    else:
        rounds.submit(leave)  # no reply: the worker has failed and does not wait for one


def _report(rounds: TokenQueue, work: ServerRequest) -> None:
    step, lost = rounds.report()
    work.reply(step=step, lost=list(lost.items()))


def _make(given: Mapping[str, Any], name: str) -> TokenQueue:
    return TokenQueue(given["replicas_to_aggregate"], given["workers"], given["global_step"], name)


def _difference(rounds: TokenQueue, description: Mapping[str, Any]) -> str | None:
    has = {
        "replicas_to_aggregate": rounds.aggregate,
        "workers": rounds.total,
        "global_step": rounds.first_step,
    }
    return describe_difference("chief", has, description)


_KIND = register_type(
    ResourceType(
        "rounds",
        _make,
        _difference,
        {"leave": _leave, "report": _report, "stay": _stay, "turn": _turn},
        TokenQueue.close,
    )
)
