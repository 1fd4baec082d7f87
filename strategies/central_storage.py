"""Variables are updated in one place; replicas elsewhere compute with copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import collectives as cc
from strategies.distributed_optimizer import ArrayOptimizer, AveragingOptimizer
from strategies.options import CommunicationOptions
from strategies.ranks import of_this_job
from strategies.replicas.variable import Variable
from strategies.strategy import Strategy

__all__ = ["CentralStorageStrategy"]


class CentralStorageStrategy(Strategy):
    """Synchronous training in which rank 0 alone updates the variables and gives them to all.

    What the optimizer keeps for each variable exists once, on rank 0; its `step` and its state are
    of use there only. The replicas of one process share its variables as they are.

    Args:
        devices: that compute, of each rank; "/cpu:0" if None.
        comm: the ranks; those of the job if None, without MPI if there is one. *Collective*.
        communication_options: how ranks exchange arrays.

    Raises:
        ValueError: no such devices; on all ranks.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        comm: cc.Communicator | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(devices, of_this_job() if comm is None else comm, communication_options)

    def apply_gradients(
        self,
        optimizer: ArrayOptimizer | AveragingOptimizer,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Average the gradients, and update the variables on rank 0; see `Strategy`.

        Raises:
            TypeError: a `DistributedOptimizer`, which updates on every rank.
        """
        if isinstance(optimizer, AveragingOptimizer):
            raise TypeError(
                "apply_gradients: a DistributedOptimizer updates on every rank, expected the "
                "optimizer itself, which is used on rank 0"
            )
        super().apply_gradients(optimizer, grads_and_vars, examples=examples)

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change the variables on rank 0, and copy them to the others; *collective*."""
        self.ranks.prepared("update", change if self.is_chief else lambda: None)
        for variable in variables:
            array = variable.components[0] if isinstance(variable, Variable) else variable
            array[...] = np.asarray(self.ranks.of_chief(array))
