"""Replicas on any number of nodes, kept in step by all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

import collectives as cc
from strategies.options import CommunicationOptions
from strategies.strategy import Strategy

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training: every rank holds all variables and computes on its part of a batch.

    Variables start from rank 0's values. Gradients are averaged over all replicas before each
    update, so that all copies stay equal to the last bit.

    Args:
        comm: the ranks that train together; the whole job if None. *Collective* over them.
        devices: of each rank, a replica on each; "/cpu:0" if None.
        communication_options: how ranks exchange arrays.

    Raises:
        ValueError: no such devices; on all ranks.
        MismatchError: ranks with different numbers of devices; on all ranks.
    """

    def __init__(
        self,
        comm: cc.Communicator | None = None,
        *,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        self.comm = cc.init() if comm is None else comm
        super().__init__(devices, self.comm, communication_options)
