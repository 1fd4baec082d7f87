"""Options of variables on ps tasks and of their training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import collectives as cc
from strategies.cluster.scopes import PlacementRequest
from strategies.core.validation import integer, number
from strategies.optimizers import Optimizer
from strategies.parameter_server.staleness import StalenessRule
from strategies.variables.partition import Partitioner

__all__ = ["ServingOptions", "TrainingOptions"]


@dataclass(frozen=True)
class ServingOptions:
    """Placement and compression of variables; see `ParameterServerStrategy`.

    Attributes:
        shared_name: distinguishes the strategies of one server.
        partitioner: shape and dtype -> number of parts along each axis; None for whole variables.
        choice: `PlacementRequest` -> index of the ps for a part; None for `RoundRobin`.
        compression: compression of gradients.
        value_compression: compression of values, without error feedback.
    """

    shared_name: str
    partitioner: Partitioner | None
    choice: Callable[[PlacementRequest], int] | None
    compression: cc.Compression
    value_compression: cc.Compression


@dataclass(frozen=True)
class TrainingOptions:
    """Update rules of variables, equal on all tasks; see `ParameterServerStrategy`.

    Attributes:
        optimizer: optimizer, copied for each variable; None if each variable has its own.
        synchronous: whether an update uses the mean of all workers' gradients.
        staleness: treatment of stale gradients.
        warmup_steps: number of initial updates by the chief alone.
        rate_scale: factor of the learning rate after the warm-up.
        chief: rank of the chief.

    Raises:
        TypeError: the optimizer is not one of `strategies.optimizers`.
        ValueError: a number is out of range.
    """

    optimizer: Optimizer | None
    synchronous: bool
    staleness: StalenessRule
    warmup_steps: int
    rate_scale: float
    chief: int

    def __post_init__(self) -> None:
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"ParameterServerStrategy: expected one of strategies.optimizers, got "
                f"{type(self.optimizer).__name__}"
            )
        number("ParameterServerStrategy", "rate_scale", self.rate_scale)
        integer("ParameterServerStrategy", "warmup_steps", self.warmup_steps, least=0)
