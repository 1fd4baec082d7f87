"""State machine of an accumulator.

::

    apply (local_step 7)  --\\
    apply (local_step 6)  -- x  stale: dropped       step 7
    apply (local_step 7)  ----> [ sum of 2 ] ------> take(2) | take(1) | ...   first in line first

A *take* is an attempt that waits without a thread until enough gradients of the current step are
in. It empties the sum and begins the next step. An accumulator has one or more *parts*, the
gradients of one variable each, that come and go together.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

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


class Apply(PendingOperation):
    """Add a gradient for each part.

    Args:
        gradients: arrays or `Rows`; None adds nothing to a part, but counts.
        local_step: of the values that they were computed from.
        worker: whose they are, for the report; None for nobody's.
        examples: how many rows they are the mean of; None for all gradients to count alike.

    Attributes:
        accepted: whether they were added; False if they came too late.
    """

    accepted = False

    def __init__(
        self,
        gradients: Sequence[Gradient],
        local_step: int,
        worker: int | None = None,
        examples: float | None = None,
    ) -> None:
        self.gradients = gradients
        self.local_step = local_step
        self.worker = worker
        self.examples = examples


class Take(PendingOperation):
    """Wait for so many gradients, and take them.

    Attributes:
        results: for each part the mean or sum; None if all gradients of it were None.
    """

    count: int
    results: Sequence[Gradient] = ()

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: list[GradientSum | None] = []  # what was taken, so that it can go back
        self.taken = 0
        self.weight: float | None = None
        self.step = -1


class Accumulation(OperationOwner):
    """The state machine of an accumulator on this task; usable from any thread.

    Args:
        parts: what the gradients are.
        mean: whether a take gets their mean, else their sum.
        name: for errors.
        step: the first one.
        most: how many gradients a step may have, those that come later are dropped; None for any
            number.
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
        self._weight: float | None = None  # of those that are in; None if they count alike
        self._takes: deque[Take] = deque()
        self._tally: dict[int, list[int]] = {}

    def submit(self, attempt: PendingOperation) -> None:
        """Add gradients, or let a take wait in the line."""
        if isinstance(attempt, Apply):
            error = None
            try:
                self._apply(attempt)
            except InvalidArgumentError as caught:
                error = caught
            attempt.complete(error)
            self._advance()
            attempt.notify()
        elif isinstance(attempt, Take):
            if attempt.count <= 0:
                why = f"take_grad: count must be > 0, got {attempt.count} ({self._name})"
                attempt.complete(InvalidArgumentError(why))
                attempt.notify()
                return
            with self._lock:
                self._takes.append(attempt)
            self._advance()

    def withdraw(self, attempt: PendingOperation, error: OpError) -> None:
        """End a take that waits."""
        with self._lock:
            if attempt.done or attempt not in self._takes:
                return
            self._takes.remove(attempt)  # type: ignore[arg-type]
            if isinstance(error, DeadlineExceededError):
                error = DeadlineExceededError(
                    f"{error.message}; {self._count} of {attempt.count} gradients have come "
                    f"({self._name})"
                )
            attempt.complete(error)
        attempt.notify()
        self._advance()

    def abandon(self, attempt: PendingOperation) -> None:
        """End a take; its gradients go back, and its step if no other has begun."""
        self.withdraw(attempt, CancelledError(f"{self._name}: the caller was interrupted"))
        if not isinstance(attempt, Take):
            return
        with self._lock:
            taken, attempt.taken = attempt.taken, 0
            if taken:
                for index, (old, new) in enumerate(zip(attempt.sums, self._sums, strict=True)):
                    if old is not None and new is not None:
                        old.absorb(new)
                    self._sums[index] = new if old is None else old
                self._count += taken
                if attempt.weight is not None:
                    self._weight = attempt.weight + (self._weight or 0)
                if self._step == attempt.step + 1:
                    self._step = attempt.step
        self._advance()

    def cancel_pending(self) -> None:
        """Fail all takes that wait, with `CancelledError`."""
        with self._lock:
            takes = list(self._takes)
            self._takes.clear()
            for take in takes:
                take.complete(CancelledError(f"{self._name}: the operation was cancelled"))
        for take in takes:
            take.notify()

    def set_step(self, step: int) -> None:
        """Set the current step; gradients of earlier ones are dropped from now on."""
        with self._lock:
            if step < self._step:
                _log.warning("%s: the step goes back from %d to %d", self._name, self._step, step)
            self._step = step

    def state(self) -> tuple[int, int, dict[int, list[int]]]:
        """Return the step, the number of gradients in, and per worker those used and dropped."""
        with self._lock:
            return self._step, self._count, {w: list(n) for w, n in self._tally.items()}

    def _apply(self, attempt: Apply) -> None:
        if len(attempt.gradients) != len(self.parts):
            raise InvalidArgumentError(
                f"apply_grad: expected {len(self.parts)} gradients, got {len(attempt.gradients)} "
                f"({self._name})"
            )
        pairs = zip(self.parts, attempt.gradients, strict=True)
        gradients = [checked(part, gradient, "apply_grad") for part, gradient in pairs]
        with self._lock:
            room = self.most is None or self._count < self.most
            attempt.accepted = room and attempt.local_step >= self._step
            if attempt.accepted:
                self._check_like_others(gradients, attempt.examples)
                weight = 1 if attempt.examples is None else attempt.examples
                for index, gradient in enumerate(gradients):
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
                self._tally.setdefault(attempt.worker, [0, 0])[not attempt.accepted] += 1

    def _check_like_others(self, gradients: Sequence[Gradient], examples: float | None) -> None:
        """Refuse gradients that differ from those that are in."""
        if self._count and (examples is None) != (self._weight is None):
            raise InvalidArgumentError(
                f"apply_grad: only some gradients of a step say of how many examples they are, "
                f"expected all or none, got examples={examples} ({self._name})"
            )
        for part, total, gradient in zip(self.parts, self._sums, gradients, strict=True):
            if total is None or gradient is None:
                continue
            (expected, like), (form, shape) = total.form, format_of(gradient)
            if (form, shape) != (expected, like):
                raise InvalidArgumentError(
                    f"apply_grad: the gradient differs from those that are in, expected "
                    f"{expected} of shape {like}, got {form} of shape {shape} ({part.name})"
                )

    def _advance(self) -> None:
        """Let takes have what there is, in their order."""
        while True:
            with self._lock:
                if not self._takes or self._takes[0].count > self._count:
                    return
                take = self._takes.popleft()
                take.sums, self._sums = self._sums, [None] * len(self.parts)
                take.taken, self._count = self._count, 0
                take.weight, self._weight = self._weight, None
                take.step = self._step
                self._step += 1
                error = None
                try:
                    take.results = self._results(take)
                except Exception as caught:  # as when there is no memory for them
                    error = InternalError(f"take_grad: {type(caught).__name__}: {caught}")
                take.complete(error)
            take.notify()

    def _results(self, take: Take) -> list[Gradient]:
        """Return the means or sums of what was taken."""
        number = take.taken if take.weight is None else take.weight
        with np.errstate(all="ignore"):  # whatever the program has told NumPy in this thread
            return [
                None if total is None else total.result(mean=self.mean, number=number)
                for total in take.sums
            ]
