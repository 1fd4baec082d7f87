"""An optimizer of any kind becomes one whose steps a strategy makes elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from strategies.optimizers import Optimizer
from strategies.wrapping.hosting import HostingStrategy

__all__ = ["StrategyOptimizer", "is_hosting", "wrapped"]


def is_hosting(strategy: Any) -> bool:
    """Whether a strategy makes steps elsewhere, not on every rank."""
    return hasattr(type(strategy), "host")


def wrapped(optimizer: Any, strategy: HostingStrategy, named_parameters: Any) -> Any:
    """Return an optimizer of the same kind; see `strategies.DistributedOptimizer`.

    Raises:
        TypeError: there is no such kind of optimizer.
        ValueError: a process has several replicas, or no optimizer here takes the same steps.
    """
    if len(strategy.devices) != 1:
        raise ValueError(
            f"DistributedOptimizer: a model belongs to one replica, expected one device per "
            f"process, got {len(strategy.devices)}"
        )
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from strategies.wrapping import of_torch

        return of_torch.StrategyTorchOptimizer(optimizer, strategy, named_parameters)
    if isinstance(optimizer, Optimizer):
        return StrategyOptimizer(optimizer, strategy)
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        from strategies.wrapping import of_optax

        return of_optax.wrap(optimizer, strategy)
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

    def __init__(self, optimizer: Optimizer, strategy: HostingStrategy) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        strategy.use(optimizer)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None:
        """Do as `strategy.apply_gradients` with this optimizer."""
        self.strategy.apply_gradients(self.optimizer, grads_and_vars, examples=examples)
