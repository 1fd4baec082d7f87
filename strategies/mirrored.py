"""Several replicas on one machine: devices of this process, ranks, or both."""

from __future__ import annotations

from collections.abc import Sequence

import collectives as cc
from strategies.options import CommunicationOptions
from strategies.ranks import of_this_job
from strategies.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Synchronous training on one node; every rank holds all variables.

    Works without MPI where there is only this process, which may have several devices.

    Args:
        devices: of each rank, a replica on each; "/cpu:0" if None.
        comm: the ranks, all on one node; those of the job if None. *Collective* over them.
        communication_options: how ranks exchange arrays.

    Raises:
        ValueError: no such devices, or ranks on several nodes; on all ranks.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        comm: cc.Communicator | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        comm = of_this_job() if comm is None else comm
        if comm is not None and comm.num_nodes > 1:
            raise ValueError(
                f"MirroredStrategy: the ranks are on several nodes, expected 1, got "
                f"{comm.num_nodes}; use MultiWorkerMirroredStrategy"
            )
        super().__init__(devices, comm, communication_options)
