"""Exchange of parameters between a model and the strategy that updates them.

::

    model of PyTorch, JAX           wrapped optimizer               strategy
    parameters, optimizer  ------>  names, values, formulas  ---->  host: variables on tasks
    gradients of a batch   ------>  arrays, rows             ---->  push
    parameters             <------  arrays                   <----  values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from strategies.core.sparse import Gradient
from strategies.optimizers import Optimizer

__all__ = ["ParameterHost", "HostingStrategy", "Parameter", "refuse_others"]


class Parameter(NamedTuple):
    """A parameter of a model, as a strategy takes it over.

    Attributes:
        name: as in checkpoints and errors.
        value: in host memory.
        optimizer: that updates it.
    """

    name: str
    value: Any
    optimizer: Optimizer


class ParameterHost:
    """Parameters of a model that a strategy updates, as variables of its own.

    Args:
        variables: in the order of the parameters.
        value_of: a variable -> its newest array that this task knows, in host memory.
        push: lets variables be updated: pairs of a gradient and a variable, the learning rate of
            each, None for that of its optimizer, and examples.
        pull: learns of the newest values.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        value_of: Callable[[Any], Any],
        push: Callable[[list[tuple[Any, Any]], Sequence[float | None], Any], None],
        pull: Callable[[], None],
    ) -> None:
        self._variables = tuple(variables)
        self._value_of = value_of
        self._push = push
        self.pull = pull

    @property
    def values(self) -> list[Any]:
        """The newest values that this task knows, in host memory.

        A parameter may have its numbers in that memory: later values come in other memory, or are
        written there by `push` and `pull`.
        """
        return [self._value_of(variable) for variable in self._variables]

    def push(
        self, gradients: Sequence[Gradient | None], rates: Sequence[float | None], examples: Any
    ) -> None:
        """Let the parameters be updated by gradients, and learn of new values.

        Args:
            gradients: of each parameter.
            rates: the learning rate of each; None for that of its optimizer.
            examples: how many rows they are the mean of, None if all gradients count alike.
        """
        self._push(list(zip(gradients, self._variables, strict=True)), rates, examples)


class HostingStrategy(Protocol):
    """A strategy that makes steps elsewhere."""

    @property
    def devices(self) -> Sequence[str]:
        """Of this process."""

    def host(
        self, parameters: Callable[[], Sequence[Parameter]], *, alike: bool = False
    ) -> ParameterHost:
        """Take parameters over; see `ParameterServerStrategy.host`."""

    def use(self, optimizer: Any) -> None:
        """Let variables be updated by an optimizer."""

    def apply_gradients(self, optimizer: Any, grads_and_vars: Any, *, examples: Any = None) -> None:
        """Let variables be updated."""


def refuse_others(parameters: Sequence[Parameter], variables: Sequence[Any]) -> None:
    """Refuse parameters that are not what their variables hold.

    Raises:
        ValueError: they differ.
    """
    for parameter, variable in zip(parameters, variables, strict=True):
        if not np.array_equal(parameter.value, variable.value, equal_nan=True):
            raise ValueError(
                f"DistributedOptimizer: a parameter is not the chief's, expected the same seed, or "
                f"strategies.broadcast_parameters before, got other numbers (variable: "
                f"{parameter.name})"
            )
