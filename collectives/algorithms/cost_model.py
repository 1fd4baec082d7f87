"""Alpha-beta-gamma cost model of one step, and the layout of ranks over nodes.

Each algorithm has a function for its expected time, a closed form of alpha, beta and gamma
(`ring.allreduce_seconds`). A link costs `alpha` seconds per message (including both programs'
work), `beta` seconds per byte, and `gamma` seconds per byte that is combined with another. There
are three links (`collectives.core.links`): shared memory of the node engine, messages inside a
node, and messages between nodes.

Ranks are placed node by node, P/N = k on each of N nodes, P ranks in all. A step is as slow as its
slowest link. Concurrent messages of a node's ranks share the node's link in either direction; this
sharing is the main difference among algorithms.

Slices of a chunk follow one another, so a long message costs its bytes and one alpha, and combining
overlaps with it. On fast links the programs dominate: a message costs each of the two half of a
node's alpha. The estimates are for choosing and planning, within a factor of two; `python -m
collectives tune` compares them with measurements.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from collectives.core.errors import counted
from collectives.core.links import DEFAULT, LinkCost, Machine

__all__ = ["RankLayout"]


@dataclass(frozen=True)
class RankLayout:
    """Distribution of a group's ranks over nodes, and the cost of their links.

    Equal on all ranks, so that "auto" picks the same algorithm on all of them.

    Args:
        size: number of ranks.
        num_nodes: number of nodes; the ranks are spread as evenly as possible.
        machine: costs of the links, as agreed by the ranks.

    Attributes:
        picks: cache of `selection`, operation -> sizes and names.

    Raises:
        ValueError: there are more nodes than ranks, or no nodes.
    """

    size: int
    num_nodes: int = 1
    machine: Machine = DEFAULT
    picks: dict[str, tuple[Sequence[int], Sequence[str]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.size:
            raise ValueError(
                f"layout: expected 1 <= nodes <= ranks, got {self.num_nodes} nodes, "
                f"{self.size} ranks"
            )

    def __str__(self) -> str:
        return f"{counted(self.size, 'rank')} on {counted(self.num_nodes, 'node')}"

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, and some node has several ranks."""
        return 1 < self.num_nodes < self.size

    @property
    def per_node(self) -> int:
        """Number of ranks of the fullest node."""
        return -(-self.size // self.num_nodes)

    @property
    def call(self) -> float:
        """Seconds of Python per call whose array is sent by messages of its own."""
        return (self.machine.network if self.num_nodes > 1 else self.machine.node).call

    def links(self) -> list[tuple[LinkCost, float, int]]:
        """Return the links between neighbours.

        Returns:
            (link, seconds that a message costs each of its programs, ranks of a node that share the
            line) for each kind of link.
        """
        node, network = self.machine.node, self.machine.network
        found = []
        if self.num_nodes > 1:
            found.append((network, self.machine.between, self.per_node))
        if self.per_node > 1:
            found.append((node, self.machine.inside, 1))
        return found

    def round(self, nbytes: float, *, messages: int, at_once: int = 1, gamma: float = 0.0) -> float:
        """Return the time in which a rank sends, receives and combines `nbytes`.

        Args:
            nbytes: bytes that it sends, and bytes that it receives.
            messages: number of messages; one is combined while the next are in flight.
            at_once: number of ranks of a node that share its link to the network.
            gamma: seconds per byte that is combined.
        """
        times = [0.0]
        work = nbytes * gamma
        # Neighbours may be on the same node or on two nodes, so both kinds of links count.
        for link, programs, most in self.links():
            # Ranks of a node send at once only over the network; `most` is 1 inside a node.
            line = min(at_once, most) * nbytes * link.beta + work / messages
            # The programs' time, or the line if it is slower: both overlap in all messages but the
            # first.
            times.append(link.alpha + max(line, 2 * (messages - 1) * programs + work))
        return max(times)

    def step(self, nbytes: float, *, at_once: int = 1, messages: int = 1) -> float:
        """Return the time of a step with messages between all neighbours.

        Args:
            nbytes: bytes that a rank sends.
            at_once: number of ranks of a node that share its link to the network.
            messages: number of messages; each but the first costs only the programs' time.
        """
        node, network = self.machine.node, self.machine.network
        times = [0.0]
        # Python starts messages one after the other.
        more = (messages - 1) * node.alpha
        if self.num_nodes > 1:
            times.append(network.alpha + more + at_once * nbytes * network.beta)
        if self.per_node > 1:
            times.append(node.alpha + more + nbytes * node.beta)
        return max(times)

    def compiled(self) -> RankLayout:
        """Return the layout with the link costs of small messages from compiled code."""
        node, network = self.machine.node.compiled(), self.machine.network.compiled()
        return replace(self, machine=self.machine._replace(node=node, network=network))

    def combined(self, nbytes: float) -> float:
        """Return the time to combine bytes that arrived over the slowest link."""
        return nbytes * (self.machine.network if self.num_nodes > 1 else self.machine.node).gamma
