"""Synchronous training that does not wait for the slowest replicas."""

from strategies.spare_replica.steps import StepReport
from strategies.spare_replica.strategy import SpareReplicaStrategy

__all__ = ["SpareReplicaStrategy", "StepReport"]
