"""The parameters of a model of another library, on ps tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from strategies.parameter_server.served_variable import ServedVariable
from strategies.sparse import Gradient

__all__ = ["HostedParameters"]


class _Strategy(Protocol):
    """What it asks of the strategy that made it."""

    optimizer: Any

    def apply_gradients(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None: ...

    def pull(self) -> None: ...


class HostedParameters:
    """Parameters of a model, which are variables of a `ParameterServerStrategy`; see `Hosted`.

    Args:
        strategy: that made the variables.
        variables: in the order of the parameters.
    """

    def __init__(self, strategy: _Strategy, variables: Sequence[ServedVariable]) -> None:
        self._strategy = strategy
        self._variables = tuple(variables)

    @property
    def values(self) -> list[Any]:
        """As of the last push or pull; each time in other memory."""
        return [variable.own for variable in self._variables]

    def push(
        self, gradients: Sequence[Gradient | None], rates: Sequence[float | None], examples: Any
    ) -> None:
        """Do as `ParameterServerStrategy.apply_gradients`."""
        for variable, rate in zip(self._variables, rates, strict=True):
            variable.learning_rate = rate
        pairs = zip(gradients, self._variables, strict=True)
        self._strategy.apply_gradients(self._strategy.optimizer, pairs, examples=examples)

    def pull(self) -> None:
        """Do as `ParameterServerStrategy.pull`."""
        self._strategy.pull()
