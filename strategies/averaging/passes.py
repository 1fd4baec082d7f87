"""Gradients of several backward passes of one rank, added up until they make a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from strategies import sums

__all__ = ["Contribution", "Passes"]


class Contribution(NamedTuple):
    """What one rank brings to a step.

    Attributes:
        gradients: for each leaf an array of its shape, `Rows`, or None; those of several passes
            are float32 where they were of 16 bits, so that they are rounded once.
        weight: what they are multiplied by to be sums over the examples.
        examples: rows of all passes; None if they were not told.
        passes: how many backward passes were added up.
        error: why there are no gradients; it is raised on all ranks.
    """

    gradients: Sequence[Any]
    weight: float = 1.0
    examples: float | None = None
    passes: int = 1
    error: Exception | None = None


class Passes:
    """Adds up the gradients of backward passes on this rank, until there are enough for a step.

    Args:
        wanted: how many passes make a step.
    """

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
    ) -> Contribution | None:
        """Take in the gradients of `count` passes; gives the contribution if these are enough.

        An error is kept until then, since only then all ranks listen.
        """
        if examples is not None and not 0 <= examples < math.inf:
            error = error or ValueError(
                f"apply_gradients: examples is no count, expected >= 0, got {examples}"
            )
        if examples == 0:  # a mean over no rows may be NaN
            gradients = [None] * len(gradients)
        self._error = self._error or error or self._unlike(gradients, examples)
        if not self.count and count >= self._wanted:  # nothing to add up
            weight = 1.0 if examples is None else examples
            given = Contribution(gradients, weight, examples, count, self._error)
            self.clear()
            return given
        if self._error is None:
            known = self._sums or [None] * len(gradients)
            weight = 1 if examples is None else examples
            self._sums = [sums.add(s, g, weight) for s, g in zip(known, gradients, strict=True)]
        self._examples = None if examples is None else (self._examples or 0) + examples
        self.count += count
        if self.count < self._wanted:
            return None
        # Sums over examples would not fit a bucket of 16 bits, means do.
        weight = self._examples or 1
        gradients = [sums.over(total, weight) for total in self._sums]
        given = Contribution(gradients, weight, self._examples, self.count, self._error)
        self.clear()
        return given

    def _unlike(self, gradients: Sequence[Any], examples: float | None) -> Exception | None:
        """Say in what a pass differs from those before."""
        if self.count and (examples is None) != (self._examples is None):
            return ValueError("apply_gradients: expected examples for all passes or for none")
        if self._sums and len(self._sums) != len(gradients):
            return ValueError(
                f"apply_gradients: a pass differs from the last one, expected {len(self._sums)} "
                f"gradients, got {len(gradients)}"
            )
        return None
