"""One replica per rank, kept in step by all-reduces, on one node or many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy.typing as npt

import collectives as cc
from strategies.base import InputContext, Strategy
from strategies.input import sharding

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training: every rank holds all variables and computes on its part of a batch.

    Variables start from rank 0's values. Gradients are averaged over all ranks before each update
    (`DistributedOptimizer`), so that all copies stay equal to the last bit.

    Args:
        comm: the ranks that train together; the whole job if None. *Collective* over them.
    """

    def __init__(self, comm: cc.Communicator | None = None) -> None:
        super().__init__()
        self.comm = cc.init() if comm is None else comm

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.comm.rank == 0

    def _initial(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        initial: npt.NDArray[Any] = self.comm.broadcast(value)
        return initial

    def _sum(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        total: npt.NDArray[Any] = self.comm.allreduce(array, op=cc.SUM)
        return total

    def _share(self, batch: Any) -> Any:
        return sharding.share(batch, self.comm.rank, self.comm.size)

    def _in_step(self, batches: Iterable[Any]) -> Iterator[Any]:
        return sharding.in_step(batches, self.comm)

    def _input_context(self) -> InputContext:
        return InputContext(
            num_input_pipelines=self.comm.size,
            input_pipeline_id=self.comm.rank,
            num_replicas_in_sync=self.comm.size,
        )
