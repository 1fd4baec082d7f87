"""Local steps: each rank steps by itself, and ranks average their parameters every k steps.

A *round* is k steps of each rank, from parameters that are equal on all ranks, the *anchors*. It
ends with a synchronization: the mean over ranks of `anchor - parameter` is the gradient by which
the outer optimizer changes the anchors, which all ranks then take as parameters::

    rank 0    anchor - step - step - step -.                            .- anchor - step ...
                                            mean of anchor - parameter -
    rank 1    anchor - step - step - step -'        outer step          '- anchor - step ...

Sources: S. Stich, "Local SGD converges fast and communicates little", arXiv:1805.09767; T. Lin et
al., "Don't use large mini-batches, use local SGD", arXiv:1808.07217 (post-local SGD); A. Douillard
et al., "DiLoCo: distributed low-communication training of language models", arXiv:2311.08105.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import collectives as cc
from strategies.averaging.accumulation import LocalGradient
from strategies.averaging.averaging import Averaging
from strategies.averaging.consistency import fingerprints_of_optimizer, settings_of
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core import array_ops
from strategies.core.validation import integer
from strategies.optimizers.sgd import SGD

__all__ = ["KEY", "LocalRounds"]

KEY = "local_steps"
"""Key of the state of the rounds in an optimizer's `state_dict`."""


class _Anchor(NamedTuple):
    """A variable of the outer optimizer."""

    name: str
    value: Any


class LocalRounds:
    """The rounds of one rank's optimizer.

    Parameters are passed as name -> array that changes in place, the same names on all ranks.

    Args:
        comm: the ranks.
        rule: options, with `sync_every`.
        settings: returns the settings of the rank's optimizer, compared in each synchronization.

    Attributes:
        comm: the ranks.
        step: number of steps so far.
        since: number of steps since the last synchronization.
    """

    def __init__(
        self,
        comm: cc.Communicator,
        rule: AveragingOptions,
        settings: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._rule, self._settings = rule, settings
        # Subtracts the mean difference, which leaves the mean of the parameters.
        self._outer = SGD(1.0) if rule.outer is None else rule.outer
        self.step = self.since = self._every = 0
        self._anchors: dict[str, Any] = {}
        self._loaded = False  # whether no step has used the loaded anchors yet
        self._leaves: list[ParameterSpec] = []
        self._error: Exception | None = None
        self.comm = comm
        self._averaging = self._averaging_over(comm)

    def rebind(self, comm: cc.Communicator) -> None:
        """Average over other ranks from now on, in the middle of a round or not."""
        self.comm = comm
        feedback = self._averaging.feedback()
        self._averaging = self._averaging_over(comm)
        self._averaging.load_feedback(feedback)

    def begin(self, parameters: Mapping[str, Any]) -> None:
        """Keep copies of parameters that are new in this step, before it changes them.

        Raises:
            ValueError: the loaded state belongs to other parameters.
        """
        names = [leaf.name for leaf in self._leaves]
        if names == list(parameters):
            return
        for name, value in parameters.items():
            anchor = self._anchors.get(name)
            if anchor is None and not self._loaded:
                self._anchors[name] = array_ops.copy(value)
            elif anchor is None or tuple(anchor.shape) != tuple(value.shape):
                raise ValueError(
                    f"{OPERATION}: loaded state belongs to other parameters, expected anchors for "
                    f"{', '.join(parameters)}, got {', '.join(self._anchors)}"
                )
            else:
                self._anchors[name] = array_ops.on_same_device(value, anchor)
        self._loaded = False
        # The anchors, because only they are equal on all ranks in the middle of a round.
        self._leaves = [ParameterSpec.of(name, self._anchors[name]) for name in parameters]

    def advance(self, parameters: Mapping[str, Any], error: Exception | None = None) -> None:
        """Count a step of this rank, and synchronize if it ends the round.

        *Collective* if it ends the round.

        Args:
            parameters: the parameters after the step.
            error: reason why the step failed. It is raised at once, and by all ranks in the
                synchronization.

        Raises:
            MismatchError, ValueError: as `Averaging.average`; on all ranks. The next step
                synchronizes again.
        """
        every = self._rule.sync_every
        every = every(self.step) if callable(every) else every
        self._every = integer(OPERATION, "sync_every", every)
        self.step += 1
        self.since += 1
        self._error = self._error or error
        if self.since >= self._every:
            self._synchronize(parameters)
        elif error is not None:
            raise error

    def join(self) -> None:
        """Take part in the synchronizations of other ranks, until all ranks call this.

        *Collective*. The next step begins a round.
        """
        self._averaging.join(self._leaves or None)
        self._anchors.clear()
        self._leaves, self.since = [], 0

    def close(self) -> None:
        """Release the buckets; *collective*."""
        self._averaging.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, as copies.

        Returns:
            `step`, `since`, `outer`: state of the outer optimizer, `feedback`: rounding errors, and
            `anchors`: name -> array, {} between two rounds, when they equal the parameters.
        """
        anchors = {name: array_ops.copy(x) for name, x in self._anchors.items()}
        return {
            "step": self.step,
            "since": self.since,
            "anchors": anchors if self.since else {},
            "outer": self._outer.state_dict(),
            "feedback": list(self._averaging.feedback()),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Replace the state by one from `state_dict`; None begins a round.

        Raises:
            ValueError: a value is missing or invalid.
        """
        state = {"step": 0, "since": 0, "anchors": {}, "feedback": []} if state is None else state
        missing = {"step", "since", "anchors", "feedback"} - state.keys()
        if missing:
            raise ValueError(f"{OPERATION}: bad state of local steps, got no {sorted(missing)}")
        self.step = integer(OPERATION, "'step' in state", state["step"], least=0)
        self.since = integer(OPERATION, "'since' in state", state["since"], least=0)
        self._anchors = {name: array_ops.copy(x) for name, x in state["anchors"].items()}
        self._loaded, self._leaves, self._error = bool(self._anchors), [], None
        if "outer" in state:
            self._outer.load_state_dict(state["outer"])
        if state["feedback"]:
            self._averaging.load_feedback(state["feedback"])

    def _synchronize(self, parameters: Mapping[str, Any]) -> None:
        error, self._error = self._error, None
        differences = []
        if error is None:
            for name, value in parameters.items():
                with array_ops.device_context(value):
                    difference = array_ops.copy(self._anchors[name])
                    difference -= value
                differences.append(difference)
        means = self._averaging.average(self._leaves, LocalGradient(differences, error=error))
        anchors = [_Anchor(name, self._anchors[name]) for name in parameters]
        self._outer.apply_gradients(zip(means, anchors, strict=True))
        for name, anchor in anchors:
            array_ops.overwrite(parameters[name], anchor)
        self.since = 0

    def _averaging_over(self, comm: cc.Communicator) -> Averaging:
        state = partial(fingerprints_of_optimizer, self._outer)
        return Averaging(comm, self._rule, self._compared, state)

    def _compared(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks in a synchronization."""
        outer = {f"outer {name}": x for name, x in settings_of(self._outer).items()}
        return {
            **self._settings(), **outer, "sync_every": self._every, "local steps": self.step,
        }  # fmt: skip
