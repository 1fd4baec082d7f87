"""Variables on tasks, whole or partitioned, readable and updatable by all tasks."""

from strategies.variables import initializers, partition
from strategies.variables.batched import apply_all, assign_all, read_all
from strategies.variables.factory import (
    reset_container,
    shared_partitioned_variable,
    shared_variable,
)
from strategies.variables.moving_averages import MovingAverages
from strategies.variables.requests import ReadResult, UpdateResult
from strategies.variables.variable import PartitionedVariable, SharedVariable

__all__ = [
    "MovingAverages",
    "PartitionedVariable",
    "ReadResult",
    "SharedVariable",
    "UpdateResult",
    "apply_all",
    "assign_all",
    "initializers",
    "partition",
    "read_all",
    "reset_container",
    "shared_partitioned_variable",
    "shared_variable",
]
