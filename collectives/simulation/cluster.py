"""Simulated cluster: machines, links, noise and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collectives.algorithms.cost_model import RankLayout
from collectives.core import topology
from collectives.core.links import DEFAULT, Machine
from collectives.simulation.cpu_scheduler import WaitingRank, WaitKinds

__all__ = ["SimulatedCluster", "check_spread"]

# How ranks wait that share the cores of an AMD EPYC (`benchmarks/shared_host.py`): 200 polls take
# 79 to 82 us from Python and 59 in eager messages, 2,000 pauses of the node engine 46; a look
# takes 3.3 to 4.9 us among 2 to 8 ranks of a core. A rank goes on 8 us after it has the core back
# with two on it, and 36 with eight. 20 between them, and what eager messages and the engine take
# there, fit all-reduces of 4 to 16 ranks on two cores (`benchmarks/model.py`).
POLLING = WaitKinds(
    python=WaitingRank(polls=8e-5, look=4e-6, resume=8e-6),
    eager=WaitingRank(polls=6e-5, look=4e-6, resume=4e-6),
    engine=WaitingRank(polls=4.6e-5, look=4e-6, resume=1.2e-5),
)
YIELDING = WaitKinds(
    python=WaitingRank(polls=0.0, look=4e-6, resume=2e-5),
    eager=WaitingRank(polls=0.0, look=4e-6, resume=1.2e-5),
    engine=WaitingRank(polls=4.6e-5, look=4e-6, resume=2.5e-5),
)

# Seconds of a core for a byte over TCP, of each program: 0.3 ns where nothing shapes the lines.
# Over lines of 1 Gbit/s bytes go in smaller parts: 0.5 to 1 fitted the times of whole arrays on one
# day, on another 1.0 to 1.1 were measured with two machines on two cores, 1.4 to 1.5 with four and
# 1.8 to 2.0 with eight; on a Zen 3 2.3 to 2.5 with two of any (`benchmarks/model.py`).
COPYING = 7e-10

# Standard deviations over a mean for which a gamma distribution can be drawn from.
_LEAST_SPREAD, _MOST_SPREAD = 1e-6, 100.0


def check_spread(what: str, spread: float) -> None:
    """Refuse a standard deviation over a mean that makes no sense."""
    if spread != 0 and not _LEAST_SPREAD <= spread <= _MOST_SPREAD:
        raise ValueError(
            f"{what}: expected 0, or {_LEAST_SPREAD:g} to {_MOST_SPREAD:g}, got {spread:g}"
        )


@dataclass(frozen=True)
class SimulatedCluster:
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
            that a token bucket shapes do; at first it has all of them.
        cores: of a host, which its ranks share; None if every rank has one of its own.
        nodes_per_host: nodes that share the cores of one host, as containers do.
        waits: how ranks that share cores wait; None for as `init` lets them (`launch`): where the
            ranks of a node fill its cores, MPI gives the core away in each look.
        copying: seconds of a core that a byte between nodes costs each of its two programs, where
            cores are shared; elsewhere it is done while the byte before is on the line.
        together: seconds that such a byte takes of all cores of a host, where all of its nodes send
            and their programs wait beside that; None for `copying` spread over the cores.
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
    waits: WaitKinds | None = None
    copying: float = COPYING
    together: float | None = None
    noise: float = 0.0
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)
    deaths: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        RankLayout(self.size, self.num_nodes)  # has the same ranks and nodes
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
        for name, value in (
            ("oversubscription", self.oversubscription),
            *((f"slowness of rank {rank}", factor) for rank, factor in self.slow.items()),
        ):
            if not 0 < value < float("inf"):
                raise ValueError(f"cluster: {name} must be positive, got {value:g}")
        check_spread("cluster: noise", self.noise)
        if self.seed < 0:
            raise ValueError(f"cluster: expected a seed of 0 or more, got {self.seed}")
        for name, value in (
            ("copying", self.copying),
            ("together", self.together or 0.0),
            *((f"{who}'s {what}", seconds) for who, how in self.waiting._asdict().items()
              for what, seconds in how._asdict().items()),
        ):  # fmt: skip
            if not 0 <= value < float("inf"):
                raise ValueError(f"cluster: expected {name} >= 0, got {value:g}")
        for rank in (*self.slow, *self.deaths):
            if not 0 <= rank < self.size:
                raise ValueError(f"cluster: expected ranks below {self.size}, got rank {rank}")
        if len(self.deaths) == self.size:
            raise ValueError(f"cluster: expected a rank that lives, of {self.size} all are to die")

    @property
    def layout(self) -> RankLayout:
        """What "auto" and the closed forms see of it."""
        return RankLayout(self.size, self.num_nodes, self.machine)

    @property
    def waiting(self) -> WaitKinds:
        """How ranks that share cores wait."""
        if self.waits is not None:
            return self.waits
        fills = self.cores is not None and self.layout.per_node >= self.cores
        return YIELDING if fills else POLLING

    @property
    def carrying(self) -> float:
        """Seconds that a byte takes of all cores of a host, for one of its two programs."""
        if self.together is not None:
            return self.together
        return 0.0 if self.cores is None else self.copying / self.cores

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
