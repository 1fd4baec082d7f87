"""Variables on ps tasks, workers that push gradients there, and a coordinator that gives work."""

from strategies.parameter_server.client import ServerStats
from strategies.parameter_server.coordinator import ClusterCoordinator
from strategies.parameter_server.staleness import Decision, Drop, Scale, WorkerStats
from strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "ClusterCoordinator",
    "Decision",
    "Drop",
    "ParameterServerStrategy",
    "WorkerStats",
    "ServerStats",
    "Scale",
]
