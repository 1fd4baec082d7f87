"""Gradient accumulation over several backward passes of one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from strategies.core import gradient_sums

__all__ = ["LocalGradient", "GradientAccumulator"]


class LocalGradient(NamedTuple):
    """What one rank brings to a step.

    Attributes:
        gradients: for each leaf an array of its shape, `Rows`, or None; those of several passes
            are float32 where they were of 16 bits, so that they are rounded once.
        weight: what they are multiplied by to be sums over the examples.
        examples: rows of all passes; None if they were not told.
        passes: how many backward passes were added up.
        error: why there are no gradients; it is raised on all ranks.
        at_once: whether all passes came together, so that the gradients are the optimizer's own.
        made_dense: leaves whose sparse gradients were made dense (`sparse_as_dense`).
    """

    gradients: Sequence[Any]
    weight: float = 1.0
    examples: float | None = None
    passes: int = 1
    error: Exception | None = None
    at_once: bool = True
    made_dense: Collection[int] = ()


class GradientAccumulator:
    """Adds up the gradients of `wanted` backward passes on this rank, which make a step."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.clear()

    def clear(self) -> None:
        """Forget what was added up."""
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
        """Take in the gradients of `count` passes; gives the contribution if these are enough.

        They are, too, if they are said to be `complete`. An error, whatever it is, is kept until
        then, since only then all ranks listen.
        """
        self._error = self._error or error
        complete = complete or self.count + count >= self._wanted
        alone = not self.count and complete  # nothing to add up
        try:
            self._check(gradients, examples)
            if not alone and self._error is None:
                weight = 1 if examples is None else examples
                known = self._sums or [None] * len(gradients)
                self._sums = [
                    gradient_sums.add(s, g, weight) for s, g in zip(known, gradients, strict=True)
                ]
            self._examples = None if examples is None else (self._examples or 0) + examples
            # Sums over examples would not fit a bucket of 16 bits, means do.
            means = (
                [gradient_sums.divided(s, self._examples or 1) for s in self._sums]
                if complete
                else []
            )
        except Exception as caught:
            self._error = self._error or caught
            means = []
        self.count += count
        if not complete:
            return None
        if alone:
            weight = 1.0 if self._examples is None else self._examples
            given = gradients if weight else [None] * len(gradients)  # NaN, maybe, over no rows
        else:
            weight, given = self._examples or 1, means
        whole = LocalGradient(given, weight, self._examples, self.count, self._error, alone)
        self.clear()
        return whole

    def _check(self, gradients: Sequence[Any], examples: float | None) -> None:
        """Refuse a pass that differs from those before."""
        gradient_sums.check_examples(examples)
        if self.count and (examples is None) != (self._examples is None):
            raise ValueError("apply_gradients: expected examples for all passes or for none")
        if self._sums and len(self._sums) != len(gradients):
            raise ValueError(
                f"apply_gradients: a pass differs from the last one, expected {len(self._sums)} "
                f"gradients, got {len(gradients)}"
            )
