"""Dispatch of a wrapped optimizer: average here, or let the strategy update."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import collectives as cc
from strategies.averaging.optimizer import identity
from strategies.optimizers import Optimizer
from strategies.remote_optimizers.parameter_host import HostingStrategy
from strategies.strategy.base import Strategy

__all__ = [
    "StrategyOptimizer",
    "check_averaging",
    "check_unwrapped",
    "is_hosting",
    "ranks_of",
    "wrap_optimizer",
]


def is_hosting(strategy: Any) -> bool:
    """Whether a strategy makes steps elsewhere, not on every rank."""
    return hasattr(type(strategy), "host")


def check_unwrapped(optimizer: Any) -> None:
    """Refuse a wrapped optimizer, and one that holds a wrapped optimizer as its `optimizer`.

    Raises:
        ValueError: gradients would be combined twice.
    """
    held = optimizer
    while held is not None:
        if getattr(type(held), "is_distributed", False):
            raise ValueError(
                "DistributedOptimizer: the optimizer is wrapped already and would combine "
                f"gradients twice, expected one that is not wrapped, got {type(held).__name__}"
            )
        held = getattr(held, "__dict__", {}).get("optimizer")


def ranks_of(strategy: Strategy) -> cc.Communicator:
    """Return the ranks among which the replicas of a strategy are; this one if there is no other.

    *Collective* over these.
    """
    if strategy.ranks.comm is not None:
        return strategy.ranks.comm
    whole = cc.init()
    # By the tag the others need not come.
    alone = whole if whole.size == 1 else whole.group([whole.rank], tag=0)
    assert alone is not None
    return alone


def check_averaging(strategy: Strategy, *, arrays: bool) -> None:
    """Refuse a strategy whose replicas an optimizer that averages over ranks knows nothing of.

    Args:
        strategy: that updates on its ranks.
        arrays: whether the optimizer is for arrays, and so for the variables of the strategy.

    Raises:
        ValueError: this is such a strategy.
    """
    if not strategy.updates_everywhere:
        raise ValueError(
            f"DistributedOptimizer: a {type(strategy).__name__} updates on rank 0, expected the "
            f"optimizer itself, in strategy.apply_gradients"
        )
    if not arrays:
        _check_alone(strategy.devices)


def _check_alone(devices: Sequence[str]) -> None:
    if len(devices) != 1:
        raise ValueError(
            f"DistributedOptimizer: a model belongs to one replica, expected one device per "
            f"process, got {len(devices)}"
        )


def wrap_optimizer(optimizer: Any, strategy: HostingStrategy, named_parameters: Any) -> Any:
    """Return an optimizer of the same kind; see `strategies.DistributedOptimizer`.

    Raises:
        TypeError: there is no such kind of optimizer.
        ValueError: a process has several replicas, the optimizer is wrapped already, or no
            optimizer here takes the same steps.
    """
    _check_alone(strategy.devices)
    check_unwrapped(optimizer)
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from strategies.remote_optimizers import torch_optimizer

        return torch_optimizer.StrategyTorchOptimizer(optimizer, strategy, named_parameters)
    if isinstance(optimizer, Optimizer):
        return StrategyOptimizer(optimizer, strategy)
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        from strategies.remote_optimizers import optax_transformation

        return optax_transformation.wrap(optimizer, strategy)
    raise TypeError(
        "DistributedOptimizer: expected one of strategies.optimizers, of torch.optim or of Optax "
        f"with strategy=, got {type(optimizer).__name__}"
    )


class StrategyOptimizer:
    """An optimizer for arrays whose steps a strategy makes elsewhere.

    Made by `DistributedOptimizer` with a `strategy`, before the variables that it is to update.

    Attributes:
        optimizer: the one that it was made of.
        strategy: that makes the steps.
    """

    is_distributed = True

    def __init__(self, optimizer: Optimizer, strategy: HostingStrategy) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        strategy.use(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (self.optimizer,)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None:
        """Do as `strategy.apply_gradients` with this optimizer."""
        self.strategy.apply_gradients(self.optimizer, grads_and_vars, examples=examples)
