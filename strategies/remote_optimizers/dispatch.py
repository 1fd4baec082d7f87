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
    """Return whether a strategy runs optimizer steps on other tasks."""
    return isinstance(strategy, HostingStrategy)


def check_unwrapped(optimizer: Any) -> None:
    """Reject an optimizer that is wrapped, or that holds a wrapped one as its `optimizer`.

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
        # Wrappers of other libraries hold the inner optimizer under this name.
        held = getattr(held, "__dict__", {}).get("optimizer")


def ranks_of(strategy: Strategy) -> cc.Communicator:
    """Return a communicator of the ranks that hold a strategy's replicas.

    *Collective* over these ranks.
    """
    if strategy.ranks.comm is not None:
        return strategy.ranks.comm
    whole = cc.init()
    # With a tag, only the members of the group make this call.
    alone = whole if whole.size == 1 else whole.group([whole.rank], tag=0)
    assert alone is not None
    return alone


def check_averaging(strategy: Strategy, *, arrays: bool) -> None:
    """Check that an optimizer that averages over ranks covers all replicas of a strategy.

    Args:
        strategy: strategy that updates on its ranks.
        arrays: whether the optimizer is for arrays, and therefore for the strategy's variables.

    Raises:
        ValueError: the strategy updates on rank 0 only, or has several replicas per process.
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
    """Return a wrapped optimizer of the same kind; see `strategies.DistributedOptimizer`.

    Raises:
        TypeError: the kind of optimizer is unknown.
        ValueError: a process has several replicas, the optimizer is already wrapped, or no
            optimizer of this package makes the same steps.
    """
    _check_alone(strategy.devices)
    check_unwrapped(optimizer)
    # Looked up, not imported: an optimizer of PyTorch exists only if PyTorch is loaded.
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from strategies.remote_optimizers import torch_optimizer

        return torch_optimizer.StrategyTorchOptimizer(optimizer, strategy, named_parameters)
    if isinstance(optimizer, Optimizer):
        return StrategyOptimizer(optimizer, strategy)
    # By protocol, so that Optax is imported only when needed.
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        from strategies.remote_optimizers import optax_transformation

        return optax_transformation.wrap(optimizer, strategy)
    raise TypeError(
        "DistributedOptimizer: expected one of strategies.optimizers, of torch.optim or of Optax "
        f"with strategy=, got {type(optimizer).__name__}"
    )


class StrategyOptimizer:
    """An optimizer for arrays whose steps a strategy runs on other tasks.

    `DistributedOptimizer` creates it for a `strategy`, before the variables that it updates.

    Attributes:
        optimizer: wrapped optimizer.
        strategy: strategy that runs the steps.
    """

    is_distributed = True

    def __init__(self, optimizer: Optimizer, strategy: HostingStrategy) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        # Before the variables exist: they are created with the optimizer of that moment.
        strategy.use(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy must not register with the strategy again.
        return identity, (self.optimizer,)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None:
        """Call `strategy.apply_gradients` with this optimizer."""
        self.strategy.apply_gradients(self.optimizer, grads_and_vars, examples=examples)
