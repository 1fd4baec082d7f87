"""Staleness policy of pushed gradients, and statistics per worker.

A *version* counts the updates of a ps task's variables. The *staleness* of a gradient is the number
of updates since the version from which its worker computed the gradient::

    version        7         8         9
    worker 1    pull --------|---------|---- push: staleness 2
    worker 2                push      push

With N workers that take turns the staleness is N - 1. In synchronous training it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from strategies.core.validation import integer

__all__ = [
    "Decision",
    "Drop",
    "StalenessTracker",
    "WorkerStats",
    "Scale",
    "StalenessRule",
    "weight",
]


@dataclass(frozen=True)
class Drop:
    """Drop gradients that are too stale.

    Attributes:
        most: largest staleness that is applied, >= 0.
    """

    most: int

    def __post_init__(self) -> None:
        integer("Drop", "largest staleness", self.most, least=0)


@dataclass(frozen=True)
class Scale:
    """Divide the learning rate by 1 + the staleness of the gradient."""


StalenessRule: TypeAlias = "Drop | Scale | None"
"""None: every gradient counts in full."""


def weight(rule: StalenessRule, staleness: int) -> float:
    """Return the factor of the learning rate; 0 drops the gradient.

    Example:
        >>> weight(None, 3), weight(Drop(2), 3), weight(Drop(3), 3), weight(Scale(), 3)
        (1.0, 0.0, 1.0, 0.25)
    """
    if isinstance(rule, Drop):
        return float(staleness <= rule.most)
    if isinstance(rule, Scale):
        return 1.0 / (1 + staleness)
    return 1.0


class Decision(NamedTuple):
    """Decision about one gradient: its staleness, and its weight; weight 0 drops the gradient."""

    staleness: int
    weight: float


@dataclass(frozen=True)
class WorkerStats:
    """Statistics of the gradients of one worker.

    Attributes:
        applied: number of applied gradients.
        dropped: number of dropped gradients.
        total_staleness: sum over the applied gradients.
        most_staleness: maximum over the applied gradients.
    """

    applied: int = 0
    dropped: int = 0
    total_staleness: int = 0
    most_staleness: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean over the applied gradients; 0 without any."""
        return self.total_staleness / self.applied if self.applied else 0.0

    def after(self, decision: Decision) -> WorkerStats:
        """Return the statistics with one more gradient."""
        staleness = decision.staleness
        return self + (
            # Dropped gradients do not count in the mean staleness.
            WorkerStats(1, 0, staleness, staleness) if decision.weight else WorkerStats(0, 1)
        )

    def __add__(self, other: WorkerStats) -> WorkerStats:
        return WorkerStats(
            self.applied + other.applied,
            self.dropped + other.dropped,
            self.total_staleness + other.total_staleness,
            max(self.most_staleness, other.most_staleness),
        )


class StalenessTracker:
    """Decide about gradients, and keep statistics per worker.

    Args:
        rule: treatment of stale gradients.

    Attributes:
        records: worker -> statistics of its gradients.
    """

    def __init__(self, rule: StalenessRule = None) -> None:
        self.records: dict[int, WorkerStats] = {}
        self._rule = rule

    def weigh(self, worker: int, staleness: int) -> Decision:
        """Decide about a gradient of a worker, and record the decision."""
        return self.record(worker, Decision(staleness, weight(self._rule, staleness)))

    def record(self, worker: int, decision: Decision) -> Decision:
        """Record a decision."""
        self.records[worker] = self.records.get(worker, WorkerStats()).after(decision)
        return decision
