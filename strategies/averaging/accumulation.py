"""Gradient accumulation over several backward passes of one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from strategies.core import gradient_sums

__all__ = ["MIXED_EXAMPLES", "LocalGradient", "GradientAccumulator"]

MIXED_EXAMPLES = "apply_gradients: expected examples for all passes or for none"
"""Error of passes of one step, some of them without examples."""


class LocalGradient(NamedTuple):
    """One rank's contribution to a step.

    Attributes:
        gradients: for each leaf an array of its shape, `Rows`, or None. Sums of several 16-bit
            gradients are float32, so that they are rounded once.
        weight: factor that turns the gradients into sums over the examples.
        examples: rows of all passes; None if unknown.
        passes: number of backward passes that were added up.
        error: reason for missing gradients; raised on all ranks.
        at_once: whether one call delivered all passes, so that the gradients are the optimizer's.
        made_dense: leaves whose sparse gradients were made dense (`sparse_as_dense`).
        joined: whether this rank has no more data, so that the mean is over the other ranks.
    """

    gradients: Sequence[Any]
    weight: float = 1.0
    examples: float | None = None
    passes: int = 1
    error: Exception | None = None
    at_once: bool = True
    made_dense: Collection[int] = ()
    joined: bool = False


class GradientAccumulator:
    """Sums the gradients of the `wanted` backward passes of a step, on this rank."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.clear()

    def clear(self) -> None:
        """Discard all gradients."""
        self.count = 0
        self._sums: list[Any] = []
        self._examples: float | None = None
        self._error: Exception | None = None

    def add(
        self,
        gradients: Sequence[Any],
        *,
        examples: float | None = None,
        error: Exception | None = None,
        count: int = 1,
        complete: bool = False,
    ) -> LocalGradient | None:
        """Add the gradients of `count` passes; return the contribution if the step is complete.

        `complete` ends the step early. Errors are kept until then, because only then all ranks
        communicate.
        """
        # The first error counts; later ones are often its consequence.
        self._error = self._error or error
        complete = complete or self.count + count >= self._wanted
        alone = not self.count and complete  # there is nothing to sum
        try:
            # After an earlier error only the checks run: its sums would be discarded.
            self._check(gradients, examples)
            if not alone and self._error is None:
                weight = 1 if examples is None else examples
                known = self._sums or [None] * len(gradients)
                self._sums = [
                    gradient_sums.add(s, g, weight) for s, g in zip(known, gradients, strict=True)
                ]
            self._examples = None if examples is None else (self._examples or 0) + examples
            # Sums over examples may overflow a bucket of 16-bit floats, means do not.
            means = (
                [gradient_sums.divided(s, self._examples or 1) for s in self._sums]
                if complete
                else []
            )
        except Exception as caught:
            self._error = self._error or caught
            means = []
        # Also after an error, so that this rank completes its step together with all ranks.
        self.count += count
        if not complete:
            return None
        if alone:
            weight = 1.0 if self._examples is None else self._examples
            given = gradients if weight else [None] * len(gradients)  # over 0 rows may be NaN
        else:
            # A mean over 0 examples may have any weight, because all its gradients are None.
            weight, given = self._examples or 1, means
        whole = LocalGradient(given, weight, self._examples, self.count, self._error, alone)
        # Before the next step starts, also if the caller raises the error.
        self.clear()
        return whole

    def _check(self, gradients: Sequence[Any], examples: float | None) -> None:
        """Raise if a pass differs from the previous ones."""
        gradient_sums.check_examples(examples)
        if self.count and (examples is None) != (self._examples is None):
            raise ValueError(MIXED_EXAMPLES)
        if self._sums and len(self._sums) != len(gradients):
            raise ValueError(
                f"apply_gradients: a pass differs from the last one, expected {len(self._sums)} "
                f"gradients, got {len(gradients)}"
            )
