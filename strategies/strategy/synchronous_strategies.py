"""Mirrored, multi-worker mirrored and central-storage strategies.

One replica (default, one device), several on a machine (mirrored) or on many (multi-worker), and
variables that one rank updates for all (central storage).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import collectives as cc
from collectives import extend
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer
from strategies.core.communication_options import CommunicationOptions
from strategies.core.process_group import of_this_job
from strategies.replicas import context
from strategies.replicas.context import ReplicaContext
from strategies.replicas.variable import Variable
from strategies.strategy.base import Strategy

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "get_replica_context",
    "get_strategy",
    "in_cross_replica_context",
]


class DefaultStrategy(Strategy):
    """One replica in this process, without communication."""

    def __init__(self) -> None:
        super().__init__()


# Made at import: it has no processes and starts nothing.
_default = DefaultStrategy()
_default_replica = ReplicaContext(_default, 0)


def get_strategy() -> Strategy:
    """Return the strategy of this thread's scope or replica, or the default one."""
    top = context.current()
    strategy = _default if top is None else top.strategy
    assert isinstance(strategy, Strategy)
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that runs in this thread; None in cross-replica context.

    Outside any scope this is the single replica of the default strategy.
    """
    top = context.current()
    return _default_replica if top is None else top.replica


def in_cross_replica_context() -> bool:
    """Return whether this thread is in a strategy's scope and outside its replicas."""
    return get_replica_context() is None


class OneDeviceStrategy(Strategy):
    """Variables and computation on one device, for debugging and comparison.

    Args:
        device: one of `strategies.devices()`, such as "/gpu:1".
        soft_placement: use the CPU if the device does not exist.

    Raises:
        ValueError: the device does not exist.
    """

    def __init__(self, device: str = "/cpu:0", *, soft_placement: bool = False) -> None:
        super().__init__([device], soft_placement=soft_placement)


class MirroredStrategy(Strategy):
    """Synchronous training on one node; every rank holds all variables.

    Works without MPI for a single process, which may have several devices.

    Args:
        devices: devices of each rank, one replica each; "/cpu:0" if None.
        comm: the ranks, all on one node; None for those of the job. *Collective* over them.
        communication_options: how ranks exchange arrays.
        soft_placement: use CPU devices for missing ones.

    Raises:
        ValueError: a device does not exist, or the ranks are on several nodes; on all ranks.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        comm: cc.Communicator | None = None,
        communication_options: CommunicationOptions | None = None,
        soft_placement: bool = False,
    ) -> None:
        # None without a launcher, so that the strategy works in one process without MPI.
        comm = of_this_job() if comm is None else comm
        if comm is not None and comm.num_nodes > 1:
            raise ValueError(
                f"MirroredStrategy: the ranks are on several nodes, expected 1, got "
                f"{comm.num_nodes}; use MultiWorkerMirroredStrategy"
            )
        super().__init__(devices, comm, communication_options, soft_placement=soft_placement)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training: every rank holds all variables and computes on its part of a batch.

    Variables start with rank 0's values. Gradients are averaged over all replicas before each
    update, so all copies stay bitwise equal.

    Args:
        comm: the ranks that train together; the whole job if None. *Collective* over them.
        devices: devices of each rank, one replica each; "/cpu:0" if None.
        communication_options: how ranks exchange arrays.
        soft_placement: use CPU devices for missing ones.

    Raises:
        ValueError: a device does not exist; on all ranks.
        MismatchError: ranks have different numbers of devices; on all ranks.
    """

    def __init__(
        self,
        comm: cc.Communicator | None = None,
        *,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
        soft_placement: bool = False,
    ) -> None:
        # `cc.init` instead of `of_this_job`: this strategy always has a communicator.
        self.comm = extend.comm_or_world(comm, type(self).__name__)
        super().__init__(devices, self.comm, communication_options, soft_placement=soft_placement)


class CentralStorageStrategy(Strategy):
    """Synchronous training in which rank 0 updates the variables and broadcasts them.

    The optimizer's state exists once, on rank 0, where its `step` and state are usable. The
    replicas of one process share its variables.

    Args:
        devices: devices of each rank that compute; "/cpu:0" if None.
        comm: the ranks; None for those of the job, without MPI for one process. *Collective*.
        communication_options: how ranks exchange arrays.
        soft_placement: use CPU devices for missing ones.

    Raises:
        ValueError: a device does not exist; on all ranks.
    """

    updates_everywhere = False

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        comm: cc.Communicator | None = None,
        communication_options: CommunicationOptions | None = None,
        soft_placement: bool = False,
    ) -> None:
        comm = of_this_job() if comm is None else comm
        super().__init__(devices, comm, communication_options, soft_placement=soft_placement)

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
        # It would average a second time, and update on ranks that do not own the state.
        if isinstance(optimizer, AveragingOptimizer):
            raise TypeError(
                "apply_gradients: a DistributedOptimizer updates on every rank, expected the "
                "optimizer itself, which is used on rank 0"
            )
        super().apply_gradients(optimizer, grads_and_vars, examples=examples)

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change the variables on rank 0, and broadcast them; *collective*."""
        # Other ranks wait here, and get the error if the update fails.
        self.ranks.run_then_agree("update", change if self.is_chief else lambda: None)
        for variable in variables:
            if isinstance(variable, Variable):
                # All devices of a process get the chief's value.
                variable.fill(self.ranks.broadcast_from_chief(variable.components[0]))
            else:
                # A plain array has no `fill`; it is changed in place.
                variable[...] = np.asarray(self.ranks.broadcast_from_chief(variable))
