"""Gossip: each rank steps by itself, and averages its parameters with its neighbours' in each step.

The parameters x of the ranks after step t, with the mixing matrix W of `Communicator.neighbours`::

    x[t + 1] = W (x[t] - step(gradient of x[t]))

They differ between ranks, but stay near each other, as W leaves their mean unchanged. A rank sends
its parameters to its neighbours only, whatever the number of ranks.

Source: X. Lian et al., "Can decentralized algorithms outperform centralized algorithms? A case
study for decentralized parallel stochastic gradient descent", arXiv:1705.09056.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import collectives as cc
from strategies.averaging import consistency
from strategies.averaging.consistency import Fingerprint
from strategies.averaging.local_steps import LocalRounds
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core import array_ops
from strategies.core.validation import integer

__all__ = ["GossipRounds", "rounds_of"]


class GossipRounds:
    """The steps of one rank's optimizer, with the interface of `LocalRounds`.

    Args:
        comm: the ranks; *collective*.
        rule: options, with `neighbours`.
        settings: returns the settings of the rank's optimizer, compared in each step.

    Attributes:
        comm: the ranks.
        step: number of steps so far.
    """

    def __init__(
        self,
        comm: cc.Communicator,
        rule: AveragingOptions,
        settings: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._rule, self._settings = rule, settings
        self.step = 0
        self.comm = comm
        self._neighbours: cc.Neighbours | None = comm.neighbours(rule.neighbours)
        self._names: list[str] = []
        self._new: list[Fingerprint] = []  # facts of parameters that were not compared yet

    def rebind(self, comm: cc.Communicator) -> None:
        """Average over other ranks from now on; their next step defines the neighbours."""
        self.comm, self._neighbours = comm, None

    def begin(self, parameters: Mapping[str, Any]) -> None:
        """Describe parameters that are new in this step, before it changes them."""
        if self._names == list(parameters):
            return
        # Only the first step begins with equal parameters.
        values = self.step == 0 and self._rule.compare != "nothing"
        leaves = [ParameterSpec.of(name, value) for name, value in parameters.items()]
        self._new = [leaf.fingerprint(values) for leaf in leaves]
        self._names = list(parameters)

    def advance(self, parameters: Mapping[str, Any], error: Exception | None = None) -> None:
        """Average the parameters of a step with the neighbours'.

        *Collective*.

        Args:
            parameters: the parameters after the step.
            error: reason why the step failed; all ranks raise it.

        Raises:
            MismatchError: ranks differ in parameters, settings or the number of steps; on all
                ranks.
            Exception: as `agreement.raise_everywhere`.
        """

        def facts() -> list[Fingerprint]:
            if error is not None:
                raise error
            settings = {**(self._settings() if self._rule.compare == "all" else {})}
            settings["steps"] = self.step
            return [*self._new, *(consistency.setting(*item) for item in settings.items())]

        consistency.compare(self.comm, OPERATION, facts)
        self._new = []
        if self._neighbours is None:
            self._neighbours = self.comm.neighbours(self._rule.neighbours)
        self._mix(self._neighbours, list(parameters.values()))
        self.step += 1

    def join(self) -> None:
        """Raise an error: a rank without steps has nothing to average.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{OPERATION}: ranks with neighbours average in each step, expected equally many steps "
            "on all ranks, got join"
        )

    def close(self) -> None:
        """Release nothing, as no memory is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, which selects the neighbours of the next one."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Replace the number of steps; None begins at 0.

        Raises:
            ValueError: the number is missing or invalid.
        """
        state = {"step": 0} if state is None else state
        self.step = integer(OPERATION, "'step' in state", state.get("step"), least=0)
        self._names = []

    def _mix(self, neighbours: cc.Neighbours, arrays: list[Any]) -> None:
        """Average arrays in place: those of the host at once for each dtype."""
        views = [array_ops.host(array) for array in arrays]
        hosts = [view for view in views if view is not None]
        for dtype in dict.fromkeys(view.dtype for view in hosts):
            own = [view for view in hosts if view.dtype == dtype]
            flat = np.concatenate([view.reshape(-1) for view in own])
            # The same matrix for all arrays of a step.
            neighbours.step = self.step
            neighbours.average(flat, out=flat)
            ends = np.cumsum([view.size for view in own])
            for view, part in zip(own, np.split(flat, ends[:-1]), strict=True):
                view[...] = part.reshape(view.shape)
        for array, on_host in zip(arrays, views, strict=True):
            if on_host is None:
                neighbours.step = self.step
                neighbours.average(array, out=array)


def rounds_of(
    comm: cc.Communicator, rule: AveragingOptions, settings: Callable[[], Mapping[str, Any]]
) -> LocalRounds | GossipRounds:
    """Return the rounds that a rule asks for; *collective*."""
    kind = LocalRounds if rule.neighbours is None else GossipRounds
    return kind(comm, rule, settings)
