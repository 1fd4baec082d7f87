"""Mirrored, multi-worker mirrored and central-storage strategies.

One replica (default, one device), several on a machine (mirrored) or on many (multi-worker), and
variables that one rank updates for all (central storage).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import collectives as cc
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
    """One replica in this process, and nothing to communicate."""

    def __init__(self) -> None:
        super().__init__()


_default = DefaultStrategy()
_default_replica = ReplicaContext(_default, 0)


def get_strategy() -> Strategy:
    """Return the strategy whose scope or replica this thread is in, or the default one."""
    top = context.current()
    strategy = _default if top is None else top.strategy
    assert isinstance(strategy, Strategy)
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """Return what the replica that runs in this thread can ask for; None between replicas.

    Outside of any scope this is the only replica of the default strategy.
    """
    top = context.current()
    return _default_replica if top is None else top.replica


def in_cross_replica_context() -> bool:
    """Tell whether this thread is in a strategy's scope and outside of its replicas."""
    return get_replica_context() is None


class OneDeviceStrategy(Strategy):
    """Keep variables and computation on one device; to debug a program, or to compare with.

    Args:
        device: one of `strategies.devices()`, such as "/gpu:1".
        soft_placement: take the CPU if there is no such device.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str = "/cpu:0", *, soft_placement: bool = False) -> None:
        super().__init__([device], soft_placement=soft_placement)


class MirroredStrategy(Strategy):
    """Synchronous training on one node; every rank holds all variables.

    Works without MPI where there is only this process, which may have several devices.

    Args:
        devices: of each rank, a replica on each; "/cpu:0" if None.
        comm: the ranks, all on one node; those of the job if None. *Collective* over them.
        communication_options: how ranks exchange arrays.
        soft_placement: take CPUs in place of devices that there are not.

    Raises:
        ValueError: no such devices, or ranks on several nodes; on all ranks.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        comm: cc.Communicator | None = None,
        communication_options: CommunicationOptions | None = None,
        soft_placement: bool = False,
    ) -> None:
        comm = of_this_job() if comm is None else comm
        if comm is not None and comm.num_nodes > 1:
            raise ValueError(
                f"MirroredStrategy: the ranks are on several nodes, expected 1, got "
                f"{comm.num_nodes}; use MultiWorkerMirroredStrategy"
            )
        super().__init__(devices, comm, communication_options, soft_placement=soft_placement)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training: every rank holds all variables and computes on its part of a batch.

    Variables start from rank 0's values. Gradients are averaged over all replicas before each
    update, so that all copies stay equal to the last bit.

    Args:
        comm: the ranks that train together; the whole job if None. *Collective* over them.
        devices: of each rank, a replica on each; "/cpu:0" if None.
        communication_options: how ranks exchange arrays.
        soft_placement: take CPUs in place of devices that there are not.

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
        soft_placement: bool = False,
    ) -> None:
        self.comm = cc.init() if comm is None else comm
        super().__init__(devices, self.comm, communication_options, soft_placement=soft_placement)


class CentralStorageStrategy(Strategy):
    """Synchronous training in which rank 0 alone updates the variables and gives them to all.

    What the optimizer keeps for each variable exists once, on rank 0; its `step` and its state are
    of use there only. The replicas of one process share its variables as they are.

    Args:
        devices: that compute, of each rank; "/cpu:0" if None.
        comm: the ranks; those of the job if None, without MPI if there is one. *Collective*.
        communication_options: how ranks exchange arrays.
        soft_placement: take CPUs in place of devices that there are not.

    Raises:
        ValueError: no such devices; on all ranks.
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
        if isinstance(optimizer, AveragingOptimizer):
            raise TypeError(
                "apply_gradients: a DistributedOptimizer updates on every rank, expected the "
                "optimizer itself, which is used on rank 0"
            )
        super().apply_gradients(optimizer, grads_and_vars, examples=examples)

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change the variables on rank 0, and copy them to the others; *collective*."""
        self.ranks.run_then_agree("update", change if self.is_chief else lambda: None)
        for variable in variables:
            if isinstance(variable, Variable):
                variable.fill(self.ranks.broadcast_from_chief(variable.components[0]))
            else:
                variable[...] = np.asarray(self.ranks.broadcast_from_chief(variable))
