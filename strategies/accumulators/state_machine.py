"""State machine of an accumulator.

::

    apply (local_step 7)  --\\
    apply (local_step 6)  -- x  stale: dropped       step 7
    apply (local_step 7)  ----> [ sum of 2 ] ------> take(2) | take(1) | ...   first in line first

A *take* waits without a thread until enough gradients of the current step have arrived. It empties
the sum and begins the next step. An accumulator has one or more *parts*: the gradients of one
variable each, which are added and taken together.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies.accumulators.gradient_sum import (
    Gradient,
    GradientSpec,
    GradientSum,
    checked,
    format_of,
)
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    OpError,
)
from strategies.rpc.operation import OperationOwner, PendingOperation

__all__ = ["Accumulation", "Apply", "Take"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)  # compared by identity
class Apply(PendingOperation):
    """Add a gradient for each part.

    Args:
        gradients: arrays or `Rows`; None adds nothing to a part, but counts.
        local_step: step of the values that they were computed from.
        worker: number of their worker, for the statistics; None for no worker.
        examples: number of rows that they are the mean of; None weights all gradients equally.

    Attributes:
        accepted: whether they were added; False if they were stale or too many.
    """

    gradients: Sequence[Gradient]
    local_step: int
    worker: int | None = None
    examples: float | None = None

    accepted = False


class Take(PendingOperation):
    """Wait for `count` gradients and take all accumulated ones.

    Attributes:
        results: the mean or sum of each part; None if all its gradients were None.
    """

    count: int
    results: Sequence[Gradient] = ()

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: list[GradientSum | None] = []  # kept, so that `abandon` can restore them
        self.taken = 0
        self.weight: float | None = None
        self.step = -1


class Accumulation(OperationOwner):
    """The state machine of an accumulator on this task; usable from any thread.

    Args:
        parts: description of the gradients.
        mean: whether a take returns the mean instead of the sum.
        name: name for errors.
        step: the first step.
        most: maximum number of gradients per step; later ones are dropped. None for no limit.
    """

    def __init__(
        self,
        parts: Sequence[GradientSpec],
        *,
        mean: bool,
        name: str,
        step: int = 0,
        most: int | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.mean = mean
        self.most = most
        self._name = name
        self._step = step
        self._lock = threading.Lock()
        self._sums: list[GradientSum | None] = [None] * len(self.parts)
        self._count = 0
        self._weight: float | None = None  # of the accumulated gradients; None if unweighted
        self._takes: deque[Take] = deque()
        # Worker -> used and dropped gradients, since the start.
        self._tally: dict[int, list[int]] = {}

    def submit(self, attempt: PendingOperation) -> None:
        """Add gradients, or append a take to the line."""
        if isinstance(attempt, Apply):
            error = None
            try:
                self._apply(attempt)
            except InvalidArgumentError as caught:
                error = caught  # of this apply alone: the sum is unchanged
            attempt.complete(error)
            # Before `notify`, so that the worker that completes a step finds the next one begun.
            self._advance()
            attempt.notify()
        elif isinstance(attempt, Take):
            # Zero would empty the accumulator without a gradient, and start a step.
            if attempt.count <= 0:
                why = f"take_grad: count must be > 0, got {attempt.count} ({self._name})"
                attempt.complete(InvalidArgumentError(why))
                attempt.notify()
                return
            with self._lock:
                self._takes.append(attempt)
            self._advance()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End a waiting take with `error`."""
        with self._lock:
            # An apply never waits, so only takes can be withdrawn.
            if attempt.done or attempt not in self._takes:
                return
            self._takes.remove(attempt)  # type: ignore[arg-type]
            if isinstance(error, DeadlineExceededError):
                error = DeadlineExceededError(
                    f"{error.message}; {self._count} of {attempt.count} gradients have arrived "
                    f"({self._name})"
                )
            attempt.complete(error)
        attempt.notify()
        self._advance()

    def abandon(self, attempt: PendingOperation) -> None:
        """End a take; restore its gradients, and its step if the next is still current."""
        self.withdraw(attempt, CancelledError(f"{self._name}: the caller was interrupted"))
        if not isinstance(attempt, Take):
            return
        with self._lock:
            # Set to 0, so that a second call restores nothing.
            taken, attempt.taken = attempt.taken, 0
            if taken:
                for index, (old, new) in enumerate(zip(attempt.sums, self._sums, strict=True)):
                    if old is not None and new is not None:
                        # Gradients may have arrived for the next step; they join the restored ones.
                        old.absorb(new)
                    self._sums[index] = new if old is None else old
                self._count += taken
                if attempt.weight is not None:
                    self._weight = attempt.weight + (self._weight or 0)
                # Not if `set_step` or another take has moved the step meanwhile.
                if self._step == attempt.step + 1:
                    self._step = attempt.step
        self._advance()

    def cancel_pending(self) -> None:
        """Fail all waiting takes with `CancelledError`."""
        with self._lock:
            takes = list(self._takes)
            self._takes.clear()
            for take in takes:
                take.complete(CancelledError(f"{self._name}: the operation was cancelled"))
        for take in takes:
            take.notify()

    def set_step(self, step: int) -> None:
        """Set the current step; gradients of earlier steps are dropped from now on."""
        with self._lock:
            if step < self._step:
                _log.warning("%s: the step goes back from %d to %d", self._name, self._step, step)
            self._step = step

    def state(self) -> tuple[int, int, dict[int, list[int]]]:
        """Return step, number of gradients, and used and dropped gradients per worker."""
        with self._lock:
            return self._step, self._count, {w: list(n) for w, n in self._tally.items()}

    def _apply(self, attempt: Apply) -> None:
        if len(attempt.gradients) != len(self.parts):
            raise InvalidArgumentError(
                f"apply_grad: expected {len(self.parts)} gradients, got {len(attempt.gradients)} "
                f"({self._name})"
            )
        pairs = zip(self.parts, attempt.gradients, strict=True)
        # Without the lock: checking sorts the indices of rows, which may take long.
        gradients = [checked(part, gradient, "apply_grad") for part, gradient in pairs]
        with self._lock:
            # Stale or surplus gradients are dropped without an error: their worker was only late.
            room = self.most is None or self._count < self.most
            attempt.accepted = room and attempt.local_step >= self._step
            if attempt.accepted:
                self._check_like_others(gradients, attempt.examples)
                weight = 1 if attempt.examples is None else attempt.examples
                for index, gradient in enumerate(gradients):
                    # A mean over no examples may be NaN, so it must not enter the sum.
                    if gradient is None or weight == 0:
                        continue
                    if (total := self._sums[index]) is None:
                        self._sums[index] = GradientSum(gradient, weight)
                    else:
                        total.add(gradient, weight)
                if attempt.examples is not None:
                    self._weight = weight + (self._weight or 0)
                self._count += 1
            if attempt.worker is not None:
                # Index 0 counts used gradients, index 1 dropped ones.
                self._tally.setdefault(attempt.worker, [0, 0])[not attempt.accepted] += 1

    def _check_like_others(self, gradients: Sequence[Gradient], examples: float | None) -> None:
        """Raise if gradients differ from earlier ones of the step."""
        # A step with both kinds would mix weights of 1 with numbers of rows.
        if self._count and (examples is None) != (self._weight is None):
            raise InvalidArgumentError(
                f"apply_grad: only some gradients of a step have a number of examples, expected "
                f"all or none, got examples={examples} ({self._name})"
            )
        for part, total, gradient in zip(self.parts, self._sums, gradients, strict=True):
            if total is None or gradient is None:
                continue
            (expected, like), (form, shape) = total.form, format_of(gradient)
            if (form, shape) != (expected, like):
                raise InvalidArgumentError(
                    f"apply_grad: the gradient differs from earlier ones of the step, expected "
                    f"{expected} of shape {like}, got {form} of shape {shape} ({part.name})"
                )

    def _advance(self) -> None:
        """Serve waiting takes in order as long as there are enough gradients."""
        while True:
            with self._lock:
                if not self._takes or self._takes[0].count > self._count:
                    return
                take = self._takes.popleft()
                # The sums stay with the take, in case its caller is gone and they must be restored.
                take.sums, self._sums = self._sums, [None] * len(self.parts)
                take.taken, self._count = self._count, 0
                take.weight, self._weight = self._weight, None
                # The step advances with the take: gradients of the old values that arrive from now
                # on are stale.
                take.step = self._step
                self._step += 1
                error = None
                try:
                    take.results = self._results(take)
                except Exception as caught:  # for example too little memory
                    error = InternalError(f"take_grad: {type(caught).__name__}: {caught}")
                take.complete(error)
            take.notify()

    def _results(self, take: Take) -> list[Gradient]:
        """Return the means or sums of the taken gradients."""
        # Gradients of None count in the number: they are zeros.
        number = take.taken if take.weight is None else take.weight
        with np.errstate(all="ignore"):  # the program may have set other handling in this thread
            return [
                None if total is None else total.result(mean=self.mean, number=number)
                for total in take.sums
            ]
