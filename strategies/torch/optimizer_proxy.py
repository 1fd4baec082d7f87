"""Proxy of a PyTorch optimizer: has its attributes, and is an instance of its class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from strategies.averaging.optimizer import identity

if TYPE_CHECKING:
    # For type checkers it is an optimizer of any class, because it has the attributes of the
    # wrapped one and replaces it: `optimizer = DistributedOptimizer(optimizer)`.
    from typing import Any as _Optimizer
else:
    _Optimizer = torch.optim.Optimizer

__all__ = ["OptimizerProxy"]


class OptimizerProxy(_Optimizer):
    """Has the `param_groups`, `state` and `defaults` of the wrapped optimizer.

    So schedulers, scalers and checkpoints work with either of them. Pickling or copying returns the
    wrapped optimizer, because a communicator belongs to a process.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    is_distributed = True

    # `Optimizer.__init__` is not called: `__getattr__` finds groups, state and hooks in the wrapped
    # optimizer. Annotations for editors:
    optimizer: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: Any

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, for example while it is copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property  # type: ignore[misc]  # read-only, as in every proxy
    def __class__(self) -> type:
        """Class of the wrapped optimizer, for `isinstance`, as of a proxy."""
        return type(self.optimizer)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self), *dir(self.optimizer)})

    # Not `__reduce__`, which Python looks up in the class of the wrapped optimizer.
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return identity, (self.optimizer,)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients since the last step."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameters on all ranks."""
        self.optimizer.add_param_group(param_group)
