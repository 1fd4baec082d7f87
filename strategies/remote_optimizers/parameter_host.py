"""Exchange of parameters between a model and the strategy that updates them.

::

    model of PyTorch, JAX           wrapped optimizer               strategy
    parameters, optimizer  ------>  names, values, formulas  ---->  host: variables on tasks
    gradients of a batch   ------>  arrays, rows             ---->  push
    parameters             <------  arrays                   <----  values
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from strategies.core.process_group import ProcessGroup
from strategies.core.sparse import Gradient
from strategies.optimizers import Optimizer
from strategies.replicas import datasets
from strategies.replicas.datasets import InputContext, Policy
from strategies.strategy.base import Strategy

__all__ = ["HostingStrategy", "Parameter", "ParameterHost"]


class Parameter(NamedTuple):
    """A model parameter that a strategy hosts.

    Attributes:
        name: name in checkpoints and errors.
        value: array in host memory.
        optimizer: optimizer of the parameter.
    """

    name: str
    value: Any
    optimizer: Optimizer


@dataclass(frozen=True)
class ParameterHost:
    """Model parameters that a strategy updates as its own variables.

    Attributes:
        variables: variables in the order of the parameters.
        value_of: variable -> its newest array on this task, in host memory.
        push_pairs: updates variables, given (gradient, variable) pairs, the learning rate of each
            pair (None for its optimizer's), and examples.
        pull: fetches the newest values.
    """

    variables: Sequence[Any]
    value_of: Callable[[Any], Any]
    push_pairs: Callable[[list[tuple[Any, Any]], Sequence[float | None], Any], None]
    pull: Callable[[], None]

    @property
    def values(self) -> list[Any]:
        """The newest values on this task, in host memory.

        A parameter may share this memory. `push` and `pull` either replace the array or write into
        it.
        """
        return [self.value_of(variable) for variable in self.variables]

    def push(
        self, gradients: Sequence[Gradient | None], rates: Sequence[float | None], examples: Any
    ) -> None:
        """Update the parameters by gradients, and receive new values.

        Args:
            gradients: gradient of each parameter, or None.
            rates: learning rate of each parameter; None for its optimizer's.
            examples: number of rows that the gradients average; None weights all gradients equally.
        """
        self.push_pairs(list(zip(gradients, self.variables, strict=True)), rates, examples)


class HostingStrategy(Strategy):
    """A strategy that runs optimizer steps on other tasks; its workers are not in step."""

    is_in_step = False
    _trainers: ProcessGroup  # the processes that compute gradients

    def host(
        self, parameters: Callable[[], Sequence[Parameter]], *, alike: bool = False
    ) -> ParameterHost:
        """Create variables for the parameters of another library's model; *collective*.

        `DistributedOptimizer(optimizer, strategy=...)` calls it.

        Args:
            parameters: returns the parameters, the same on all processes.
            alike: whether all processes must already have the chief's values, because theirs cannot
                be overwritten.

        Raises:
            Exception: error of `parameters`; on all processes.
            ValueError: see `variable`; or values differ from the chief's; on all processes.
        """
        operation = "DistributedOptimizer"
        given = self._everyone.run_then_agree(operation, parameters)
        # Collective, so only after all processes have their parameters.
        host = self._host(given)
        if alike:
            self._everyone.run_then_agree(operation, lambda: _check_equal(given, host.values))
        return host

    def _host(self, parameters: Sequence[Parameter]) -> ParameterHost:
        """Create the variables of `host`; *collective*."""
        raise NotImplementedError

    def use(self, optimizer: Any) -> None:
        """Set the optimizer for variables created from now on; *collective*."""

    def distribute_dataset(
        self, batches: Iterable[Any], *, policy: Policy = "auto"
    ) -> Iterator[Any]:
        """Return this worker's rows of every global batch; see `Strategy`.

        No data is exchanged. A process that does not train gets all rows.

        Raises:
            ValueError: the policy is neither "data" nor "auto"; "auto" means "data", because
                workers are not in step.
        """
        parts = datasets.of_same_batches(batches, self._trainers, len(self.devices), policy)
        return self._on_devices(parts)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> Iterator[Any]:
        """Read this worker's own part of the data; workers do not wait for each other.

        Args:
            dataset_fn: returns this worker's batches, one per replica and step, given an
                `InputContext` that describes the part to read.
        """
        own = dataset_fn(self._input_context())
        return self._on_devices(datasets.from_function(own, self.ranks, len(self.devices)))

    def _input_context(self) -> InputContext:
        """Return the part of the data that this worker reads."""
        raise NotImplementedError


def _check_equal(parameters: Sequence[Parameter], values: Sequence[Any]) -> None:
    """Check that parameters equal their variables.

    Raises:
        ValueError: a parameter differs.
    """
    for parameter, value in zip(parameters, values, strict=True):
        if not np.array_equal(parameter.value, value, equal_nan=True):
            raise ValueError(
                f"DistributedOptimizer: a parameter is not the chief's, expected the same seed, or "
                f"strategies.broadcast_parameters before, got other numbers (variable: "
                f"{parameter.name})"
            )
