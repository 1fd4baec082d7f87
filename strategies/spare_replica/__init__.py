"""Synchronous training with spare replicas (backup workers)."""

from strategies.spare_replica.steps import StepReport
from strategies.spare_replica.strategy import SpareReplicaStrategy

__all__ = ["SpareReplicaStrategy", "StepReport"]
