"""Cluster roles: tasks of ranks, their devices, and placement."""

from strategies.cluster.device_setter import (
    GreedyLoadBalancing,
    RandomChoice,
    RoundRobin,
    replica_device_setter,
)
from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.gpus import limit_gpu_memory, use_gpus
from strategies.cluster.resolvers import (
    RanksClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)
from strategies.cluster.scopes import current_device, device
from strategies.cluster.slurm import SlurmClusterResolver
from strategies.cluster.spec import ClusterSpec

__all__ = [
    "ClusterSpec",
    "DeviceSpec",
    "GreedyLoadBalancing",
    "RandomChoice",
    "RanksClusterResolver",
    "RoundRobin",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
    "current_device",
    "device",
    "limit_gpu_memory",
    "replica_device_setter",
    "use_gpus",
]
