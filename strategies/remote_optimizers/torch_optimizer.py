"""PyTorch optimizers whose steps a strategy runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from collectives import extend
from strategies.core import array_ops
from strategies.core.sparse import Rows, as_rows
from strategies.optimizers.torch_equivalents import equivalents, rate_of
from strategies.remote_optimizers.parameter_host import HostingStrategy, Parameter
from strategies.torch.optimizer_proxy import OptimizerProxy
from strategies.torch.parameters import names_of

__all__ = ["StrategyTorchOptimizer"]


class StrategyTorchOptimizer(OptimizerProxy):
    """A PyTorch optimizer whose steps a strategy runs on other tasks.

    `DistributedOptimizer` creates it for a `strategy`; *collective* over its tasks. The parameters
    take the chief's values then, and the newest values at the end of every `step`. It exposes
    `param_groups` and `defaults` of the wrapped optimizer, whose own `state` stays empty: the slots
    are on the tasks that run the steps (`strategy.state_dict()`).

    Attributes:
        optimizer: wrapped optimizer.
        strategy: strategy that runs the steps.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, strategy: HostingStrategy, named_parameters: Any
    ) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        # Taken once: `add_param_group` is rejected, so the groups do not change.
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
        # All processes start with the chief's values.
        self._take()

    def __repr__(self) -> str:
        return f"StrategyTorchOptimizer({type(self.strategy).__name__}, {self.optimizer!r})"

    def step(self, closure: Callable[[], Any] | None = None, *, examples: Any = None) -> Any:
        """Push the gradients and take the new values; see `strategy.apply_gradients`.

        Args:
            closure: computes the loss and the gradients, once.
            examples: number of rows that the gradients average, 0 allowed; None weights all
                equally.

        Returns:
            Result of the closure.
        """
        loss = None
        if closure is not None:
            # As in optimizers of PyTorch: `step` may be called under `no_grad`.
            with torch.enable_grad():  # type: ignore[no-untyped-call,unused-ignore]
                loss = closure()
        gradients = [self._gradient(parameter, number) for parameter, number in self._grouped]
        # Read in every step, because learning-rate schedulers change them.
        rates = [rate_of(group) for group in self.optimizer.param_groups]
        self._hosted.push(gradients, [rates[number] for _, number in self._grouped], examples)
        # Learning-rate schedulers check this attribute to detect a step.
        self.optimizer._opt_called = True
        self._take()
        return loss

    def pull(self) -> None:
        """Set the parameters to the newest values, such as for an evaluation."""
        self._hosted.pull()
        self._take()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Reject new parameters, because tasks agree on them once.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "add_param_group: parameters are on other tasks by now, expected all of them in the "
            "optimizer that DistributedOptimizer is given"
        )

    def _gradient(self, parameter: torch.Tensor, number: int) -> Any:
        """Return a gradient in the form that strategies expect."""
        gradient, (decay, sign) = parameter.grad, self._adjust[number]
        if gradient is None:
            return None
        if gradient.is_sparse:
            if decay:
                # Decay changes every row, so the gradient would not be sparse any more.
                raise ValueError("step: weight_decay is for dense gradients, got a sparse one")
            rows = as_rows(gradient, "step", f"group {number}")
            values = _on_host(rows.values)
            return Rows(rows.indices, values if sign > 0 else -values)
        gradient = gradient if sign > 0 else -gradient
        if decay:
            # PyTorch's weight decay is added to the gradient; the formula on the task has none.
            gradient = gradient.detach().add(parameter.detach(), alpha=decay)
        return _on_host(gradient)

    def _take(self) -> None:
        """Set the parameters to the newest local values."""
        for (parameter, _), value in zip(self._grouped, self._hosted.values, strict=True):
            tensor = _tensor(value)
            if parameter.is_cpu:
                # Shares the message's memory, because a copy takes as long as the receive.
                parameter.data = tensor
                # Makes a backward pass through earlier results raise, as after any in-place step.
                torch.autograd.graph.increment_version(parameter)
            else:
                parameter.detach().copy_(tensor)


# These two functions run for each parameter in each step. They test the fast path first, with
# checks that take 0.1 us. The general path takes 20 us, as long as a small parameter's message.


def _tensor(value: Any) -> torch.Tensor:
    """Return a tensor that shares an array's memory; copies read-only arrays."""
    if not value.flags.carray:  # in order, aligned, writable
        value = np.require(value, requirements=["C", "W"])
    return cast(torch.Tensor, extend.as_tensor(value))


def _on_host(tensor: torch.Tensor) -> Any:
    """Return a tensor as a NumPy array, without a copy if possible."""
    there = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_cpu and tensor.dtype is not torch.bfloat16:
        return there.numpy()
    view = array_ops.host(there)
    return array_ops.host(there.cpu()) if view is None else view
