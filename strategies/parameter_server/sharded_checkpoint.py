"""Sharded checkpoints: each ps task saves and loads its parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy.typing as npt

import collectives as cc
from collectives import extend
from strategies.checkpoint.boxes import Box, Slice
from strategies.cluster.cluster import Cluster
from strategies.core.process_group import ProcessGroup
from strategies.parameter_server import state_io
from strategies.parameter_server.server import ParameterServer
from strategies.parameter_server.variable import ServedVariable

__all__ = ["ShardedCheckpoint"]


class ShardedCheckpoint:
    """What this task saves and loads; nothing, if it is not a ps.

    Args:
        cluster: of the tasks.
        ranks: all of them.
        shard: what this ps holds, if it is one.
        variables: name -> variable, those that will be made as well.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: ProcessGroup,
        shard: ParameterServer | None,
        variables: Mapping[str, ServedVariable],
    ) -> None:
        servers = list(cluster.ranks_of("ps"))
        self._count = len(servers)
        self._index = servers.index(cluster.comm.rank) if shard is not None else 0
        self._comm = cluster.comm
        self._ranks = ranks
        self._shard = shard
        self._variables = variables

    def slices(self) -> dict[str, Slice]:
        """See `ParameterServerStrategy.state_slices`; *collective*."""
        # A ps waits here for the workers, which have received the replies to their updates.
        self._ranks.agree("state_slices")
        slices, updates = self._ranks.run_then_agree("state_slices: collect", self._state_of_ps)
        is_synchronous = self._shard is not None and self._shard.rules.synchronous
        gathered = self._comm.allgather_object(updates if is_synchronous else None)
        by_rank = [(rank, count) for rank, count in enumerate(gathered) if count is not None]
        if len({count for _, count in by_rank}) > 1:
            counts = ", ".join(
                f"{count} on {extend.describe_ranks(self._comm, rank)}" for rank, count in by_rank
            )
            raise extend.collective_error(
                self._comm,
                cc.MismatchError(
                    f"state_slices: ps tasks are in different steps, expected no training "
                    f"meanwhile, got updates {counts}"
                ),
            )
        return slices

    def _state_of_ps(self) -> tuple[dict[str, Slice], int]:
        """Return the slices of this ps and its number of updates; empty and 0 on other tasks."""
        if self._shard is None:
            return {}, 0
        states, updates = self._shard.own_state()
        variables = self._variables.values()
        return state_io.slices(variables, states, self._index, self._count, updates), updates

    def boxes(self) -> dict[str, Box]:
        """See `ParameterServerStrategy.state_boxes`; *collective*."""
        slices, _ = self._ranks.run_then_agree("state_boxes", self._state_of_ps)
        own = {name: part.box for name, part in slices.items() if state_io.is_large(name, part)}
        known = self._comm.allgather_object({name: len(box.start) for name, box in own.items()})
        axes = {name: number for told in known for name, number in told.items()}
        return {name: own.get(name, Box((0,) * n, (0,) * n)) for name, n in sorted(axes.items())}

    def load(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """See `ParameterServerStrategy.load_state_slices`."""
        if self._shard is None:
            return
        like, _ = self._shard.own_state()
        states, updates = state_io.own_states(
            state, self._variables.values(), like, self._index, self._count
        )
        del like  # so that what changes now is not copied
        self._shard.load_own(states, updates)
