"""Hierarchical algorithms: reduce inside each node first, then between nodes.

The network is the narrow part, so each byte crosses it once where a flat algorithm may send it to
and fro. The ranks with the same local rank, one per node, form a *rail*. Nodes a and b with 2 ranks
each, rails 0 and 1, a buffer of two chunks:

    a0  a1  b0  b1        four parts of chunk 0 and chunk 1
    |----|  |----|        reduce-scatter in each node: a0 and b0 hold the node's chunk 0, the
                          others its chunk 1
    a0 <---> b0           all-reduce of chunk 0 on rail 0, at the same time as
        a1 <---> b1       all-reduce of chunk 1 on rail 1
    |----|  |----|        all-gather in each node

Nodes may have different numbers of ranks: there are as many rails as the smallest node has ranks,
and the ranks beyond own an empty chunk.

Cost per rank of N nodes, by rings between nodes and without messages inside them:

    operation  messages sent       bytes sent           scratch
    allreduce  2 (N - 1)           2 (N - 1)/N S/rails  up to S/rails
    broadcast  1                   S/rails              none
    barrier    up to ceil(log2 N)  up to ceil(log2 N)   none

The bytes of an all-reduce on a node's link, 2 (N - 1)/N S in each direction, are the least
possible. A flat ring over nodes in order sends 2 (P - 1)/P S, and more the more often neighbours on
the ring are on different nodes: 2 (P - 1)/P S for each rank of the node if they always are.

Order: that of the stages; all ranks get the same bits, in every run, if the stages do so.

Source: the rails are those of M. Bayatpour et al., "Scalable reduction collectives with data
partitioning-based multi-leader design", SC17, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from collectives.algorithms import (
    double_tree,
    halving_doubling,
    recursive_doubling,
    ring,
    size_table,
    tree,
)
from collectives.algorithms.cost_model import RankLayout
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import Op
from collectives.core import topology
from collectives.core.links import DEFAULT, Machine
from collectives.node import kernel_selection
from collectives.transport.transport import Deadline, NativeMpi, PendingMessage, Transport

__all__ = [
    "Levels",
    "allreduce",
    "allreduce_seconds",
    "barrier",
    "barrier_seconds",
    "broadcast",
    "broadcast_seconds",
    "allreduce_custom",
    "levels",
    "publish_seconds",
    "stage_seconds",
]

# Bytes up to which one rank per node does all work on the network: a chunk for every rail would
# take as many messages, each as slow as one for all. At 1 Gbit/s, all rails / one, in ms: 4 nodes
# of 2 ranks 8 KiB 3.0 / 2.5, 64 KiB 3.7 / 2.6; 2 nodes of 4 ranks 8 KiB 2.9 / 1.9, 64 KiB 7.6 / 5.
ONE_RAIL_BYTES = 1 << 16

# Seconds that the program takes for a stage inside a node, besides what a plan takes: with 2 ranks
# and 8 bytes a reduce-scatter, an all-gather or a barrier in the node engine 4.1 us.
_STAGE_SECONDS = 4e-6


class Levels(NamedTuple):
    """What the stages of a hierarchical operation need, as one rank sees it.

    The first four work among the ranks of the node, by local rank, on a flat buffer in place.
    """

    node: Transport  # the ranks of this rank's node, by local rank
    reduce_scatter: Callable[[Array, Sequence[int], Op, Deadline], None]
    allgather: Callable[[Array, Sequence[int], Deadline], None]
    broadcast: Callable[[Array, int, Deadline], None]
    barrier: Callable[[Deadline], None]
    rails: int
    network: Transport | None  # the ranks of this rank's rail, by node; None beyond the rails
    single_rail: RankLayout  # of a rail that works alone
    contended_rail: RankLayout  # of one beside which all others work, too
    allreduce: Callable[[Transport, Array, Op, Deadline], None] | None  # on a rail; or the fastest
    leaders: Sequence[int]  # of every rank an integer, the same exactly for those of one node
    leader: int  # that of this rank


def levels(transport: Transport, leaders: Sequence[int], machine: Machine = DEFAULT) -> Levels:
    """Arrange the ranks of a transport in nodes and rails, with a ring inside the nodes.

    No message is sent: the stages use the transport itself, so that an error about a wait names
    the ranks as the whole group numbers them. Whoever has something faster for a stage replaces
    that field.

    Args:
        transport: all ranks; it stays the caller's own.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.
        machine: the links, by which the way along a rail is picked.
    """
    rails = topology.rails(leaders, transport.rank)
    nodes = len(set(leaders))
    node = _SubsetTransport(transport, rails.node)
    return Levels(
        node=node,
        reduce_scatter=partial(ring.reduce_scatter, node),
        allgather=partial(ring.allgather, node),
        broadcast=partial(tree.broadcast, node),
        barrier=partial(tree.barrier, node),
        rails=rails.number,
        network=None if rails.rail is None else _SubsetTransport(transport, rails.rail),
        single_rail=_rail(1, nodes, machine),
        contended_rail=_rail(rails.number, nodes, machine),
        allreduce=None,
        leaders=leaders,
        leader=leaders[transport.rank],
    )


def allreduce(levels: Levels, buffer: Array, op: Op, deadline: Deadline) -> None:
    """Replace `buffer` by the reduction over all ranks of all nodes, in place."""
    bounds = _bounds(levels, buffer)
    levels.reduce_scatter(buffer, bounds, op, deadline)
    own = buffer[bounds[levels.node.rank] : bounds[levels.node.rank + 1]]
    if levels.network is not None and own.size:
        over_network = levels.allreduce or _pick(levels, "allreduce", buffer.nbytes, own.nbytes)
        over_network(levels.network, own, op, deadline)
    levels.allgather(buffer, bounds, deadline)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `allreduce` of so many bytes should take.

    Inside the nodes as by the node engine; between N nodes S bytes per node.
    """
    own, rail = _chunk(nbytes, layout)
    combining = (layout.per_node - 1) * own * layout.machine.shared.gamma
    on_rail = min(_rail_seconds("allreduce", own, rail).values())
    return 2 * stage_seconds(nbytes, own, layout) + combining + on_rail


# What may happen on a rail: name -> the function, and its seconds.
_ON_RAIL: dict[str, dict[str, tuple[Callable[..., None], Callable[[float, RankLayout], float]]]] = {
    "allreduce": {
        "ring": (ring.allreduce, ring.allreduce_seconds),
        "double_tree": (double_tree.allreduce, double_tree.allreduce_seconds),
        "doubling": (recursive_doubling.allreduce, recursive_doubling.allreduce_seconds),
        "halving": (halving_doubling.allreduce, halving_doubling.allreduce_seconds),
    },
    "broadcast": {
        "tree": (tree.broadcast, tree.broadcast_seconds),
        "double_tree": (double_tree.broadcast, double_tree.broadcast_seconds),
        "ring": (ring.broadcast, ring.broadcast_seconds),
    },
}


def _pick(levels: Levels, operation: str, whole: int, own: int) -> Callable[..., None]:
    """Return what should be the fastest for the bytes of this rank's chunk, the same on a rail."""
    rail = levels.single_rail if whole <= ONE_RAIL_BYTES else levels.contended_rail
    return _ON_RAIL[operation][size_table.lookup(operation, own, rail, _switch_points)][0]


@lru_cache(256)
def _switch_points(operation: str, rail: RankLayout) -> tuple[tuple[int, ...], tuple[str, ...]]:
    def first(nbytes: int) -> str:
        times = _rail_seconds(operation, nbytes, rail)
        return min(times, key=times.__getitem__)

    return size_table.switch_points(first)


def _rail_seconds(operation: str, own: float, rail: RankLayout) -> dict[str, float]:
    """Return how long each way along a rail should take for the bytes of a chunk."""
    return {name: seconds(own, rail) for name, (_, seconds) in _ON_RAIL[operation].items()}


def _chunk(nbytes: float, layout: RankLayout) -> tuple[float, RankLayout]:
    """Return the bytes of one rail, and its ranks."""
    rails = 1 if nbytes <= ONE_RAIL_BYTES else layout.size // layout.num_nodes
    return nbytes / rails, _rail(rails, layout.num_nodes, layout.machine)


def _rail(rails: int, nodes: int, machine: Machine) -> RankLayout:
    """Return the ranks of a rail, with links as slow as so many rails at once make them."""
    network = machine.network._replace(beta=machine.network.beta * rails)
    return RankLayout(nodes, nodes, machine._replace(network=network))


def stage_seconds(nbytes: float, own: float, layout: RankLayout) -> float:
    """Return the time in which a node's ranks publish `own` bytes each and take in all of them."""
    link = layout.machine.shared
    meetings = 1 + own / kernel_selection.SLOT_BYTES
    return _STAGE_SECONDS + meetings * link.alpha + (own + nbytes) * link.beta


def publish_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the time in which one of a node's ranks publishes bytes for the others."""
    return _STAGE_SECONDS + kernel_selection.publish_seconds(nbytes, layout.machine.shared)


def allreduce_custom(
    levels: Levels,
    buffer: Array,
    combine: Callable[[Array, Array], None],
    between: Callable[[Transport, Array], None],
    deadline: Deadline,
) -> None:
    """Combine small buffers, in a way that no op describes: one rank per node speaks for it.

    `combine` changes its first argument, a buffer, by that of ranks with higher numbers; `between`
    combines those of the nodes.
    """
    bounds = range(0, (levels.node.size + 1) * buffer.size, buffer.size)
    all_of_node = np.empty(bounds[-1], buffer.dtype)
    all_of_node[bounds[levels.node.rank] : bounds[levels.node.rank + 1]] = buffer
    levels.allgather(all_of_node, bounds, deadline)
    if levels.network is not None and levels.node.rank == 0:
        for start, stop in pairwise(bounds[1:]):
            combine(buffer, all_of_node[start:stop])
        between(levels.network, buffer)
    levels.broadcast(buffer, 0, deadline)


def broadcast(levels: Levels, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place.

    First inside the root's node, then a chunk on every rail, then inside the other nodes.
    """
    source = topology.nodes(levels.leaders, root)
    at_source = levels.leader == levels.leaders[root]
    if at_source:
        levels.broadcast(buffer, source.local_rank, deadline)
    bounds = _bounds(levels, buffer)
    own = buffer[bounds[levels.node.rank] : bounds[levels.node.rank + 1]]
    if levels.network is not None and own.size:
        over_network = _pick(levels, "broadcast", buffer.nbytes, own.nbytes)
        over_network(levels.network, own, source.node_rank, deadline)
    if not at_source:
        levels.allgather(buffer, bounds, deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `broadcast` should take."""
    own, rail = _chunk(nbytes, layout)
    on_rail = min(_rail_seconds("broadcast", own, rail).values())
    return publish_seconds(nbytes, layout) + on_rail + stage_seconds(nbytes, own, layout)


def barrier(levels: Levels, deadline: Deadline) -> None:
    """Return when every rank has entered: one rank per node speaks for it."""
    levels.barrier(deadline)
    if levels.network is not None and levels.node.rank == 0:
        tree.barrier(levels.network, deadline)
    levels.barrier(deadline)


def barrier_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `barrier` should take."""
    rail = RankLayout(layout.num_nodes, layout.num_nodes, layout.machine)
    return 2 * stage_seconds(0, 0, layout) + tree.barrier_seconds(0, rail)


def _bounds(levels: Levels, buffer: Array) -> list[int]:
    """Cut a buffer into one chunk per rail, the same on every node; the other ranks own nothing."""
    rails = 1 if buffer.nbytes <= ONE_RAIL_BYTES else levels.rails
    bounds = topology.chunk_bounds(buffer.size, rails)
    return bounds + [buffer.size] * (levels.node.size - rails)


class _SubsetTransport(Transport):
    """Some ranks of a transport, numbered anew, over the messages of the whole.

    Two ranks are together on a node or on a rail, never on both, so their messages keep in order.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole = whole
        self._ranks = ranks
        self.rank = ranks.index(whole.rank)
        self.size = len(ranks)

    @property
    def parent(self) -> Transport:
        return self._whole

    def parent_rank(self, rank: int) -> int:
        return self._ranks[rank]

    @property
    def native_mpi(self) -> NativeMpi | None:
        return self._whole.native_mpi

    def check_peers(self, operation: str, peers: Sequence[int] = ()) -> None:
        self._whole.check_peers(operation, [self._ranks[rank] for rank in peers])

    def propagate_failure(self, rank: int, how: str) -> None:
        self._whole.propagate_failure(self._ranks[rank], how)

    def progress(self) -> None:
        self._whole.progress()

    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        return self._whole.start_send(data, self._ranks[dest])

    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        return self._whole.start_receive(into, self._ranks[source])

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        self._whole.wait(messages, deadline)

    def split(self, color: int | None, key: int) -> Transport | None:
        raise NotImplementedError("the members of a level are not split further")

    def close(self) -> None:
        """Nothing is held: the whole transport is its owner's."""
