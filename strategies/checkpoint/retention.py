"""Retention policy: which checkpoints are kept."""

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
    """What stays.

    Attributes:
        keep: how many that were written last.
        every_n_hours: of the others, the first, and then the next that is so much later than the
            last one that stayed by this rule; none if None.
        best: also the one with the best metric.

    Raises:
        ValueError: hours that are not above 0, or a word that is neither.
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
    """Return the steps of the checkpoints that need not stay, those written first in front.

    Never one of a higher step than the new one: that belongs to a run that somebody went back from.

    Example:
        >>> def at(step, hours, metric=None):
        ...     return Manifest(step, step, 1, {}, {}, {}, hours * 3600.0, metric)
        >>> old, new = [at(1, 0), at(2, 0.5, 9.0), at(3, 0.9), at(4, 1.2)], at(5, 1.5, 8.0)
        >>> to_delete(RetentionPolicy(keep=1), old, new)
        [1, 2, 3, 4]
        >>> to_delete(RetentionPolicy(keep=2, every_n_hours=1, best="max"), old, new)
        [3]
    """
    plans = sorted(
        [*(plan for plan in others if plan.step != new.step), new], key=lambda plan: plan.sequence
    )
    older = [plan.step for plan in plans if plan.step < new.step]
    stay = {new.step}
    if rules.best is not None and (best := best_of(rules.best, plans)) is not None:
        stay.add(best.step)
    if rules.every_n_hours is not None:
        stay |= _kept_by_time(plans, rules.every_n_hours * _HOUR)
    return [step for step in older[: max(0, len(older) + 1 - rules.keep)] if step not in stay]


def best_of(best: Best, plans: Sequence[Manifest]) -> Manifest | None:
    """Return the one with the best metric, of equal ones that written first; None without any."""
    sign = {"min": 1.0, "max": -1.0}[best]
    scored = [
        (sign * plan.metric, plan.sequence, plan) for plan in plans if plan.metric is not None
    ]
    return min(scored, key=lambda item: item[:2])[2] if scored else None


def _kept_by_time(plans: Sequence[Manifest], seconds: float) -> set[int]:
    """Return the steps of those that stay by time; the same ones when others have gone.

    A clock that goes back takes none of them away.
    """
    steps, last = set(), float("-inf")
    for plan in plans:
        if plan.written - last >= seconds:
            steps.add(plan.step)
            last = plan.written
    return steps
