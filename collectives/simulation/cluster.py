"""Simulated cluster: machines, links, noise and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collectives.algorithms.cost_model import RankLayout
from collectives.core import topology
from collectives.core.links import DEFAULT, Machine
from collectives.simulation.cpu_scheduler import WaitingRank, WaitKinds

__all__ = ["SimulatedCluster", "check_spread"]

# How ranks wait on shared cores of an AMD EPYC (`benchmarks/shared_host.py`). 200 polls take 79 to
# 82 us from Python and 59 in eager messages; 2,000 pauses of the node engine take 46 us. A look
# takes 3.3 to 4.9 us with 2 to 8 ranks per core. A rank resumes 8 us after it gets the core back
# with two ranks on it, and 36 with eight. The 20 in between, and the values for eager messages and
# the engine, are fitted to all-reduces of 4 to 16 ranks on two cores (`benchmarks/model.py`).
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

# Seconds of a core per byte over TCP, for each program: 0.3 ns on unshaped lines. On lines of 1
# Gbit/s, where bytes travel in smaller parts, 0.5 to 1 fitted the times of whole arrays on one day.
# On another day 1.0 to 1.1 were measured with two machines on two cores, 1.4 to 1.5 with four and
# 1.8 to 2.0 with eight; on a Zen 3 2.3 to 2.5 with two (`benchmarks/model.py`).
COPYING = 7e-10

# Standard deviations over the mean for which gamma distributions can be sampled.
_LEAST_SPREAD, _MOST_SPREAD = 1e-6, 100.0


def check_spread(what: str, spread: float) -> None:
    """Raise `ValueError` unless a standard deviation over a mean is usable."""
    if spread != 0 and not _LEAST_SPREAD <= spread <= _MOST_SPREAD:
        raise ValueError(
            f"{what}: expected 0, or {_LEAST_SPREAD:g} to {_MOST_SPREAD:g}, got {spread:g}"
        )


@dataclass(frozen=True)
class SimulatedCluster:
    """Ranks spread evenly over nodes, one node after the other.

    Every node has a line out and a line in, each with the network's `beta`. Of the network's
    `alpha`, the two programs of a message take as much as inside a node, in equal parts; the rest
    is latency. A byte that is combined costs `gamma` of the network if there are several nodes.

    Args:
        size: number of ranks.
        num_nodes: number of nodes, at most `size`.
        machine: costs of the links, as `tune` measures them.
        nodes_per_switch: nodes below one switch, with a line up and one down; None for a single
            switch without limits.
        oversubscription: bandwidth of a switch's nodes over the bandwidth of its line up.
        burst: bytes that pass a node's line at once after it was idle for their time, as with a
            token bucket; full at the start.
        cores: cores of a host, shared by its ranks; None if every rank has a core of its own.
        nodes_per_host: nodes that share the cores of one host, as containers do.
        waits: how ranks wait on shared cores; None for the settings of `init` (`launch`): if the
            ranks of a node fill its cores, MPI yields the core in each look.
        copying: core seconds per byte between nodes, for each of the two programs, if cores are
            shared; otherwise copying overlaps with the line.
        together: seconds per such byte of all cores of a host if all of its nodes send while their
            programs wait; None for `copying` spread over the cores.
        noise: standard deviation over the mean of all times except those of lines.
        seed: seed of the noise.
        slow: rank -> factor by which its program is slower.
        deaths: rank -> seconds after which it dies.

    Raises:
        ValueError: a number is out of range.
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
        RankLayout(self.size, self.num_nodes)  # checks ranks and nodes
        for what, number in (
            ("nodes below a switch", self.nodes_per_switch),
            ("cores", self.cores),
            ("nodes on a host", self.nodes_per_host),
        ):
            if number is not None and number < 1:
                raise ValueError(f"cluster: expected one or more {what}, got {number}")
        if self.burst < 0:
            raise ValueError(f"cluster: expected a burst of 0 or more bytes, got {self.burst}")
        for name, value in (
            # Factors of 0 or infinity would stop the clock.
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
        # Results need a rank that ends.
        if len(self.deaths) == self.size:
            raise ValueError(f"cluster: expected a surviving rank, but all {self.size} ranks die")

    @property
    def layout(self) -> RankLayout:
        """The layout that "auto" and the cost model use."""
        return RankLayout(self.size, self.num_nodes, self.machine)

    @property
    def waiting(self) -> WaitKinds:
        """How ranks wait on shared cores."""
        if self.waits is not None:
            return self.waits
        # As `launch` sets MPI's yielding.
        fills = self.cores is not None and self.layout.per_node >= self.cores
        return YIELDING if fills else POLLING

    @property
    def carrying(self) -> float:
        """Seconds per byte of all cores of a host, for one of its two programs."""
        if self.together is not None:
            return self.together
        # A byte is copied by one core, so all cores together are faster.
        return 0.0 if self.cores is None else self.copying / self.cores

    def leaders(self) -> tuple[int, ...]:
        """Return the lowest rank of every rank's node."""
        # The rule of `chunk_bounds`: larger nodes first.
        bounds = topology.chunk_bounds(self.size, self.num_nodes)
        return tuple(
            begin for begin, end in zip(bounds, bounds[1:], strict=False) for _ in range(begin, end)
        )

    def nodes(self) -> list[int]:
        """Return the number of every rank's node."""
        bounds = topology.chunk_bounds(self.size, self.num_nodes)
        return [n for n in range(self.num_nodes) for _ in range(bounds[n], bounds[n + 1])]
