"""The copies of a model in this process: whose code runs, what they hold, and how they meet."""

from __future__ import annotations

from strategies.replicas.context import ReplicaContext
from strategies.replicas.datasets import InputContext, ValueContext
from strategies.replicas.metrics import MeanMetric, SumMetric
from strategies.replicas.per_replica import PerReplica

__all__ = [
    "InputContext",
    "MeanMetric",
    "PerReplica",
    "ReplicaContext",
    "SumMetric",
    "ValueContext",
]
