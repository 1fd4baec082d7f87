"""Simulated intra-node stages, with the node engine's modelled time.

Ranks of a node enter a stage at different times. When the last one has entered, the stage updates
their buffers, and each rank works for the seconds of the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.algorithms import hierarchical
from collectives.algorithms.cost_model import RankLayout
from collectives.algorithms.hierarchical import Levels
from collectives.arrays import reduction
from collectives.arrays.reduction import Op
from collectives.simulation.clock import EventClock, SimulatedRank
from collectives.transport.backoff import CompletedWait, describe_ranks
from collectives.transport.transport import Deadline

__all__ = ["Node", "in_node"]


class Node:
    """The ranks of one node, and which of them have entered the present stage.

    Args:
        clock: clock of all ranks.
        ranks: ranks of the node, by local rank.
        payload: whether buffers have contents.
    """

    def __init__(self, clock: EventClock, ranks: Sequence[SimulatedRank], *, payload: bool) -> None:
        self.layout: RankLayout = clock.cluster.layout
        self._waiting = clock.cluster.waiting.engine
        self.payload = payload
        self._clock = clock
        self._ranks = ranks
        self._come: dict[int, Any] = {}  # local rank -> its buffer, of ranks that have entered

    def meet(
        self,
        local_rank: int,
        brought: Any,
        seconds: float,
        combine: Callable[[list[Any]], None],
        operation: str,
    ) -> None:
        """Wait for all ranks of the node, and then work for `seconds`.

        Args:
            local_rank: the rank that enters.
            brought: its buffer.
            seconds: work of each rank after the last one has entered.
            combine: updates all buffers, by local rank; called once, and only with contents.
            operation: name for errors.
        """
        self._come[local_rank] = brought
        own = self._ranks[local_rank]
        # The last rank to enter runs on; it wakes the others.
        if len(self._come) == len(self._ranks):
            if self.payload:
                # In the order of local ranks, as the node engine combines.
                combine([self._come[rank] for rank in range(len(self._ranks))])
            self._come = {}
            # Ranks ahead of the clock may be later than this one.
            start = max(rank.now for rank in self._ranks)
            own.now = start
            for rank in self._ranks:
                if rank is not own:
                    self._clock.at(start, self._wake, rank)
            # Each rank works after the stage has begun.
            own.advance(seconds)
            return
        missing = [rank.number for n, rank in enumerate(self._ranks) if n not in self._come]
        own.wait(
            CompletedWait(f"{describe_ranks(missing)} to enter", missing, has_come=False),
            operation,
            self._waiting,
        )
        own.advance(seconds)

    def _wake(self, rank: SimulatedRank) -> None:
        if rank.waits_for is not None:  # else it has died, or raised an error
            rank.wake(self._clock.now)


def in_node(levels: Levels, node: Node) -> Levels:
    """Return levels whose stages inside this rank's node are simulated."""
    own = levels.node.rank
    return levels._replace(
        reduce_scatter=partial(_reduce_scatter, node, own),
        allgather=partial(_allgather, node, own),
        broadcast=partial(_broadcast, node, own),
        barrier=partial(_barrier, node, own),
    )


def _reduce_scatter(
    node: Node, own: int, buffer: Any, bounds: Sequence[int], op: Op, deadline: Deadline
) -> None:
    """Reduce this rank's chunk, in place, in the order of local ranks."""
    function = getattr(np, reduction.RULES[op].function)

    def combine(buffers: list[Any]) -> None:
        for rank, buffer in enumerate(buffers):
            chunk = slice(bounds[rank], bounds[rank + 1])
            # A copy, because the sum must not change the buffer of rank 0.
            total = buffers[0].view[chunk].copy()
            for other in buffers[1:]:
                with reduction.ignore_float_errors():
                    function(total, other.view[chunk], out=total)
            buffer.view[chunk] = total

    longest = _longest(bounds) * buffer.itemsize
    seconds = hierarchical.stage_seconds(buffer.nbytes, longest, node.layout)
    # `bounds` has one entry more than ranks, and the first chunk needs no addition.
    seconds += (len(bounds) - 2) * longest * node.layout.machine.shared.gamma
    node.meet(own, buffer, seconds, combine, deadline.operation)


def _allgather(
    node: Node, own: int, buffer: Any, bounds: Sequence[int], deadline: Deadline
) -> None:
    """Fill a buffer with every rank's own chunk."""

    def combine(buffers: list[Any]) -> None:
        for rank, source in enumerate(buffers):
            chunk = slice(bounds[rank], bounds[rank + 1])
            for other in buffers:
                _contents(other)[chunk] = _contents(source)[chunk]

    longest = _longest(bounds) * buffer.itemsize
    seconds = hierarchical.stage_seconds(buffer.nbytes, longest, node.layout)
    node.meet(own, buffer, seconds, combine, deadline.operation)


def _broadcast(node: Node, own: int, buffer: Any, root: int, deadline: Deadline) -> None:
    """Replace a buffer by the root's, in place."""

    def combine(buffers: list[Any]) -> None:
        for other in buffers:
            _contents(other)[:] = _contents(buffers[root])

    seconds = hierarchical.publish_seconds(buffer.nbytes, node.layout)
    node.meet(own, buffer, seconds, combine, deadline.operation)


def _barrier(node: Node, own: int, deadline: Deadline) -> None:
    """Wait until all ranks of the node have entered."""
    seconds = hierarchical.stage_seconds(0, 0, node.layout)
    node.meet(own, None, seconds, lambda buffers: None, deadline.operation)


def _contents(buffer: Any) -> Any:
    # Buffers of the simulation have a view; plain arrays are used by comparisons.
    return getattr(buffer, "view", buffer)


def _longest(bounds: Sequence[int]) -> int:
    return max(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
