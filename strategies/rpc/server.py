"""`Server`: serves other tasks until the training tasks are done."""

from __future__ import annotations

from strategies.cluster.cluster import Cluster
from strategies.core.process_group import ProcessGroup
from strategies.errors import UnavailableError
from strategies.rpc.service import Service

__all__ = ["Server"]


class Server:
    """The service of a cluster's tasks; open it with `with` on all of them.

    A task that only serves, such as a ps, calls `join`. Those that train use `service`, and leave
    the block when they are done.

    Args:
        cluster: its tasks serve each other. *Collective*, as is leaving the block without an error.
        timeout: as for `Service`.

    Attributes:
        cluster: as given.
        service: for named things on tasks; it takes device strings of all jobs.

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

        ProcessGroup(cluster.comm).run_then_agree("Server", check)
        self.service = Service(cluster.comm, timeout=timeout, locate=cluster.find)

    def join(self, timeout: float | None = None) -> None:
        """Serve until all others that train have left, or are dead.

        Args:
            timeout: seconds to wait for that; None for any time.

        Raises:
            UnavailableError: none of them has left in good order.
            DeadlineExceededError: they did not leave in time; one may call again.
            CancelledError: the service was closed meanwhile.
        """
        own = self.cluster.comm.rank
        tasks = [rank for rank in self.cluster.training_ranks if rank != own]
        reasons = self.service.departures(tasks, timeout)
        if tasks and all(reasons.values()):
            listed = "; ".join(f"{self.cluster.device_of(r)}: {why}" for r, why in reasons.items())
            raise UnavailableError(f"join: no task that trains has come to its end ({listed})")

    def close(self) -> None:
        """Wait until all tasks have left; *collective*. Closing twice is harmless."""
        self.service.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.service.__exit__(kind, error, trace)
