"""`Server`: serve other tasks until the training tasks are done."""

from __future__ import annotations

from strategies.cluster.cluster import Cluster
from strategies.core.process_group import ProcessGroup
from strategies.errors import UnavailableError
from strategies.rpc.service import Service

__all__ = ["Server"]


class Server:
    """Service of the tasks of a cluster; open it with `with` on all of them.

    A task that only serves, such as a ps, calls `join`. Training tasks use `service`, and leave the
    block when they are done.

    Args:
        cluster: cluster whose tasks serve each other. *Collective*, as is leaving the block without
            an error.
        timeout: seconds; see `Service`.

    Attributes:
        cluster: the cluster.
        service: service that accepts device strings of all jobs.

    Example:
        >>> from strategies.cluster.cluster import Cluster
        >>> with Cluster({"worker": ["rank:0"]}) as cluster, Server(cluster) as server:
        ...     if cluster.job == "ps":
        ...         server.join()
    """

    def __init__(self, cluster: Cluster, *, timeout: float = 60.0) -> None:
        self.cluster = cluster

        def check() -> None:
            if not timeout > 0:
                raise ValueError(f"Server: timeout must be seconds > 0, got {timeout}")

        # Before the collective `Service`, which would wait for a task that failed the check.
        ProcessGroup(cluster.comm).run_then_agree("Server", check)
        self.service = Service(cluster.comm, timeout=timeout, locate=cluster.find)

    def join(self, timeout: float | None = None) -> None:
        """Serve until all other training tasks have left or are dead.

        A task in `join` makes no *collective* calls: call `state_slices` and a joint `save` before.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Raises:
            UnavailableError: no training task has left cleanly.
            DeadlineExceededError: the timeout has passed; you may call `join` again.
            CancelledError: the service was closed in the meantime.
        """
        own = self.cluster.comm.rank
        tasks = [rank for rank in self.cluster.training_ranks if rank != own]
        reasons = self.service.departures(tasks, timeout)
        # One clean leave is a normal end of training, even if other training tasks were lost.
        if tasks and all(reasons.values()):
            listed = "; ".join(f"{self.cluster.device_of(r)}: {why}" for r, why in reasons.items())
            raise UnavailableError(f"join: no training task has ended normally ({listed})")

    def close(self) -> None:
        """Wait until all tasks have left; *collective*. Closing twice is harmless."""
        self.service.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.service.__exit__(kind, error, trace)
