"""Alpha-beta-gamma cost model of one step, and the layout of ranks over nodes.

Beside each algorithm stands the time that it should take, a closed form of alpha, beta and gamma
(`ring.allreduce_seconds`). A link costs `alpha` seconds for a message (of both ranks' programs,
too), `beta` seconds for a byte and `gamma` seconds for a byte that is combined with another. There
are three (`collectives.core.links`): the node engine's shared memory, messages inside a node, and
messages between nodes.

Ranks are placed node by node, P/N = k on each of N nodes, P ranks in all. A step of an algorithm is
as slow as its slowest link. Messages of several ranks of a node at once share the node's link to
the network, in either direction; this sharing is the main difference among algorithms.

Chunks go in slices that follow one another, so a long message costs its bytes and one alpha, and
combining overlaps with it. On fast links the programs take the time: a message costs each of the
two half of a node's alpha. The figures are for choosing and for planning, within a factor of two;
`python -m collectives tune` compares them with measurements.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from collectives.core.links import DEFAULT, LinkCost, Machine

__all__ = ["RankLayout"]


@dataclass(frozen=True)
class RankLayout:
    """What "auto" goes by: how the ranks of a group are spread, and what their links cost.

    Equal on all ranks, so that all pick the same algorithm.

    Args:
        size: how many ranks there are.
        num_nodes: on how many nodes, as evenly as possible.
        machine: the links, as the ranks have agreed on them.

    Attributes:
        picks: what `selection` has found for it, operation -> sizes and names.

    Raises:
        ValueError: there are not as many ranks as nodes, or none at all.
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

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, and several ranks on some of them."""
        return 1 < self.num_nodes < self.size

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        return -(-self.size // self.num_nodes)

    @property
    def call(self) -> float:
        """Seconds of Python that a call takes whose array goes by messages of its own."""
        return (self.machine.network if self.num_nodes > 1 else self.machine.node).call

    def links(self) -> list[tuple[LinkCost, float, int]]:
        """Return the links that neighbours of all kinds use.

        Returns:
            For each the link, the seconds that a message costs either of its programs, and how
            many ranks of a node share the line.
        """
        node, network = self.machine.node, self.machine.network
        found = []
        if self.num_nodes > 1:
            found.append((network, self.machine.between, self.per_node))
        if self.per_node > 1:
            found.append((node, self.machine.inside, 1))
        return found

    def round(self, nbytes: float, *, messages: int, at_once: int = 1, gamma: float = 0.0) -> float:
        """Return the time in which a rank sends, receives and combines some bytes.

        Args:
            nbytes: that it sends, and receives.
            messages: in which they go; each is combined while the next ones are on their way.
            at_once: how many ranks of a node send over its link to the network.
            gamma: seconds for a byte that is combined.
        """
        times = [0.0]
        work = nbytes * gamma
        for link, programs, most in self.links():
            line = min(at_once, most) * nbytes * link.beta + work / messages
            times.append(link.alpha + max(line, 2 * (messages - 1) * programs + work))
        return max(times)

    def step(self, nbytes: float, *, at_once: int = 1, messages: int = 1) -> float:
        """Return the time of a step in which messages go between neighbours of all kinds.

        Args:
            nbytes: that a rank sends.
            at_once: how many ranks of a node send over its link to the network.
            messages: in which a rank's bytes go; each but the first costs what the programs do.
        """
        node, network = self.machine.node, self.machine.network
        times = [0.0]
        more = (messages - 1) * node.alpha
        if self.num_nodes > 1:
            times.append(network.alpha + more + at_once * nbytes * network.beta)
        if self.per_node > 1:
            times.append(node.alpha + more + nbytes * node.beta)
        return max(times)

    def compiled(self) -> RankLayout:
        """Return the same ranks with links as cheap as small messages of compiled code are."""
        node, network = self.machine.node.compiled(), self.machine.network.compiled()
        return replace(self, machine=self.machine._replace(node=node, network=network))

    def combined(self, nbytes: float) -> float:
        """Return the time to combine bytes with others that came over the longest way there is."""
        return nbytes * (self.machine.network if self.num_nodes > 1 else self.machine.node).gamma
