"""`DistributedOptimizer` with local steps, for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.gossip import rounds_of
from strategies.averaging.local_steps import KEY
from strategies.averaging.options import AveragingOptions
from strategies.core import array_ops
from strategies.replicas.context import require_one_replica
from strategies.torch.optimizer_proxy import OptimizerProxy
from strategies.torch.parameters import Names, parameters_of, settings_of

__all__ = ["LocalTorchOptimizer"]


@known_as("DistributedOptimizer")
class LocalTorchOptimizer(OptimizerProxy):
    """A PyTorch optimizer that averages the parameters of all ranks every `sync_every` steps.

    With `neighbours` it averages them in every step, with some ranks: each step ends a round.

    Returned by `DistributedOptimizer`. `param_groups`, `state` and `defaults` are those of the
    wrapped optimizer, which steps by the gradients of this rank alone.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        comm: cc.Communicator,
        rule: AveragingOptions,
    ) -> None:
        self.optimizer = optimizer
        # A copy, which also gets names for parameters that are added later.
        self._names = dict(names)
        self._rounds = rounds_of(comm, rule, partial(settings_of, optimizer))

    @property
    def comm(self) -> cc.Communicator:
        """The ranks that average."""
        return self._rounds.comm

    def __repr__(self) -> str:
        return f"LocalTorchOptimizer(rank {self.comm.rank} of {self.comm.size}, {self.optimizer!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update by this rank's gradients, and average the parameters if the round ends.

        *Collective* in the last step of a round.

        Args:
            closure: as for the wrapped optimizer.

        Returns:
            The result of the wrapped optimizer.

        Raises:
            Exception: the error of the wrapped optimizer; on this rank, and on all ranks in the
                last step of the round.
            MismatchError: ranks differ in parameters, in the settings of an optimizer, in the
                number of steps, or in the data compared in the first synchronization; on all ranks.
        """
        require_one_replica("step")
        error = loss = None
        parameters: dict[str, Any] = {}
        try:
            parameters = self._parameters()
            self._rounds.begin(parameters)
            loss = self.optimizer.step(closure)  # type: ignore[arg-type,unused-ignore]
        except Exception as caught:
            error = caught
        self._rounds.advance(parameters, error)
        return loss

    def join(self) -> None:
        """Take part in the synchronizations of other ranks, until all ranks call this.

        *Collective*. Afterwards, broadcast the parameters and the optimizer's state of the last
        rank that made steps.
        """
        self._rounds.join()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the wrapped optimizer's, and `local_steps` of the round."""
        return {**super().state_dict(), KEY: self._rounds.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's state; one of the wrapped optimizer alone begins a round."""
        super().load_state_dict({name: x for name, x in state_dict.items() if name != KEY})
        self._rounds.load_state_dict(state_dict.get(KEY))

    def rebind(self, comm: cc.Communicator) -> None:
        """Average over other ranks from now on, also in the middle of a round.

        For surviving ranks: the buckets of the old communicator are abandoned, not closed.
        """
        self._rounds.rebind(comm)

    def close(self) -> None:
        """Release the buckets; *collective*. They are recreated when needed."""
        self._rounds.close()

    @property
    def _step_supports_amp_scaling(self) -> bool:  # read by GradScaler alone
        raise ValueError(
            "step: a loss scaler skips the steps of this rank alone, so that ranks would "
            "synchronize in different steps, expected bfloat16, which needs no scaler, with "
            "sync_every and neighbours"
        )

    def _parameters(self) -> dict[str, Any]:
        """Return name -> array of the trained parameters, as NumPy views if in host memory."""
        found = {}
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad:
                name = self._names.setdefault(parameter, f"parameter {len(self._names)}")
                view = array_ops.host(parameter.detach())
                found[name] = parameter.detach() if view is None else view
        return found
