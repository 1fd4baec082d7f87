"""`hvd.DistributedOptimizer(op=hvd.Adasum)`: combines changes of parameters instead of gradients.

    start = parameters
    optimizer.step()                  with the gradients of this rank
    change = parameters - start
    parameters = start + Adasum of all changes

So the state of the wrapped optimizer, such as momentum, is that of this rank's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.consistency import checksum
from strategies.horovod import operations
from strategies.horovod.compression import Compressor
from strategies.horovod.handles import start
from strategies.horovod.process_sets import Bound, ProcessSet
from strategies.horovod.requests import RequestSpec, allreduce_request
from strategies.replicas.context import require_one_replica
from strategies.torch.optimizer_proxy import OptimizerProxy
from strategies.torch.parameters import Names, parameters_of

__all__ = ["AdasumOptimizer"]


@known_as("DistributedOptimizer")
class AdasumOptimizer(OptimizerProxy):
    """A PyTorch optimizer whose steps apply the Adasum of the steps of all ranks.

    Args:
        optimizer: the wrapped optimizer.
        names: names of its parameters, for errors.
        compression: compression of the changes.
        process_set: the ranks, more than one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        compression: Compressor,
        process_set: ProcessSet,
    ) -> None:
        self.optimizer = optimizer
        self._names, self._compression, self._process_set = names, compression, process_set
        self._compared = False

    def __repr__(self) -> str:
        return f"AdasumOptimizer({self._process_set!r}, {self.optimizer!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients of this rank, and combine the changes of all ranks.

        *Collective*, without the ranks that have joined. A parameter without a gradient on some
        ranks gets the changes of the others.

        Args:
            closure: as for the wrapped optimizer; called on this rank alone.

        Returns:
            This rank's loss; None without a closure.

        Raises:
            MismatchError: ranks have different parameters in the first step, or different shapes or
                dtypes, on all ranks; or another rank has raised an error in its step or closure.
                Parameters are unchanged.
        """
        require_one_replica("step")
        trained = [p for p in parameters_of(self.optimizer) if p.requires_grad]
        if not self._compared:
            self._compare(trained)
        starts = [p.detach().clone() for p in trained]
        loss = error = None
        try:
            loss = self.optimizer.step(closure)
        except Exception as caught:
            error = caught
        changes = []
        with torch.no_grad():
            for parameter, before in zip(trained, starts, strict=True):
                changes.append(parameter - before)
                # Before the exchange, whose error then leaves all ranks with equal parameters.
                parameter.copy_(before)

            def prepare(bound: Bound) -> RequestSpec:
                if error is not None:
                    raise error
                op = operations.Adasum
                return allreduce_request(changes, None, op, 1.0, 1.0, self._compression)(bound)

            # An error in `prepare` reaches the other ranks.
            combined = start("allreduce", self._process_set, None, prepare, alone=False).wait()
            for parameter, change in zip(trained, combined, strict=True):
                parameter.add_(change)
        return loss

    def synchronize(self) -> None:
        """Do nothing, as in Horovod: gradients remain those of this rank."""

    def skip_synchronize(self) -> None:
        """Raise an error, as in Horovod.

        Raises:
            ValueError: always.
        """
        raise ValueError("skip_synchronize: not possible with Adasum, which averages no gradients")

    # GradScaler reads this in `scaler.step`.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ValueError(
            "step: a gradient scaler would skip the steps of single ranks with Adasum, expected "
            "training without one, for example in bfloat16"
        )

    def _compare(self, trained: list[torch.Tensor]) -> None:
        """Raise an error on all ranks if their parameters differ."""
        own = np.array([[int(checksum(p.detach()), 16) for p in trained]], np.uint32)
        # By name, so that ranks that have joined take part.
        rows = operations.allgather(own, process_set=self._process_set)
        different = np.flatnonzero((rows != rows[0]).any(0))
        if different.size:
            name = self._names.get(trained[different[0]], "added later")
            raise cc.MismatchError(
                f"step: ranks have different values of a parameter, expected equal ones from "
                f"hvd.broadcast_parameters, got others (parameter {name})"
            )
        self._compared = True
