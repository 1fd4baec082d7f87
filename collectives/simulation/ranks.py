"""Runs a function on all ranks of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from collectives.algorithms import hierarchical
from collectives.algorithms.hierarchical import Levels
from collectives.core.errors import CollectiveTimeout
from collectives.simulation.clock import NEVER, EventClock, SimulatedRank
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.memory import SimulatedMemory
from collectives.simulation.stages import Node, in_node
from collectives.simulation.transport import EAGER_BYTES, SimulatedFabric, SimulatedTransport

__all__ = ["RankContext", "RankResult", "first_error", "run"]


class RankContext(NamedTuple):
    """Arguments of a function on a simulated rank.

    Attributes:
        transport: messages to all ranks.
        levels: nodes and rails, with modelled stages inside the nodes; None unless there are
            several nodes, some with several ranks.
        memory: memory for its buffers.
        eager: returns the same context with the message costs of compiled code.
    """

    transport: SimulatedTransport
    levels: Levels | None
    memory: SimulatedMemory
    eager: Callable[[], RankContext]


class RankResult(NamedTuple):
    """Outcome of one rank.

    Attributes:
        result: return value of the function.
        error: exception of the function; None if it raised none, or if the rank died.
        died: whether the rank died.
        seconds: end on its clock.
    """

    result: Any
    error: BaseException | None
    died: bool
    seconds: float


def run(
    cluster: SimulatedCluster,
    function: Callable[[RankContext], Any],
    *,
    payload: bool,
    eager: int = EAGER_BYTES,
    within: float = NEVER,
    progress: Callable[[int, float], None] | None = None,
) -> list[RankResult]:
    """Call `function(access)` on every rank, starting at the same time.

    Args:
        cluster: the ranks.
        function: program of a rank; it must wait for nothing but its messages.
        payload: whether messages and buffers have contents, or only lengths.
        eager: bytes of the longest eager message; -1 for none.
        within: limit in real seconds.
        progress: as for `EventClock.run`.

    Returns:
        outcomes in rank order.

    Raises:
        Stopped: as `EventClock.run`.
        ImportError: greenlet is not installed.
    """
    clock = EventClock(cluster)
    waits = cluster.waiting
    # Compiled code has its own costs of messages.
    compiled = cluster.layout.compiled().machine
    networks = [
        SimulatedFabric(clock, machine, waiting, payload=payload, eager=eager)
        for machine, waiting in ((cluster.machine, waits.python), (compiled, waits.eager))
    ]
    # The same cost for all bytes, as in the cost model.
    gamma = cluster.layout.combined(1.0)
    several = cluster.layout.is_hierarchical
    leaders = cluster.leaders()
    nodes: dict[int, Node] = {}

    def access(rank: SimulatedRank, network: SimulatedFabric) -> RankContext:
        transport = SimulatedTransport(network, rank)
        levels = None
        if several:
            levels = hierarchical.levels(transport, leaders, cluster.machine)
            # A node with one rank has no stages.
            if levels.node.size > 1:
                members = [clock.ranks[levels.node.parent_rank(r)] for r in range(levels.node.size)]
                # One object per node, shared by its ranks.
                node = nodes.setdefault(members[0].number, Node(clock, members, payload=payload))
                levels = in_node(levels, node)
        memory = SimulatedMemory(rank, gamma, payload=payload)
        # Lazily, because most programs send only one kind of messages.
        return RankContext(transport, levels, memory, partial(access, rank, networks[1]))

    def program(rank: SimulatedRank) -> Any:
        return function(access(rank, networks[0]))

    clock.run([partial(program, rank) for rank in clock.ranks], within, progress)
    return [
        # A death is an event of the simulation, not an error.
        RankResult(rank.result, None if rank.died else rank.error, rank.died, rank.now)
        for rank in clock.ranks
    ]


def first_error(ended: Sequence[RankResult]) -> BaseException | None:
    """Return the first error, the likely cause of later timeouts; None without errors."""

    def order(rank: RankResult) -> tuple[bool, float]:
        # Timeouts follow from the first failure.
        return isinstance(rank.error, CollectiveTimeout), rank.seconds  # raised when all wait

    failed = [rank for rank in ended if rank.error is not None]
    return min(failed, key=order).error if failed else None
