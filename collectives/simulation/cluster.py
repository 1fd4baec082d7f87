"""What is simulated: machines, the lines between them, and what goes wrong there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collectives import topology
from collectives.algorithms.layout import Layout
from collectives.links import DEFAULT, Machine

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """Nodes of as equal numbers of ranks as possible, one node after the other.

    Every node has a line out and a line in, each of the network's `beta`. Of the network's `alpha`
    a message costs its two programs as much as one inside a node does, in equal parts, and the rest
    is the way. A byte that is combined costs `gamma` of the network where there is one.

    Args:
        size: ranks.
        num_nodes: nodes, at most as many as there are ranks.
        machine: what the links cost, as `tune` measures it.
        nodes_per_switch: nodes below one switch, with a line up and one down; None for one switch
            that nobody notices.
        oversubscription: how much more its nodes may send than its line up takes.
        burst: bytes that a node's line lets pass at once after it was idle for their time, as lines
            that a token bucket shapes do; at first it has none.
        noise: standard deviation of every time but that of the lines, over its mean.
        seed: of the noise.
        slow: rank -> factor by which its program takes longer.
        deaths: rank -> seconds after which it is dead.

    Raises:
        ValueError: a number makes no sense.
    """

    size: int
    num_nodes: int
    machine: Machine = DEFAULT
    nodes_per_switch: int | None = None
    oversubscription: float = 1.0
    burst: int = 0
    noise: float = 0.0
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)
    deaths: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Layout(self.size, self.num_nodes)  # has the same ranks and nodes
        if self.nodes_per_switch is not None and self.nodes_per_switch < 1:
            raise ValueError(
                f"cluster: expected one or more nodes below a switch, got {self.nodes_per_switch}"
            )
        if self.burst < 0:
            raise ValueError(f"cluster: expected a burst of 0 or more bytes, got {self.burst}")
        for name, value, least in (
            ("oversubscription", self.oversubscription, 0.0),
            ("noise", self.noise, -1.0),
            *((f"slowness of rank {rank}", factor, 0.0) for rank, factor in self.slow.items()),
        ):
            if not least < value < float("inf"):
                raise ValueError(f"cluster: expected another {name}, got {value:g}")
        if self.noise < 0:
            raise ValueError(f"cluster: expected noise >= 0, got {self.noise:g}")
        for rank in (*self.slow, *self.deaths):
            if not 0 <= rank < self.size:
                raise ValueError(f"cluster: expected ranks below {self.size}, got rank {rank}")

    @property
    def layout(self) -> Layout:
        """What "auto" and the closed forms see of it."""
        return Layout(self.size, self.num_nodes, self.machine)

    def leaders(self) -> tuple[int, ...]:
        """Return the lowest rank of every rank's node."""
        bounds = topology.chunk_bounds(self.size, self.num_nodes)
        return tuple(
            begin for begin, end in zip(bounds, bounds[1:], strict=False) for _ in range(begin, end)
        )

    def nodes(self) -> list[int]:
        """Return the number of every rank's node."""
        bounds = topology.chunk_bounds(self.size, self.num_nodes)
        return [n for n in range(self.num_nodes) for _ in range(bounds[n], bounds[n + 1])]
