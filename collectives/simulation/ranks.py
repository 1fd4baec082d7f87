"""Run a function on all ranks of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from collectives.algorithms import hierarchical
from collectives.algorithms.hierarchical import Levels
from collectives.core.errors import CollectiveTimeout
from collectives.simulation.clock import NEVER, Clock, Rank
from collectives.simulation.cluster import Cluster
from collectives.simulation.memory import Memory
from collectives.simulation.stages import Node, in_node
from collectives.simulation.transport import EAGER_BYTES, Network, SimulatedTransport

__all__ = ["Access", "Ended", "first_error", "run"]


class Access(NamedTuple):
    """What a function on a simulated rank has.

    Attributes:
        transport: its messages to all ranks.
        levels: nodes and rails, with the engine's seconds inside the nodes; None where there are
            not several nodes with several ranks on some.
        memory: where its buffers are.
        letters: returns the same ranks with messages as cheap as those of compiled code.
    """

    transport: SimulatedTransport
    levels: Levels | None
    memory: Memory
    letters: Callable[[], Access]


class Ended(NamedTuple):
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
    cluster: Cluster,
    function: Callable[[Access], Any],
    *,
    payload: bool,
    eager: int = EAGER_BYTES,
    within: float = NEVER,
    progress: Callable[[int, float], None] | None = None,
) -> list[Ended]:
    """Call `function(access)` on every rank; all begin at the same time.

    Args:
        cluster: the ranks.
        function: what each of them does; it must not wait for anything but its messages.
        payload: whether messages and buffers have contents; without, only their lengths count.
        eager: bytes of the longest message that does not ask its receiver first; -1 if all do.
        within: real seconds that it may take.
        progress: as for `Clock.run`.

    Returns:
        In rank order.

    Raises:
        Stopped: as `Clock.run`.
        ImportError: greenlet is not installed.
    """
    clock = Clock(cluster)
    waits = cluster.waiting
    compiled = cluster.layout.compiled().machine
    networks = [
        Network(clock, machine, waiting, payload=payload, eager=eager)
        for machine, waiting in ((cluster.machine, waits.python), (compiled, waits.letters))
    ]
    gamma = cluster.layout.combined(1.0)
    several = cluster.layout.is_hierarchical
    leaders = cluster.leaders()
    nodes: dict[int, Node] = {}

    def access(rank: Rank, network: Network) -> Access:
        transport = SimulatedTransport(network, rank)
        levels = None
        if several:
            levels = hierarchical.levels(transport, leaders, cluster.machine)
            if levels.node.size > 1:
                members = [clock.ranks[levels.node.number(r)] for r in range(levels.node.size)]
                node = nodes.setdefault(members[0].number, Node(clock, members, payload=payload))
                levels = in_node(levels, node)
        memory = Memory(rank, gamma, payload=payload)
        return Access(transport, levels, memory, partial(access, rank, networks[1]))

    def program(rank: Rank) -> Any:
        return function(access(rank, networks[0]))

    clock.run([partial(program, rank) for rank in clock.ranks], within, progress)
    return [
        Ended(rank.result, None if rank.died else rank.error, rank.died, rank.now)
        for rank in clock.ranks
    ]


def first_error(ended: Sequence[Ended]) -> BaseException | None:
    """Return what went wrong first, which may be why others wait in vain; None if all is well."""

    def order(rank: Ended) -> tuple[bool, float]:
        return isinstance(rank.error, CollectiveTimeout), rank.seconds  # told when all wait

    failed = [rank for rank in ended if rank.error is not None]
    return min(failed, key=order).error if failed else None
