"""PyTorch optimizers whose steps a strategy runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strategies.averaging.optimizer import identity
from strategies.core import array_ops
from strategies.core.sparse import Rows, as_rows
from strategies.optimizers.torch_equivalents import equivalents, rate_of
from strategies.remote_optimizers.parameter_host import HostingStrategy, Parameter
from strategies.torch.parameters import names_of

if TYPE_CHECKING:
    _Optimizer: Any  # as in strategies.torch.optimizer
else:
    _Optimizer = torch.optim.Optimizer

__all__ = ["StrategyTorchOptimizer"]


class StrategyTorchOptimizer(_Optimizer):
    """An optimizer of PyTorch whose steps a strategy makes elsewhere.

    Made by `DistributedOptimizer` with a `strategy`; *collective* over its tasks. The parameters
    take the chief's values then, and at the end of every `step` the newest. It shows the
    `param_groups` and `defaults` of the optimizer that it holds, whose own `state` stays empty:
    what has to be kept between steps is where they are made (`strategy.state_dict()`). Pickled or
    copied, it becomes the optimizer that it holds.

    Attributes:
        optimizer: the one that it was made of.
        strategy: that makes the steps.
    """

    is_distributed = True

    # `Optimizer.__init__` is not called: groups and hooks are those of the one held here.
    # Annotations for editors:
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def __init__(
        self, optimizer: torch.optim.Optimizer, strategy: HostingStrategy, named_parameters: Any
    ) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        self._grouped = [
            (parameter, number)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]
        self._adjust: list[tuple[float, int]] = []  # decay and sign of each group's gradients

        def parameters() -> list[Parameter]:
            names = names_of(optimizer, named_parameters)
            formulas = equivalents(optimizer)
            self._adjust = [(formula.decay, formula.sign) for formula in formulas]
            return [
                Parameter(names[parameter], _on_host(parameter), formulas[number].optimizer)
                for parameter, number in self._grouped
            ]

        self._hosted = strategy.host(parameters)
        self._take()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet there, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.optimizer)})

    def __repr__(self) -> str:
        return f"StrategyTorchOptimizer({type(self.strategy).__name__}, {self.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (self.optimizer,)

    def step(self, closure: Callable[[], Any] | None = None, *, examples: Any = None) -> Any:
        """Push the gradients, and take the new values; as `strategy.apply_gradients`.

        Args:
            closure: computes the loss and the gradients, once.
            examples: how many rows the gradients are the mean of, 0 allowed; None: all count alike.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call,unused-ignore]
                loss = closure()
        gradients = [self._gradient(parameter, number) for parameter, number in self._grouped]
        rates = [rate_of(group) for group in self.optimizer.param_groups]
        self._hosted.push(gradients, [rates[number] for _, number in self._grouped], examples)
        # By it, schedulers of learning rates know that there was a step.
        self.optimizer._opt_called = True
        self._take()
        return loss

    def pull(self) -> None:
        """Let the parameters take the newest values, such as for an evaluation."""
        self._hosted.pull()
        self._take()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the wrapped optimizer; its slots are where steps are made."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the wrapped optimizer its settings back."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters: tasks agree on them once.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "add_param_group: parameters are on other tasks by now, expected all of them in the "
            "optimizer that DistributedOptimizer is given"
        )

    def _gradient(self, parameter: torch.Tensor, number: int) -> Any:
        """Return a gradient as strategies take it."""
        gradient, (decay, sign) = parameter.grad, self._adjust[number]
        if gradient is None:
            return None
        if gradient.is_sparse:
            if decay:
                raise ValueError("step: weight_decay is for dense gradients, got a sparse one")
            rows = as_rows(gradient, "step", f"group {number}")
            values = _on_host(rows.values)
            return Rows(rows.indices, values if sign > 0 else -values)
        gradient = gradient if sign > 0 else -gradient
        if decay:
            gradient = gradient.detach().add(parameter.detach(), alpha=decay)
        return _on_host(gradient)

    def _take(self) -> None:
        """Let the parameters be what is known of them here."""
        moved = []
        for (parameter, _), value in zip(self._grouped, self._hosted.values, strict=True):
            tensor = _tensor(value, parameter.dtype)
            if parameter.is_cpu:
                # In the memory of the message: to copy it would take as long as to receive it.
                parameter.data = tensor
                moved.append(parameter)
            else:
                parameter.detach().copy_(tensor)
        # A backward pass of what was computed before is an error, as after any step.
        torch.autograd.graph.increment_version(moved)


# These two run for each parameter at each step: the fast way first, by what PyTorch answers in a
# tenth of a microsecond. Others took 20 us for each, as long as a small parameter's message.


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of this dtype in the memory of an array; a copy of one nobody may write."""
    if not value.flags.carray:  # in order, aligned, writable
        value = np.require(value, requirements=["C", "W"])
    if dtype is torch.bfloat16:  # which PyTorch does not take from NumPy
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _on_host(tensor: torch.Tensor) -> Any:
    """Return a tensor as a NumPy array, without a copy where its memory allows."""
    there = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_cpu and tensor.dtype is not torch.bfloat16:
        return there.numpy()
    view = array_ops.host(there)
    return array_ops.host(there.cpu()) if view is None else view
