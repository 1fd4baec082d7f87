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
    """What a function on a simulated rank has.

    Attributes:
        transport: its messages to all ranks.
        levels: nodes and rails, with the engine's seconds inside the nodes; None where there are
            not several nodes with several ranks on some.
        memory: where its buffers are.
        eager: returns the same ranks with messages as cheap as those of compiled code.
    """

    transport: SimulatedTransport
    levels: Levels | None
    memory: SimulatedMemory
    eager: Callable[[], RankContext]


class RankResult(NamedTuple):
    """How one rank has ended.

    Attributes:
        result: what its function returned.
        error: what it raised; None if nothing, or if it died.
        died: whether it died.
        seconds: on its clock.
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
    """Call `function(access)` on every rank; all begin at the same time.

    Args:
        cluster: the ranks.
        function: what each of them does; it must not wait for anything but its messages.
        payload: whether messages and buffers have contents; without, only their lengths count.
        eager: bytes of the longest message that does not ask its receiver first; -1 if all do.
        within: real seconds that it may take.
        progress: as for `EventClock.run`.

    Returns:
        In rank order.

    Raises:
        Stopped: as `EventClock.run`.
        ImportError: greenlet is not installed.
    """
    clock = EventClock(cluster)
    waits = cluster.waiting
    compiled = cluster.layout.compiled().machine
    networks = [
        SimulatedFabric(clock, machine, waiting, payload=payload, eager=eager)
        for machine, waiting in ((cluster.machine, waits.python), (compiled, waits.eager))
    ]
    gamma = cluster.layout.combined(1.0)
    several = cluster.layout.is_hierarchical
    leaders = cluster.leaders()
    nodes: dict[int, Node] = {}

    def access(rank: SimulatedRank, network: SimulatedFabric) -> RankContext:
        transport = SimulatedTransport(network, rank)
        levels = None
        if several:
            levels = hierarchical.levels(transport, leaders, cluster.machine)
            if levels.node.size > 1:
                members = [clock.ranks[levels.node.parent_rank(r)] for r in range(levels.node.size)]
                node = nodes.setdefault(members[0].number, Node(clock, members, payload=payload))
                levels = in_node(levels, node)
        memory = SimulatedMemory(rank, gamma, payload=payload)
        return RankContext(transport, levels, memory, partial(access, rank, networks[1]))

    def program(rank: SimulatedRank) -> Any:
        return function(access(rank, networks[0]))

    clock.run([partial(program, rank) for rank in clock.ranks], within, progress)
    return [
        RankResult(rank.result, None if rank.died else rank.error, rank.died, rank.now)
        for rank in clock.ranks
    ]


def first_error(ended: Sequence[RankResult]) -> BaseException | None:
    """Return what went wrong first, which may be why others wait in vain; None if all is well."""

    def order(rank: RankResult) -> tuple[bool, float]:
        return isinstance(rank.error, CollectiveTimeout), rank.seconds  # told when all wait

    failed = [rank for rank in ended if rank.error is not None]
    return min(failed, key=order).error if failed else None
