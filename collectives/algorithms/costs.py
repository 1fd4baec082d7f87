"""How long an operation should take with each algorithm: closed forms of alpha, beta and gamma.

A link costs `alpha` seconds for a message (of both ranks' programs, too), `beta` seconds for a byte
and `gamma` seconds for a byte that is combined with another. There are three (`collectives.links`):
the node engine's shared memory, messages inside a node, and messages between nodes.

Ranks are placed node by node, P/N = k on each of N nodes, P ranks in all. A step of an algorithm is
as slow as its slowest link. Messages of several ranks of a node at once share the node's link to
the network, in either direction, which is what tells the algorithms apart:

| algorithm | allreduce of S bytes on one node | between nodes |
| --- | --- | --- |
| ring | 2 (P-1) a + S (P-1)/P (2 b + g) | one message per node in a step |
| tree | log P (2 a + S (2 b + g)) | one message per node and level |
| halving, up to 64 KiB | log P (a + S (b + g)) | up to k messages per node and round |
| halving, above | 2 m a + S (P-1)/P (2 b + g) | up to k messages per node and round |
| hierarchical | - | inside the nodes as node; between N nodes S bytes per node |
| node | a + S b + (P-1) S g, above 8 KiB in slots | - |

A round of a halving in which more than one chunk moves is two messages on ranks whose chunks are at
both ends of the buffer; m counts log P rounds with these. Chunks go in slices that follow one
another, so a long message costs its bytes and one alpha. The figures are for choosing and for
planning, within a factor of two; `python -m collectives tune` holds them against measurements.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collectives import topology
from collectives.algorithms import halving, hierarchical, ring, tree
from collectives.links import DEFAULT, Machine
from collectives.node import engine

__all__ = ["OPERATIONS", "Shape", "estimate"]


# A ring combines a slice while the next one travels; where a message of a halving is more than a
# slice, the next round waits for the last of them. Between 4 nodes at 1 Gbit/s an all-reduce of
# 4 MiB takes 61 ms by halving, 54 ms around the ring; of 1 MiB, with one such round, 14.3 and 13.4.
_WAITING = 1.13

# Seconds that the program takes for a stage inside a node, besides what a plan takes: with 2 ranks
# and 8 bytes a reduce-scatter, an all-gather or a barrier in the node engine 4.1 us.
_STAGE_SECONDS = 4e-6


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

    Among equals the one that is listed first below comes first. MPI's own ("native") is not among
    them: what it does is its own choice. Neither are operations between ranks of one node by
    "hierarchical", and between nodes by "node".

    Args:
        operation: one of `OPERATIONS`.
        nbytes: S, of the whole array; not used for a barrier.
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
    times = {}
    for name, model in _MODELS[operation].items():
        if name == "hierarchical" and not 1 < shape.nodes < shape.ranks:
            continue
        if name == "node" and not 1 == shape.nodes < shape.ranks:
            continue
        times[name] = model(nbytes, shape, machine)
    # Equal formulas may differ in the last digits, summed in another order.
    return dict(sorted(times.items(), key=lambda item: float(f"{item[1]:.9g}")))


def _step(
    nbytes: float, shape: Shape, machine: Machine, at_once: int = 1, messages: int = 1
) -> float:
    """Return the time of a step in which messages go between neighbours of all kinds.

    Args:
        nbytes: that a rank sends.
        shape: the ranks.
        machine: the links.
        at_once: how many ranks of a node send over its link to the network.
        messages: in which a rank's bytes go; each but the first costs what the programs do.
    """
    times = [0.0]
    more = (messages - 1) * machine.node.alpha
    if shape.nodes > 1:
        times.append(machine.network.alpha + more + at_once * nbytes * machine.network.beta)
    if shape.per_node > 1:
        times.append(machine.node.alpha + more + nbytes * machine.node.beta)
    return max(times)


def _combined(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time to combine bytes with others that came over the longest way there is."""
    return nbytes * (machine.network if shape.nodes > 1 else machine.node).gamma


def _shared_work(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time to combine what a rank receives when all share the work."""
    return _combined(nbytes * (shape.ranks - 1) / shape.ranks, shape, machine)


def _ring_half(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of a ring's reduce-scatter, less the combining, or of its all-gather."""
    return (shape.ranks - 1) * _step(nbytes / shape.ranks, shape, machine)


def _halving_half(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of a reduce-scatter by halving, less the combining."""
    seconds = 0.0
    for step in topology.halving_reduce_scatter(0, shape.ranks):
        message = nbytes * step.chunks / shape.ranks
        at_once = min(step.dest, step.source, shape.per_node)
        time = _step(message, shape, machine, at_once, messages=min(step.chunks, 2))
        seconds += time * (_WAITING if message > ring.SLICE_BYTES else 1.0)
    return seconds


def _ring_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    return 2 * _ring_half(nbytes, shape, machine) + _shared_work(nbytes, shape, machine)


def _halving_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    if nbytes > halving.DOUBLING_BYTES:
        return 2 * _halving_half(nbytes, shape, machine) + _shared_work(nbytes, shape, machine)
    levels = shape.ranks.bit_length() - 1
    times = [
        _step(nbytes, _pairs(1 << n, shape), machine, at_once=min(1 << n, shape.per_node))
        for n in range(levels)
    ]
    if shape.ranks != 1 << levels:  # the others hand their part over before, and get it after
        times += 2 * [_step(nbytes, shape, machine)]
    return sum(times) + len(times) * _combined(nbytes, shape, machine)


def _pairs(distance: int, shape: Shape) -> Shape:
    """Return among whom ranks pair up at a distance: on their nodes where pairs are together."""
    together = shape.per_node % (2 * distance) == 0
    return Shape(shape.per_node) if together and not shape.ranks & (shape.ranks - 1) else shape


def _tree_levels(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time in which whole buffers pass all levels of a binomial tree."""
    levels = (shape.ranks - 1).bit_length()
    together = (shape.per_node & -shape.per_node).bit_length() - 1  # that do not leave a node
    inside = levels if shape.nodes == 1 else min(levels, together)
    on_node = machine.node.alpha + nbytes * machine.node.beta
    between = (levels - inside) * _step(nbytes, shape, machine) if levels > inside else 0.0
    return between + inside * on_node


def _tree_reduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    levels = (shape.ranks - 1).bit_length()
    return _tree_levels(nbytes, shape, machine) + levels * _combined(nbytes, shape, machine)


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


def _tree_barrier(nbytes: float, shape: Shape, machine: Machine) -> float:
    return 2 * _tree_levels(0, shape, machine)


def _ring_broadcast(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Slices pass once around; the first needs P - 1 steps, the others follow."""
    if shape.ranks == 1:
        return 0.0
    first = min(nbytes, ring.SLICE_BYTES)
    bytes_alone = _step(nbytes - first, shape, machine) - _step(0, shape, machine)
    return (shape.ranks - 1) * _step(first, shape, machine) + bytes_alone


def _rotation(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Each of P - 1 steps is a message of S/P bytes; most leave the node, over its one link."""
    away = shape.ranks - shape.per_node
    inside = shape.per_node - 1
    part = nbytes / shape.ranks
    network = away * (machine.network.alpha + shape.per_node * part * machine.network.beta)
    return network + inside * (machine.node.alpha + part * machine.node.beta)


def _rails(nbytes: float, shape: Shape) -> int:
    return 1 if nbytes <= hierarchical.ONE_RAIL_BYTES else shape.ranks // shape.nodes


def _rail(nbytes: float, shape: Shape, machine: Machine) -> tuple[float, Shape, Machine]:
    """Return bytes, ranks and links of one rail, and as slow as all of them at once make it."""
    rails = _rails(nbytes, shape)
    network = machine.network._replace(beta=machine.network.beta * rails)
    return nbytes / rails, Shape(shape.nodes, shape.nodes), machine._replace(network=network)


def _stage(nbytes: float, own: float, machine: Machine) -> float:
    """Return the time in which a node's ranks publish `own` bytes each and take in all of them."""
    link = machine.shared
    meetings = 1 + own / engine.SLOT_BYTES
    return _STAGE_SECONDS + meetings * link.alpha + (own + nbytes) * link.beta


def _hierarchical_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    own, rail, links = _rail(nbytes, shape, machine)
    fills = own >= ring.SLICE_BYTES * shape.nodes
    on_rail = (_ring_allreduce if fills else _halving_allreduce)(own, rail, links)
    combining = (shape.per_node - 1) * own * machine.shared.gamma
    return 2 * _stage(nbytes, own, machine) + combining + on_rail


def _hierarchical_broadcast(nbytes: float, shape: Shape, machine: Machine) -> float:
    own, rail, links = _rail(nbytes, shape, machine)
    fills = own >= ring.SLICE_BYTES * shape.nodes
    on_rail = (_ring_broadcast if fills else _tree_broadcast)(own, rail, links)
    first = _STAGE_SECONDS + _node_copies(nbytes, shape, machine)
    return first + on_rail + _stage(nbytes, own, machine)


def _hierarchical_barrier(nbytes: float, shape: Shape, machine: Machine) -> float:
    rail = Shape(shape.nodes, shape.nodes)
    return 2 * _stage(0, 0, machine) + _tree_barrier(0, rail, machine)


def _node_allreduce(nbytes: float, shape: Shape, machine: Machine) -> float:
    """One wait and P parts to read; or in slots, of which a rank combines its chunk."""
    link, ranks = machine.shared, shape.ranks
    if nbytes <= engine.ONE_SHOT_BYTES:
        return link.alpha + nbytes * link.beta + (ranks - 1) * nbytes * link.gamma
    slots = 2 * nbytes / engine.SLOT_BYTES
    moved = 2 * nbytes * (ranks - 1) / ranks * link.beta
    return (1 + slots) * link.alpha + moved + nbytes * link.gamma


def _node_copies(nbytes: float, shape: Shape, machine: Machine) -> float:
    """Return the time of one rank's bytes into the segment and every other's out of it."""
    link = machine.shared
    return (1 + nbytes / engine.SLOT_BYTES) * link.alpha + 2 * nbytes * link.beta


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
        "ring": lambda n, s, m: _ring_half(n, s, m) + _shared_work(n, s, m),
        "halving": lambda n, s, m: _halving_half(n, s, m) + _shared_work(n, s, m),
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
    "alltoall": {"rotation": _rotation, "node": _node_copies},
    "barrier": {
        "tree": _tree_barrier,
        "hierarchical": _hierarchical_barrier,
        "node": lambda n, s, m: m.shared.alpha,
    },
}

OPERATIONS = tuple(_MODELS)
