"""Staleness policy of pushed gradients, and statistics per worker.

A *version* counts the updates of some variables. A gradient belongs to the version that its worker
computed with; its *staleness* is the number of updates since then::

    version        7         8         9
    worker 1    pull --------|---------|---- push: staleness 2
    worker 2                push      push

With N workers that take turns it is N - 1. In synchronous training it is 0.
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
    """Leave out gradients that are too stale.

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
    """Return what the learning rate is multiplied by; 0 if the gradient is left out.

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
    """What becomes of one gradient: its staleness, and its weight, which is 0 if it is dropped."""

    staleness: int
    weight: float


@dataclass(frozen=True)
class WorkerStats:
    """What came of the gradients of one worker.

    Attributes:
        applied: how many were applied.
        dropped: how many were left out.
        total_staleness: sum over those applied.
        most_staleness: the largest among those applied.
    """

    applied: int = 0
    dropped: int = 0
    total_staleness: int = 0
    most_staleness: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean over the gradients that were applied; 0 if there are none."""
        return self.total_staleness / self.applied if self.applied else 0.0

    def after(self, decision: Decision) -> WorkerStats:
        """Return the record with one more gradient."""
        staleness = decision.staleness
        return self + (
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
    """Counts updates, and judges gradients by them.

    Args:
        rule: what becomes of stale gradients.

    Attributes:
        version: number of updates so far.
        records: worker -> what came of its gradients.
    """

    def __init__(self, rule: StalenessRule = None) -> None:
        self.rule = rule
        self.version = 0
        self.records: dict[int, WorkerStats] = {}

    def weigh(self, worker: int, version: int) -> Decision:
        """Decide about a gradient that a worker computed with some version, and note it.

        Raises:
            ValueError: the version is none that has been.
        """
        staleness = self.version - version
        if not 0 <= staleness <= self.version:
            raise ValueError(
                f"push: no such version, expected 0 .. {self.version}, got {version} "
                f"(worker: task {worker})"
            )
        return self.record(worker, Decision(staleness, weight(self.rule, staleness)))

    def record(self, worker: int, decision: Decision) -> Decision:
        """Write a decision down."""
        self.records[worker] = self.records.get(worker, WorkerStats()).after(decision)
        return decision
