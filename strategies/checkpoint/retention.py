"""Retention policy: which checkpoints to keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from strategies.checkpoint.manifest import Manifest
from strategies.core.validation import choice, number

__all__ = ["Best", "RetentionPolicy", "best_of", "to_delete"]

Best = Literal["min", "max"]
"""Whether the lowest or the highest metric is the best."""

_HOUR = 3600.0  # seconds


@dataclass(frozen=True)
class RetentionPolicy:
    """Rules for keeping checkpoints.

    Attributes:
        keep: number of newest checkpoints to keep.
        every_n_hours: also keep the first of the others, and then each one that is this much later
            than the last one kept by this rule; None disables the rule.
        best: also keep the one with the best metric.

    Raises:
        ValueError: `every_n_hours` is not above 0, or `best` is unknown.
    """

    keep: int = 5
    every_n_hours: float | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.best is not None:
            choice("CheckpointManager", "best", self.best, Best)
        if self.every_n_hours is None:
            return
        if number("CheckpointManager", "keep_every_n_hours", self.every_n_hours) <= 0:
            raise ValueError("CheckpointManager: expected keep_every_n_hours above 0, got 0")


def to_delete(rules: RetentionPolicy, others: Iterable[Manifest], new: Manifest) -> list[int]:
    """Return the steps of the checkpoints to delete, oldest first.

    Checkpoints of higher steps than the new one are kept: a run that went back to an earlier step
    does not delete them.

    Example:
        >>> def at(step, hours, metric=None):
        ...     return Manifest(step, step, 1, {}, {}, {}, hours * 3600.0, metric)
        >>> old, new = [at(1, 0), at(2, 0.5, 9.0), at(3, 0.9), at(4, 1.2)], at(5, 1.5, 8.0)
        >>> to_delete(RetentionPolicy(keep=1), old, new)
        [1, 2, 3, 4]
        >>> to_delete(RetentionPolicy(keep=2, every_n_hours=1, best="max"), old, new)
        [3]
    """
    # In the order of writing, not of steps or clocks.
    plans = sorted(
        [*(plan for plan in others if plan.step != new.step), new], key=lambda plan: plan.sequence
    )
    older = [plan.step for plan in plans if plan.step < new.step]
    # The new checkpoint also counts for `keep`; hence the `+ 1` in the slice below.
    stay = {new.step}
    if rules.best is not None and (best := best_of(rules.best, plans)) is not None:
        stay.add(best.step)
    if rules.every_n_hours is not None:
        stay |= _kept_by_time(plans, rules.every_n_hours * _HOUR)
    return [step for step in older[: max(0, len(older) + 1 - rules.keep)] if step not in stay]


def best_of(best: Best, plans: Sequence[Manifest]) -> Manifest | None:
    """Return the plan with the best metric, of equal ones the oldest; None without a metric."""
    sign = {"min": 1.0, "max": -1.0}[best]
    # The sequence breaks ties, so that an equal metric later does not displace the kept one.
    scored = [
        (sign * plan.metric, plan.sequence, plan) for plan in plans if plan.metric is not None
    ]
    return min(scored, key=lambda item: item[:2])[2] if scored else None


def _kept_by_time(plans: Sequence[Manifest], seconds: float) -> set[int]:
    """Return the steps kept by time; deleting other checkpoints does not change the result.

    A clock that was set back never removes a kept step.
    """
    # In the order of writing, from the oldest: a kept checkpoint stays kept in every later call.
    steps, last = set(), float("-inf")
    for plan in plans:
        if plan.written - last >= seconds:
            steps.add(plan.step)
            last = plan.written
    return steps
