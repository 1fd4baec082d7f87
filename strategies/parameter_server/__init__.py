"""Parameter server: variables on ps tasks, workers that push gradients, a coordinator."""

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
