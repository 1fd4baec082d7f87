"""Replicas of a model in one process: contexts, variables and synchronization."""

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
