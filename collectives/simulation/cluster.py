"""What is simulated: machines, the lines between them, and what goes wrong there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collectives import topology
from collectives.algorithms.layout import Layout
from collectives.links import DEFAULT, Machine
from collectives.transport.waiting import POLLS

__all__ = ["Cluster"]

# Of two cores of an AMD EPYC on which 2 to 16 ranks in namespaces exchanged messages over TCP
# (`benchmarks/model.py`): 200 polls from Python take 100 us. From one process to the next, whose
# interpreter is then in nobody's cache, passes what fits the times of all-reduces best, of 3 to 30
# us; for letters 0.6 of the polls' time fitted better than 0.4.
POLL_SECONDS = 5e-7
CHANGE_SECONDS = 2.5e-5
LETTER_PATIENCE = 0.6


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
        cores: of a host, which its ranks share; None if every rank has one of its own.
        nodes_per_host: nodes that share the cores of one host, as containers do.
        patience: seconds that a rank which waits polls before it gives its core to another one.
            Compiled code, which polls as often, takes `LETTER_PATIENCE` of that.
        change: seconds from one rank on a core to the next one.
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
    cores: int | None = None
    nodes_per_host: int = 1
    patience: float = POLLS * POLL_SECONDS
    change: float = CHANGE_SECONDS
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
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"cluster: expected one or more cores, got {self.cores}")
        if self.nodes_per_host < 1:
            raise ValueError(
                f"cluster: expected one or more nodes on a host, got {self.nodes_per_host}"
            )
        if self.burst < 0:
            raise ValueError(f"cluster: expected a burst of 0 or more bytes, got {self.burst}")
        for name, value, least in (
            ("oversubscription", self.oversubscription, 0.0),
            ("noise", self.noise, -1.0),
            ("patience", self.patience, -1.0),
            ("change", self.change, -1.0),
            *((f"slowness of rank {rank}", factor, 0.0) for rank, factor in self.slow.items()),
        ):
            if not least < value < float("inf"):
                raise ValueError(f"cluster: expected another {name}, got {value:g}")
        for name in ("noise", "patience", "change"):
            if getattr(self, name) < 0:
                raise ValueError(f"cluster: expected {name} >= 0, got {getattr(self, name):g}")
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
