"""One optimizer per variable behind a single interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from strategies.optimizers import Optimizer
from strategies.optimizers.gradient_pairs import split

__all__ = ["PerVariableOptimizer"]


class PerVariableOptimizer:
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
