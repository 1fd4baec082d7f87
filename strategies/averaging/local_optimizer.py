"""`DistributedOptimizer` with local steps, for arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.consistency import settings_of
from strategies.averaging.gossip import rounds_of
from strategies.averaging.local_steps import KEY
from strategies.averaging.optimizer import (
    ArrayOptimizer,
    Pair,
    host_value,
    identity,
    leaf_of,
    like_variables,
)
from strategies.averaging.options import AveragingOptions
from strategies.optimizers.gradient_pairs import split
from strategies.replicas.context import require_one_replica

__all__ = ["LocalOptimizer"]


@known_as("DistributedOptimizer")
class LocalOptimizer:
    """Steps by the gradients of this rank, and averages the variables every `sync_every` steps.

    With `neighbours` it averages them in every step, with some ranks: each step ends a round.

    Returned by `DistributedOptimizer`. Pickling or copying returns the wrapped optimizer.

    Args:
        optimizer: the optimizer to wrap.
        comm: the ranks.
        rule: options of the averaging.
    """

    is_distributed = True

    def __init__(
        self, optimizer: ArrayOptimizer, comm: cc.Communicator, rule: AveragingOptions
    ) -> None:
        self.optimizer = optimizer
        self._rounds = rounds_of(comm, rule, partial(settings_of, optimizer))

    def __reduce__(self) -> tuple[Any, ...]:
        # A communicator belongs to a process, so a copy is the wrapped optimizer.
        return identity, (self.optimizer,)

    @property
    def comm(self) -> cc.Communicator:
        """The ranks that average."""
        return self._rounds.comm

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self.optimizer.step

    def apply_gradients(self, grads_and_vars: Iterable[Pair]) -> None:
        """Update the variables by this rank's gradients; average them if the round ends.

        *Collective* in the last step of a round: all ranks, with the same variables in the same
        order.

        Args:
            grads_and_vars: (gradient, variable) pairs, as for the wrapped optimizer. A variable
                must change in place, so not one of JAX.

        Raises:
            ValueError, TypeError: a pair is wrong; on this rank, and on all ranks in the last step
                of the round.
            MismatchError: ranks differ in the variables, in the settings of an optimizer, in the
                number of steps, or in the data compared in the first synchronization; on all ranks.
        """
        require_one_replica("apply_gradients")
        error: Exception | None = None
        pairs: list[Pair] = []
        variables: dict[str, Any] = {}
        try:
            pairs = [split(x, "apply_gradients", i) for i, x in enumerate(grads_and_vars)]
            variables = dict(_named(variable, i) for i, (_, variable) in enumerate(pairs))
            self._rounds.begin(variables)
            self.optimizer.apply_gradients(like_variables(pairs))
        except Exception as caught:  # also one of the iterable
            error = caught
        self._rounds.advance(variables, error)
        for _, variable in pairs:
            # Copies the value to further devices of a variable.
            if hasattr(variable, "settle"):
                variable.settle(variable.value)

    def join(self) -> None:
        """Take part in the synchronizations of other ranks, until all ranks call this.

        *Collective*. A mean is then over the ranks that still make steps. Afterwards, broadcast the
        variables and the optimizer's state of the last rank.
        """
        self._rounds.join()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the wrapped optimizer's, and `local_steps` of the round."""
        return {**self.optimizer.state_dict(), KEY: self._rounds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state; one of the wrapped optimizer alone begins a round."""
        self.optimizer.load_state_dict({name: x for name, x in state.items() if name != KEY})
        self._rounds.load_state_dict(state.get(KEY))

    def rebind(self, comm: cc.Communicator) -> None:
        """Average over other ranks from now on, also in the middle of a round.

        For surviving ranks: the buckets of the old communicator are abandoned, not closed.
        """
        self._rounds.rebind(comm)

    def close(self) -> None:
        """Release the buckets; *collective*. They are recreated when needed."""
        self._rounds.close()


def _named(variable: Any, position: int) -> tuple[str, Any]:
    leaf = leaf_of(variable, position)
    # Also if the variable could replace it: the anchors change in place.
    return leaf.name, host_value(leaf.like, f"variable: {leaf.name}")
