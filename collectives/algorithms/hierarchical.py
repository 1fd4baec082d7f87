"""Hierarchical algorithms: reduce inside each node first, then between nodes.

The network is the bottleneck, so each byte crosses it once; a flat algorithm may send a byte back
and forth. The ranks with the same local rank, one per node, form a *rail*. Nodes a and b with 2
ranks each, rails 0 and 1, a buffer of two chunks:

    a0  a1  b0  b1        four parts of chunk 0 and chunk 1
    |----|  |----|        reduce-scatter in each node: a0 and b0 hold the node's chunk 0, the
                          others its chunk 1
    a0 <---> b0           all-reduce of chunk 0 on rail 0, at the same time as
        a1 <---> b1       all-reduce of chunk 1 on rail 1
    |----|  |----|        all-gather in each node

Nodes may have different numbers of ranks: the smallest node gives the number of rails,
and further ranks own an empty chunk.

Cost per rank of N nodes, with rings between nodes and no messages inside nodes:

    operation  messages sent       bytes sent           scratch
    allreduce  2 (N - 1)           2 (N - 1)/N S/rails  up to S/rails
    broadcast  1                   S/rails              none
    barrier    up to ceil(log2 N)  up to ceil(log2 N)   none

The bytes of an all-reduce on a node's link, 2 (N - 1)/N S in each direction, are optimal. A flat
ring over nodes in order sends 2 (P - 1)/P S per node. It sends more if neighbours on the ring are
on different nodes: up to 2 (P - 1)/P S for each rank of the node.

Order: that of the stages; all ranks get the same bits, in every run, if the stages guarantee it.

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

# Bytes up to which one rank per node does all network messages: a chunk per rail would take more
# messages, each as slow as a single one. At 1 Gbit/s, all rails / one, in ms: 4 nodes of 2 ranks
# 8 KiB 3.0 / 2.5, 64 KiB 3.7 / 2.6; 2 nodes of 4 ranks 8 KiB 2.9 / 1.9, 64 KiB 7.6 / 5.
ONE_RAIL_BYTES = 1 << 16

# Seconds of Python per stage inside a node: with 2 ranks and 8 bytes a reduce-scatter, an
# all-gather or a barrier in the node engine takes 4.1 us.
_STAGE_SECONDS = 4e-6


class Levels(NamedTuple):
    """Stages of a hierarchical operation, for one rank.

    The first four stages run among the ranks of the node, by local rank, on a flat buffer in place.
    """

    node: Transport  # the ranks of this rank's node, by local rank
    reduce_scatter: Callable[[Array, Sequence[int], Op, Deadline], None]
    allgather: Callable[[Array, Sequence[int], Deadline], None]
    broadcast: Callable[[Array, int, Deadline], None]
    barrier: Callable[[Deadline], None]
    rails: int
    network: Transport | None  # the ranks of this rank's rail, by node; None beyond the rails
    single_rail: RankLayout  # layout of a rail that has the network to itself
    contended_rail: RankLayout  # layout of a rail that shares the network with all other rails
    allreduce: Callable[[Transport, Array, Op, Deadline], None] | None  # on a rail; None: fastest
    leaders: Sequence[int]  # an integer per rank, equal for two ranks if they share a node
    leader: int  # this rank's integer


def levels(transport: Transport, leaders: Sequence[int], machine: Machine = DEFAULT) -> Levels:
    """Arrange the ranks of a transport in nodes and rails, with rings inside the nodes.

    Sends no message. The stages use the transport itself, so errors about waits name ranks by the
    numbers of the whole group. A caller with a faster stage replaces its field.

    Args:
        transport: all ranks; the caller keeps ownership.
        leaders: an integer per rank, equal for two ranks if and only if they share a node.
        machine: costs of the links, which decide the algorithm on a rail.
    """
    rails = topology.rails(leaders, transport.rank)
    nodes = len(set(leaders))
    # The transport is shared: levels send under the same tag, in the same order on all ranks.
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
    # Equal on all nodes, so that the chunks of a rail match.
    bounds = _bounds(levels, buffer)
    levels.reduce_scatter(buffer, bounds, op, deadline)
    own = buffer[bounds[levels.node.rank] : bounds[levels.node.rank + 1]]
    # Further ranks have no rail, and small buffers one chunk only.
    if levels.network is not None and own.size:
        over_network = levels.allreduce or _pick(levels, "allreduce", buffer.nbytes, own.nbytes)
        over_network(levels.network, own, op, deadline)
    # Starts after the rail, because a rank publishes its finished chunk.
    levels.allgather(buffer, bounds, deadline)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `allreduce`.

    Inside the nodes: the node engine. Between N nodes: S bytes per node.
    """
    own, rail = _chunk(nbytes, layout)
    combining = (layout.per_node - 1) * own * layout.machine.shared.gamma
    on_rail = min(_rail_seconds("allreduce", own, rail).values())
    return 2 * stage_seconds(nbytes, own, layout) + combining + on_rail


# Algorithms on a rail: name -> (function, modelled seconds).
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
    """Return the fastest algorithm for the bytes of this rank's chunk, the same on a whole rail."""
    # One rail alone has the network to itself.
    rail = levels.single_rail if whole <= ONE_RAIL_BYTES else levels.contended_rail
    return _ON_RAIL[operation][size_table.lookup(operation, own, rail, _switch_points)][0]


# By layout, because groups of equal layouts have the same table.
@lru_cache(256)
def _switch_points(operation: str, rail: RankLayout) -> tuple[tuple[int, ...], tuple[str, ...]]:
    def first(nbytes: int) -> str:
        times = _rail_seconds(operation, nbytes, rail)
        return min(times, key=times.__getitem__)

    return size_table.switch_points(first)


def _rail_seconds(operation: str, own: float, rail: RankLayout) -> dict[str, float]:
    """Return the modelled seconds of each algorithm on a rail for the bytes of a chunk."""
    # Of all algorithms, also for `python -m collectives simulate`.
    return {name: seconds(own, rail) for name, (_, seconds) in _ON_RAIL[operation].items()}


def _chunk(nbytes: float, layout: RankLayout) -> tuple[float, RankLayout]:
    """Return the bytes on one rail, and the layout of its ranks."""
    rails = 1 if nbytes <= ONE_RAIL_BYTES else layout.size // layout.num_nodes
    return nbytes / rails, _rail(rails, layout.num_nodes, layout.machine)


def _rail(rails: int, nodes: int, machine: Machine) -> RankLayout:
    """Return the layout of a rail that shares the network with `rails` - 1 others."""
    # Rails send at once over the node's link, so each has a share of its rate.
    network = machine.network._replace(beta=machine.network.beta * rails)
    return RankLayout(nodes, nodes, machine._replace(network=network))


def stage_seconds(nbytes: float, own: float, layout: RankLayout) -> float:
    """Return the seconds in which ranks of a node publish `own` bytes each and read all of them."""
    link = layout.machine.shared
    # A chunk longer than a slot takes further synchronizations.
    meetings = 1 + own / kernel_selection.SLOT_BYTES
    return _STAGE_SECONDS + meetings * link.alpha + (own + nbytes) * link.beta


def publish_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the seconds in which one rank of a node publishes bytes to the other ranks."""
    return _STAGE_SECONDS + kernel_selection.publish_seconds(nbytes, layout.machine.shared)


def allreduce_custom(
    levels: Levels,
    buffer: Array,
    combine: Callable[[Array, Array], None],
    between: Callable[[Transport, Array], None],
    deadline: Deadline,
) -> None:
    """Combine small buffers by a custom function; one rank per node uses the network.

    Args:
        levels: stages of the operation.
        buffer: flat, replaced by the result.
        combine: updates its first argument by a buffer of a rank with a higher number.
        between: combines the buffers of the nodes, in place.
        deadline: limit of every wait.
    """
    # All buffers of the node in one array, one after the other.
    bounds = range(0, (levels.node.size + 1) * buffer.size, buffer.size)
    all_of_node = np.empty(bounds[-1], buffer.dtype)
    all_of_node[bounds[levels.node.rank] : bounds[levels.node.rank + 1]] = buffer
    levels.allgather(all_of_node, bounds, deadline)
    # Local rank 0 combines in the order of ranks, so the result is reproducible.
    if levels.network is not None and levels.node.rank == 0:
        for start, stop in pairwise(bounds[1:]):
            combine(buffer, all_of_node[start:stop])
        between(levels.network, buffer)
    # The other ranks of the node learn the result, also if it is a mismatch.
    levels.broadcast(buffer, 0, deadline)


def broadcast(levels: Levels, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place.

    The stages are: inside the root's node, a chunk on every rail, inside the other nodes.
    """
    # The root's place, which is equal on all ranks.
    source = topology.nodes(levels.leaders, root)
    at_source = levels.leader == levels.leaders[root]
    # First inside the root's node: then each of its ranks has the chunk of its rail.
    if at_source:
        levels.broadcast(buffer, source.local_rank, deadline)
    bounds = _bounds(levels, buffer)
    own = buffer[bounds[levels.node.rank] : bounds[levels.node.rank + 1]]
    if levels.network is not None and own.size:
        over_network = _pick(levels, "broadcast", buffer.nbytes, own.nbytes)
        over_network(levels.network, own, source.node_rank, deadline)
    # The ranks of the root's node have the whole buffer already.
    if not at_source:
        levels.allgather(buffer, bounds, deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `broadcast`."""
    own, rail = _chunk(nbytes, layout)
    on_rail = min(_rail_seconds("broadcast", own, rail).values())
    return publish_seconds(nbytes, layout) + on_rail + stage_seconds(nbytes, own, layout)


def barrier(levels: Levels, deadline: Deadline) -> None:
    """Return when every rank has entered; one rank per node uses the network."""
    levels.barrier(deadline)
    # Between the two barriers, so that no rank of a node leaves before all nodes have entered.
    if levels.network is not None and levels.node.rank == 0:
        tree.barrier(levels.network, deadline)
    levels.barrier(deadline)


def barrier_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `barrier`."""
    rail = RankLayout(layout.num_nodes, layout.num_nodes, layout.machine)
    return 2 * stage_seconds(0, 0, layout) + tree.barrier_seconds(0, rail)


def _bounds(levels: Levels, buffer: Array) -> list[int]:
    """Return the bounds of one chunk per rail, equal on every node; further ranks own nothing."""
    rails = 1 if buffer.nbytes <= ONE_RAIL_BYTES else levels.rails
    bounds = topology.chunk_bounds(buffer.size, rails)
    # Further ranks own an empty chunk at the end.
    return bounds + [buffer.size] * (levels.node.size - rails)


class _SubsetTransport(Transport):
    """Some ranks of a transport, renumbered, over the messages of the whole transport.

    Two ranks share a node or a rail, never both, so their messages keep their order. The creator
    owns the whole transport.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole = whole
        self._ranks = ranks
        self.rank = ranks.index(whole.rank)
        self.size = len(ranks)

    # Errors name ranks by their numbers in the whole group.
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
