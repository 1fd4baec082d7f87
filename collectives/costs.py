"""How long an operation should take with each algorithm: closed forms of alpha, beta and gamma.

A link costs `alpha` seconds for a message (of both ranks' programs, too), `beta` seconds for a byte
and `gamma` seconds for a byte that is combined with another. There are three: the node engine's
shared memory, messages inside a node, and messages between nodes.

Ranks are placed node by node, P/N = k on each of N nodes, P ranks in all. A step of an algorithm is
as slow as its slowest link. Messages of several ranks of a node at once share the node's link to
the network, in either direction, which is what tells the algorithms apart:

| algorithm | allreduce of S bytes on one node | between nodes |
| --- | --- | --- |
| ring | 2 (P-1) a + S (P-1)/P (2 b + g) | one message per node in a step |
| tree | log P (2 a + S (2 b + g)) | one message per node and level |
| halving, up to 64 KiB | log P (a + S (b + g)) | up to k messages per node and round |
| halving, above | 2 log P a + S (P-1)/P (2 b + g) | up to k messages per node and round |
| hierarchical | - | inside the nodes; between N nodes S bytes per node |
| node | a + S b + (P-1) S g, above 64 KiB in slots | - |

Chunks go in slices that follow one another, so a long message costs its bytes and one alpha; rounds
overlap less than the model says where ranks outnumber cores. The figures are for choosing and for
planning, within a factor of two; `python -m collectives bench` measures.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from collectives import topology
from collectives.algorithms import halving, hierarchical, node, ring, tree

__all__ = ["DEFAULT", "OPERATIONS", "Link", "Machine", "Shape", "estimate", "pick"]


class Link(NamedTuple):
    """What one way of moving bytes costs."""

    alpha: float  # seconds per message
    beta: float  # seconds per byte moved
    gamma: float  # seconds per byte combined


class Machine(NamedTuple):
    """The links of a cluster."""

    shared: Link  # the node engine
    node: Link  # messages between ranks of a node
    network: Link  # messages between nodes; beta is that of a node's link, in either direction


# Measured on two cores of an AMD EPYC with Open MPI 5.0.11. `shared`: a planned all-reduce of two
# ranks takes 0.32 us for 8 bytes, 3.3 us for 64 KiB, 0.95 ms for 16 MiB. `node`: two ranks exchange
# 8 bytes in 3.1 us, 4 MiB in 0.22 to 0.48 ms. gamma: numpy.add of float32 in place, 16 MiB in
# 0.56 ms. `network`: the same exchange over a link shaped to 1 Gbit/s between two network
# namespaces, 8 bytes in 17 us, 4 MiB in 35.5 ms; a faster one needs figures of its own.
DEFAULT = Machine(
    shared=Link(alpha=3.2e-7, beta=2.3e-11, gamma=2.3e-11),
    node=Link(alpha=3.1e-6, beta=8e-11, gamma=3.3e-11),
    network=Link(alpha=1.7e-5, beta=8.5e-9, gamma=3.3e-11),
)


# A ring combines a slice while the next one travels; the rounds of a halving wait for one another.
# Between 4 nodes at 1 Gbit/s an all-reduce of 4 MiB takes 61 ms by halving, 54 ms around the ring.
_WAITING = 1.13


@dataclass(frozen=True)
class Shape:
    """How many ranks there are, on how many nodes, as evenly as possible.

    Raises:
        ValueError: there are not as many ranks as nodes, or none at all.
    """

    ranks: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(
                f"costs: expected 1 <= nodes <= ranks, got {self.nodes} nodes, {self.ranks} ranks"
            )

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        return -(-self.ranks // self.nodes)


def estimate(
    operation: str, nbytes: int, shape: Shape, machine: Machine = DEFAULT
) -> dict[str, float]:
    """Return the seconds that every algorithm should take, fastest first.

    MPI's own ("native") is not among them: what it does is its own choice. Neither are operations
    between ranks of one node by "hierarchical", and between nodes by "node".

    Args:
        operation: one of `OPERATIONS`.
        nbytes: S, of the whole array.
        shape: the ranks.
        machine: the links.

    Raises:
        ValueError: there is no model of the operation, or a negative size.
    """
    if operation not in _MODELS:
        raise ValueError(
            f"costs: no model of the operation, expected one of {' '.join(OPERATIONS)}, "
            f"got {operation!r}"
        )
    if nbytes < 0:
        raise ValueError(f"costs: expected bytes >= 0, got {nbytes}")
    models = _MODELS[operation]
    times = {}
    for name, model in models.items():
        if name == "hierarchical" and not 1 < shape.nodes < shape.ranks:
            continue
        if name == "node" and not 1 == shape.nodes < shape.ranks:
            continue
        times[name] = model(nbytes, shape, machine)
    return dict(sorted(times.items(), key=lambda item: item[1]))


def pick(operation: str, nbytes: int, shape: Shape, machine: Machine = DEFAULT) -> str:
    """Return the algorithm that should be the fastest; the first by name among equals."""
    times = estimate(operation, nbytes, shape, machine)
    return min(times, key=lambda name: (times[name], name))


def _step(nbytes: float, shape: Shape, machine: Machine, at_once: int = 1) -> float:
    """Return the time of a step in which messages go between neighbours of all kinds.

    Args:
        nbytes: of one message.
        shape: the ranks.
        machine: the links.
        at_once: how many ranks of a node send over its link to the network.
    """
    times = [0.0]
    if shape.nodes > 1:
        times.append(machine.network.alpha + at_once * nbytes * machine.network.beta)
    if shape.per_node > 1:
        times.append(machine.node.alpha + nbytes * machine.node.beta)
    return max(times)


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _ring_half(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of a ring's reduce-scatter, less the combining, or of its all-gather."""
    return (shape.ranks - 1) * _step(nbytes / shape.ranks, shape, machine)


def _combined(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time to combine what a rank receives when all share the work."""
    return nbytes * (shape.ranks - 1) / shape.ranks * machine.node.gamma


def _halving_half(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of a reduce-scatter by halving, less the combining."""
    waiting = _WAITING if nbytes >= ring.SLICE_BYTES * shape.ranks else 1.0
    rounds = topology.halving_reduce_scatter(0, shape.ranks)
    return waiting * sum(
        _far(nbytes * step.chunks / shape.ranks, min(step.dest, step.source), shape, machine)
        for step in rounds
    )


def _far(nbytes: float, distance: int, shape: Shape, machine: Machine) -> float:
    """Return the time of a round in which every rank sends to the one `distance` away."""
    return _step(nbytes, shape, machine, at_once=min(distance, shape.per_node))


def _ring_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    return 2 * _ring_half(nbytes, shape, machine) + _combined(nbytes, shape, machine)


def _halving_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    if nbytes > halving.DOUBLING_BYTES:
        return 2 * _halving_half(nbytes, shape, machine) + _combined(nbytes, shape, machine)
    levels = shape.ranks.bit_length() - 1
    times = [_far(nbytes, 1 << level, shape, machine) for level in range(levels)]
    if shape.ranks != 1 << levels:  # the others hand their part over before, and get it after
        times += 2 * [_far(nbytes, 1, shape, machine)]
    return sum(times) + len(times) * nbytes * machine.node.gamma


def _tree_levels(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time in which whole buffers pass all levels of a binomial tree."""
    inside = _levels(shape.per_node) if shape.per_node > 1 else 0
    between = _levels(shape.nodes)
    return between * (machine.network.alpha + nbytes * machine.network.beta) + inside * (
        machine.node.alpha + nbytes * machine.node.beta
    )


def _tree_reduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    levels = _levels(shape.ranks)
    return _tree_levels(nbytes, shape, machine) + levels * nbytes * machine.node.gamma


def _tree_broadcast(nbytes: float, shape: Shape, machine: Machine) -> float:
    if shape.ranks > 4 and nbytes >= tree.SCATTER_BYTES:
        return _tree_scatter(nbytes, shape, machine) + _ring_half(nbytes, shape, machine)
    return _tree_levels(nbytes, shape, machine)


def _tree_scatter(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of a scatter, or gather: every level carries half of the one above."""
    outside = _tree_levels(0, shape, machine)
    away = nbytes * (shape.nodes - 1) / shape.nodes * machine.network.beta
    inside = nbytes / shape.nodes * (shape.per_node - 1) / shape.per_node * machine.node.beta
    return outside + away + inside


def _tree_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    return _tree_reduce(nbytes, shape, machine) + _tree_broadcast(nbytes, shape, machine)


def _ring_broadcast(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Slices pass once around; the first needs P - 1 steps, the others follow."""
    slices = max(1, -(-int(nbytes) // ring.SLICE_BYTES))
    one = _step(nbytes / slices, shape, machine)
    return (shape.ranks - 1 + slices - 1) * one if shape.ranks > 1 else 0.0


def _inside(shape: Shape) -> Shape:
    return Shape(shape.per_node)


def _rail(nbytes: float, shape: Shape, machine: Machine) -> tuple[float, Shape, Machine]:
    """Return bytes, ranks and links of one rail, and as slow as all of them at once make it."""
    rails = 1 if nbytes <= hierarchical.ONE_RAIL_BYTES else shape.ranks // shape.nodes
    network = machine.network._replace(beta=machine.network.beta * rails)
    return nbytes / rails, Shape(shape.nodes, shape.nodes), machine._replace(network=network)


def _hierarchical_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    own, rail, links = _rail(nbytes, shape, machine)
    on_rail = min(f(own, rail, links) for f in (_ring_allreduce, _halving_allreduce))
    inside = min(f(nbytes, _inside(shape), machine) for f in (_ring_allreduce, _halving_allreduce))
    return inside + on_rail


def _hierarchical_broadcast(nbytes: float, shape: Shape, machine: Machine) -> float:
    own, rail, links = _rail(nbytes, shape, machine)
    on_rail = min(f(own, rail, links) for f in (_ring_broadcast, _tree_broadcast))
    first = _tree_broadcast(nbytes, _inside(shape), machine)
    last = min(f(nbytes, _inside(shape), machine) for f in (_ring_half, _halving_half))
    return first + on_rail + last


def _node_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    """One wait and P parts to read; or in slots, of which a rank combines its chunk."""
    link, ranks = machine.shared, shape.ranks
    if nbytes * (ranks - 1) <= node.ONE_SHOT_BYTES:
        return link.alpha + nbytes * link.beta + (ranks - 1) * nbytes * link.gamma
    slots = 2 * nbytes / node.SLOT_BYTES
    moved = 2 * nbytes * (ranks - 1) / ranks * link.beta
    return (1 + slots) * link.alpha + moved + nbytes * link.gamma


def _node_copies(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of one rank's bytes into the segment and every other's out of it."""
    link = machine.shared
    return (1 + nbytes / node.SLOT_BYTES) * link.alpha + 2 * nbytes * link.beta


_Model = Callable[[float, Shape, Machine], float]

_MODELS: dict[str, dict[str, _Model]] = {
    "allreduce": {
        "ring": _ring_allreduce,
        "tree": _tree_allreduce,
        "halving": _halving_allreduce,
        "hierarchical": _hierarchical_allreduce,
        "node": _node_allreduce,
    },
    "reduce": {"tree": _tree_reduce, "node": _node_allreduce},
    "reduce_scatter": {
        "ring": lambda n, s, m: _ring_half(n, s, m) + _combined(n, s, m),
        "halving": lambda n, s, m: _halving_half(n, s, m) + _combined(n, s, m),
        "node": _node_allreduce,
    },
    "broadcast": {
        "tree": _tree_broadcast,
        "ring": _ring_broadcast,
        "hierarchical": _hierarchical_broadcast,
        "node": _node_copies,
    },
    "gather": {"tree": _tree_scatter, "node": _node_copies},
    "allgather": {"ring": _ring_half, "halving": _halving_half, "node": _node_copies},
    "scatter": {"tree": _tree_scatter, "node": _node_copies},
}

OPERATIONS = tuple(_MODELS)
