"""Equivalence table of PyTorch optimizers and optimizers here.

| of `torch.optim` | here | only with |
| --- | --- | --- |
| SGD | `SGD`, `Momentum` | dampening 0 |
| Adam, AdamW | `Adam`, `AdamW` | |
| SparseAdam | `Adam`, whose gradients are rows | |
| RMSprop | `RMSProp` | |
| Adagrad | `Adagrad` | lr_decay 0 |

`weight_decay` as part of the gradient, and `maximize`, are applied where the gradient was computed,
with the parameters that it was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from strategies.core.validation import number
from strategies.optimizers.adaptive import Adagrad, Adam, AdamW, RMSProp
from strategies.optimizers.base import LearningRate, Optimizer
from strategies.optimizers.sgd import SGD, Momentum

__all__ = ["Equivalent", "equivalents", "rate_of"]

Group = Mapping[str, Any]
"""Parameters with common settings in PyTorch, and these settings by name."""


class Equivalent(NamedTuple):
    """The counterpart of one group of parameters.

    Attributes:
        optimizer: optimizer that takes the same steps.
        decay: factor of the parameter that is added to the gradient.
        sign: factor of the gradient before that, 1 or -1.
    """

    optimizer: Optimizer
    decay: float
    sign: int


def equivalents(optimizer: Any) -> list[Equivalent]:
    """Return the counterpart of each group of a PyTorch optimizer.

    Each step uses the group's learning rate at that time, so schedulers take effect.

    Raises:
        ValueError: no optimizer here takes the same steps.
    """
    kind = type(optimizer)
    # By name: the module of these classes differs between versions of PyTorch.
    make = _TABLE.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    if make is None:
        raise ValueError(
            f"DistributedOptimizer: strategy= uses optimizers of this package, expected one of "
            f"torch.optim with an equivalent: {' '.join(sorted(_TABLE))}, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return [_equivalent(kind.__name__, make, group) for group in optimizer.param_groups]


def rate_of(group: Group) -> float:
    """Return the current learning rate of a group, which may be a tensor.

    Raises:
        ValueError: the rate is not a number >= 0.
    """
    return number("step", "learning rate", float(group["lr"]))


def _equivalent(name: str, make: Callable[..., Optimizer], group: Group) -> Equivalent:
    # Both change the step in a way that no rule here has.
    for setting in ("dampening", "lr_decay"):
        if group.get(setting):
            raise ValueError(
                f"DistributedOptimizer: with strategy= torch.optim.{name} has no {setting}, "
                f"expected 0, got {group[setting]}"
            )
    # Read in each step, because schedulers change the group.
    made = make(group, lambda step: rate_of(group))
    decoupled = isinstance(made, AdamW)
    # AdamW applies the decay itself; for others it is part of the gradient.
    decay = 0.0 if decoupled else float(group.get("weight_decay", 0))
    return Equivalent(made, decay, -1 if group.get("maximize") else 1)


def _sgd(group: Group, rate: LearningRate) -> Optimizer:
    if not group["momentum"]:
        return SGD(rate)
    return Momentum(rate, float(group["momentum"]), nesterov=bool(group["nesterov"]))


def _adam(group: Group, rate: LearningRate, *, decoupled: bool = False) -> Optimizer:
    beta1, beta2 = map(float, group["betas"])
    settings = {"epsilon": group["eps"], "amsgrad": bool(group.get("amsgrad"))}
    # `Adam` with this flag is AdamW.
    if decoupled or group.get("decoupled_weight_decay"):
        decay = float(group["weight_decay"])
        return AdamW(rate, beta1=beta1, beta2=beta2, weight_decay=decay, **settings)
    return Adam(rate, beta1=beta1, beta2=beta2, **settings)


def _rmsprop(group: Group, rate: LearningRate) -> Optimizer:
    decay, momentum = float(group["alpha"]), float(group["momentum"])
    centered = bool(group["centered"])
    return RMSProp(rate, decay=decay, momentum=momentum, epsilon=group["eps"], centered=centered)


def _adagrad(group: Group, rate: LearningRate) -> Optimizer:
    initial = float(group["initial_accumulator_value"])
    return Adagrad(rate, initial_total=initial, epsilon=group["eps"])


_TABLE: dict[str, Callable[[Group, LearningRate], Optimizer]] = {
    "Adagrad": _adagrad,
    "Adam": _adam,
    "AdamW": partial(_adam, decoupled=True),
    "RMSprop": _rmsprop,
    "SGD": _sgd,
    "SparseAdam": _adam,
}
