"""The parameters of a model of another library, updated by the chief of spare replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from strategies.optimizers import Optimizer
from strategies.optimizers.pairs import split
from strategies.replicas.variable import Variable
from strategies.sparse import Gradient

__all__ = ["HostedParameters", "OptimizerOfEach"]


class OptimizerOfEach:
    """An optimizer for each variable, as one.

    Args:
        optimizers: name of a variable -> its optimizer, which several may share.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self.step = 0

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Update every variable by its optimizer."""
        shares: dict[int, list[tuple[Any, Any]]] = {}
        pairs = [split(x, "apply_gradients", i) for i, x in enumerate(grads_and_vars)]
        for gradient, variable in pairs:
            number = id(self._optimizers[variable.name])
            shares.setdefault(number, []).append((gradient, variable))
        for optimizer in self._all():
            optimizer.apply_gradients(shares.get(id(optimizer), []))
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep: the state of each optimizer, by its number."""
        states = [optimizer.state_dict() for optimizer in self._all()]
        found = {f"{n}/{key}": value for n, own in enumerate(states) for key, value in own.items()}
        return {"step": self.step, **found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for number, optimizer in enumerate(self._all()):
            start = f"{number}/"
            own = {key[len(start) :]: v for key, v in state.items() if key.startswith(start)}
            optimizer.load_state_dict(own)
        self.step = int(state["step"])

    def _all(self) -> list[Optimizer]:
        """Return the different optimizers, in the order of the variables."""
        return list({id(o): o for o in self._optimizers.values()}.values())


class _Strategy(Protocol):
    """What it asks of the strategy that made it."""

    def apply_gradients(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None: ...


class HostedParameters:
    """Parameters of a model, which are variables of a `SpareReplicaStrategy`; see `Hosted`.

    Args:
        strategy: that made the variables.
        variables: in the order of the parameters.
        optimizer: of all of them.

    Attributes:
        optimizer: as given.
    """

    def __init__(
        self, strategy: _Strategy, variables: Sequence[Variable], optimizer: OptimizerOfEach
    ) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._variables = tuple(variables)

    @property
    def values(self) -> list[Any]:
        """Those of `local_step`."""
        return [variable.value for variable in self._variables]

    def push(
        self, gradients: Sequence[Gradient | None], rates: Sequence[float | None], examples: Any
    ) -> None:
        """Do as `SpareReplicaStrategy.apply_gradients`; the chief's rates count."""
        pairs = zip(gradients, self._variables, strict=True)
        self._strategy.apply_gradients(self.optimizer, pairs, examples=examples)

    def pull(self) -> None:
        """Do nothing: a worker has the values of its step."""
