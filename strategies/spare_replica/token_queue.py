"""Token queue: the chief grants steps to workers.

A step ends when the chief has averaged enough gradients and changed the variables. It then
*publishes* the new step with the values. A worker that has delivered its gradient waits for its
*turn*, and gets both::

    step 4                          step 5                 tokens of step 5: one for each worker,
    worker 0  gradient, waits ----> values of 5 -> ...     or replicas_to_aggregate, if that is
    worker 1  gradient, waits ----> values of 5 -> ...     more; those of step 4 that are left
    worker 2  late ........ stale, values of 5 at once     are of no use any more
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strategies.errors import CancelledError, OpError, OutOfRangeError, UnavailableError
from strategies.rpc.client import Reply
from strategies.rpc.operation import PendingOperation, RemoteAttempts, serve
from strategies.rpc.registry import ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service
from strategies.rpc.wire import Array

__all__ = ["Deregister", "RemoteTokenQueue", "TokenQueue", "Heartbeat", "TakeToken", "open_rounds"]


class TakeToken(PendingOperation):
    """Wait until a worker may begin with the next step.

    Args:
        worker: its number.
        local_step: the step that it has delivered a gradient for.

    Attributes:
        step: to begin with.
        values: of the variables at that step, not to be changed.
    """

    step = -1
    values: Sequence[Array] = ()

    def __init__(self, worker: int, local_step: int) -> None:
        self.worker = worker
        self.local_step = local_step


class Heartbeat(PendingOperation):
    """Take part; waits for ever, so that its end says that the worker is gone."""

    def __init__(self, worker: int) -> None:
        self.worker = worker


class Deregister(PendingOperation):
    """Take part no longer; with a reason if that is not in good order."""

    def __init__(self, worker: int, reason: str | None = None) -> None:
        self.worker = worker
        self.reason = reason


class TokenQueue:
    """Steps and workers, on the chief's task; usable from any thread.

    Args:
        aggregate: how many gradients make a step.
        total: number of workers.
        step: the first one; the workers begin with it without asking.
        name: for errors.

    Attributes:
        on_lost: called with a worker's number when it is gone without a word; to say why by `lose`.
        on_failure: called when no step can be made any more.
        failure: why none can, or None.
    """

    def __init__(self, aggregate: int, total: int, step: int, name: str) -> None:
        self.aggregate = aggregate
        self.total = total
        self.first_step = step
        self.step = step
        self.lost: dict[int, str] = {}  # workers that are dead or have failed, and why
        self.nobody = threading.Event()  # set when all workers are gone
        self.on_lost: Callable[[int], object] = lambda worker: self.lose(worker, "it has ended")
        self.on_failure: Callable[[], object] = lambda: None
        self._name = name
        self._lock = threading.Lock()
        self._inside = set(range(total))
        self._tokens = max(total, aggregate) - total
        self._values: Sequence[Array] = ()
        self._turns: list[TakeToken] = []
        self.failure: OpError | None = None

    def submit(self, attempt: PendingOperation) -> None:
        """Let an attempt wait until there is a token for it."""
        if isinstance(attempt, Deregister):
            with self._lock:
                attempt.complete()
            attempt.notify()
            self.lose(attempt.worker, attempt.reason)
        elif isinstance(attempt, TakeToken):
            with self._lock:
                self._turns.append(attempt)
            self._advance()

    def when_done(self, attempt: PendingOperation, on_done: Callable[[], None]) -> bool:
        """Set the callback of an attempt that waits."""
        with self._lock:
            return attempt.call_when_done(on_done)

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End a turn that waits."""
        with self._lock:
            if attempt.done or not isinstance(attempt, TakeToken) or attempt not in self._turns:
                return
            self._turns.remove(attempt)
            attempt.complete(error)
        attempt.notify()

    def abandon(self, attempt: PendingOperation) -> None:
        """End an attempt for which nobody waits any more; who does not stay has been lost."""
        if isinstance(attempt, Heartbeat):
            with self._lock:
                known = attempt.worker not in self._inside
            if not known:
                self.on_lost(attempt.worker)
        else:
            self.withdraw(attempt, CancelledError(f"{self._name}: the caller was interrupted"))

    def publish(self, step: int, values: Sequence[Array]) -> None:
        """Begin a step; the values must not change any more."""
        with self._lock:
            self.step = step
            self._values = values
            self._tokens = max(self.total, self.aggregate)
        self._advance()

    def fail(self, error: OpError) -> None:
        """Let all turns end with an error, unless they can be given at once."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self.on_failure()
        self._advance()

    def active_workers(self) -> list[int]:
        """Return the workers that have not delivered a gradient for this step."""
        with self._lock:
            return sorted(self._inside - {turn.worker for turn in self._turns})

    def report(self) -> tuple[int, dict[int, str]]:
        """Return the step, and which workers were lost and why."""
        with self._lock:
            return self.step, dict(self.lost)

    def close(self) -> None:
        """Cancel all turns that wait."""
        self.fail(CancelledError(f"{self._name}: the chief has ended"))

    def lose(self, worker: int, why: str | None) -> None:
        """Go on without a worker, which has not left by itself if there is a reason."""
        with self._lock:
            if worker not in self._inside:
                return
            self._inside.discard(worker)
            if why is not None:
                self.lost[worker] = why
            left, needed = len(self._inside), min(self.aggregate, self.total)
            if not left:
                self.nobody.set()
            reasons = "; ".join(f"worker {w}: {why}" for w, why in sorted(self.lost.items()))
        if left < needed:
            kind = UnavailableError if reasons else OutOfRangeError
            self.fail(
                kind(
                    f"apply_gradients: too few workers are left, expected at least {needed}, got "
                    f"{left} of {self.total} ({reasons or 'the others have left'})"
                )
            )

    def _advance(self) -> None:
        """Give turns while there are tokens."""
        with self._lock:
            over = [turn for turn in self._turns if self._give(turn)]
            self._turns = [turn for turn in self._turns if not turn.done]
        for turn in over:
            turn.notify()

    def _give(self, turn: TakeToken) -> bool:
        # With a token for each worker, nobody takes a second one for the same step. With fewer
        # workers than gradients, the fast ones may.
        each = self.total >= self.aggregate
        if self.step > turn.local_step if each else self._tokens > 0:
            self._tokens -= 1
            turn.step, turn.values = self.step, self._values
            turn.complete()
        elif self.failure is not None:
            turn.complete(self.failure)
        return turn.done


class RemoteTokenQueue(RemoteAttempts):
    """The rounds of a chief on another task."""

    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values."""
        if isinstance(attempt, TakeToken):
            return "turn", {"worker": attempt.worker, "step": attempt.local_step}, []
        if isinstance(attempt, Deregister):
            return "leave", {"worker": attempt.worker, "reason": attempt.reason}, []
        assert isinstance(attempt, Heartbeat)
        return "stay", {"worker": attempt.worker}, []

    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        """Note what came of an attempt."""
        if isinstance(attempt, TakeToken):
            attempt.step, attempt.values = answer.metadata["step"], answer.values

    def report(self) -> tuple[int, dict[int, str]]:
        """Return the step, and which workers were lost and why."""
        answer = self.service.request(self.address, "report").metadata
        return answer["step"], dict(answer["lost"])


def open_rounds(
    service: Service, *, aggregate: int, total: int, step: int, name: str
) -> TokenQueue | RemoteTokenQueue:
    """Find or make the rounds of the chief, which is task 0; see `Service.open`."""
    description = {"replicas_to_aggregate": aggregate, "workers": total, "global_step": step}
    place, thing = service.open(_KIND, description, name=name, task=0)
    return RemoteTokenQueue(service, place) if thing is None else thing


def _turn(rounds: TokenQueue, work: ServerRequest) -> None:
    turn = TakeToken(work.arguments["worker"], work.arguments["step"])
    serve(rounds, turn, work, lambda done: work.reply(list(done.values), step=done.step))


def _stay(rounds: TokenQueue, work: ServerRequest) -> None:
    serve(rounds, Heartbeat(work.arguments["worker"]), work, lambda done: work.reply())


def _leave(rounds: TokenQueue, work: ServerRequest) -> None:
    leave = Deregister(work.arguments["worker"], work.arguments["reason"])
    if leave.reason is None:
        serve(rounds, leave, work, lambda done: work.reply())
    else:
        rounds.submit(leave)  # that worker will not take an answer any more


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
    for what, expected in has.items():
        if description[what] != expected:
            return f"the chief has another {what}, expected {expected}, got {description[what]}"
    return None


_KIND = register_type(
    ResourceType(
        "rounds",
        _make,
        _difference,
        {"leave": _leave, "report": _report, "stay": _stay, "turn": _turn},
        TokenQueue.close,
    )
)
