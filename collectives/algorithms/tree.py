"""Binomial tree algorithms: ceil(log2 P) rounds of whole buffers, best for small arrays.

The tree of 5 ranks with root 0; a broadcast goes down from the largest subtree to the smallest, a
reduce or gather comes up from the smallest to the largest:

    round 0:  0 -> 4
    round 1:  0 -> 2
    round 2:  0 -> 1,  2 -> 3

            0
          / | \\
         4  2  1
            |
            3

Cost per rank; of a gather or scatter S is the whole:

    operation  messages sent       bytes sent            scratch
    allreduce  up to ceil(log2 P)  up to ceil(log2 P) S  S
    reduce     1                   S                     S
    broadcast  up to ceil(log2 P)  up to ceil(log2 P) S  none
    gather     1                   up to S/2             up to S/2
    scatter    up to ceil(log2 P)  up to (P - 1)/P S     up to S/2
    barrier    up to ceil(log2 P)  up to ceil(log2 P)    none

The root sends or receives ceil(log2 P) messages, a leaf one. A broadcast of a large buffer
(`SCATTER_BYTES`) is a scatter along the tree and an all-gather around the ring: 2 (P - 1)/P S bytes
sent by the root in place of ceil(log2 P) S, in P - 1 rounds more. (`ring.broadcast` sends S, in
still more rounds.) Buffers go in slices, which a rank passes on as they arrive.

Order: a rank adds its children in the order of growing subtrees, so the sum is the same tree of
pairs in every run.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 4.2 and 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collectives.algorithms import ring
from collectives.algorithms.cost_model import RankLayout
from collectives.arrays import device, reduction
from collectives.arrays.host_arrays import Array
from collectives.core import topology
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = [
    "allreduce",
    "allreduce_seconds",
    "barrier",
    "barrier_seconds",
    "broadcast",
    "broadcast_seconds",
    "gather",
    "reduce",
    "reduce_seconds",
    "scatter",
    "scatter_seconds",
]

# Bytes from which a broadcast among more than four ranks is a scatter and an all-gather. Between 8
# network namespaces at 500 Mbit/s: 256 KiB 15 ms where the tree alone takes 11 ms, 512 KiB 13 ms
# where it takes 26 ms; among 3 or 4 there is nothing to gain up to 16 MiB.
SCATTER_BYTES = 1 << 19


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    if transport.size > 4 and buffer.nbytes >= SCATTER_BYTES:
        bounds = topology.chunk_bounds(buffer.size, transport.size)
        counts = np.diff(bounds).tolist()
        _hand_down(transport, buffer, dict(enumerate(bounds)), counts, root, deadline)
        ring.allgather(transport, buffer, bounds, deadline)
        return
    tree = topology.binomial_tree(transport.rank, transport.size, root)
    largest_first = tree.children[::-1]
    ring.relay(transport, buffer, tree.parent, largest_first, deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `broadcast` of so many bytes should take."""
    if layout.size > 4 and nbytes >= SCATTER_BYTES:
        return scatter_seconds(nbytes, layout) + ring.allgather_seconds(nbytes, layout)
    levels = (layout.size - 1).bit_length()
    # A rank sends to all its children at once, and the messages share its line.
    shared = max(
        (
            sum(max(0.0, n * (nbytes * link.beta - programs)) for n in range(levels))
            for link, programs, _ in layout.links()
        ),
        default=0.0,
    )
    return _levels_seconds(nbytes, layout, levels) + shared


def _levels_seconds(nbytes: float, layout: RankLayout, levels: int) -> float:
    """Return the time in which whole buffers pass so many levels of the tree."""
    node = layout.machine.node
    together = (layout.per_node & -layout.per_node).bit_length() - 1  # that do not leave a node
    inside = levels if layout.num_nodes == 1 else min(levels, together)
    between = (levels - inside) * layout.step(nbytes) if levels > inside else 0.0
    return between + inside * (node.alpha + nbytes * node.beta)


def reduce(
    transport: Transport, buffer: Array, op: reduction.Op, root: int, deadline: Deadline
) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks on the root, in place.

    On the other ranks the buffer holds the reduction over their subtree afterwards.
    """
    tree = topology.binomial_tree(transport.rank, transport.size, root)
    combine = reduction.combine(op)
    parts = ring.slices(buffer)
    theirs = ring.scratch_views(device.empty(buffer.size, buffer), parts) if tree.children else []
    for child in tree.children:
        receives = [transport.start_receive(landed, child) for landed in theirs]
        for part, landed, receive in zip(parts, theirs, receives, strict=True):
            transport.wait((receive,), deadline)
            combine(part, landed)
    if tree.parent is not None:
        sends = [transport.start_send(part, tree.parent) for part in parts]
        transport.wait(sends, deadline)


def reduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `reduce` should take."""
    levels = layout.size.bit_length() - 1  # ones in the number of the farthest rank from the root
    return _levels_seconds(nbytes, layout, levels) + levels * layout.combined(nbytes)


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks: reduce, then broadcast."""
    reduce(transport, buffer, op, 0, deadline)
    broadcast(transport, buffer, 0, deadline)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `allreduce` of so many bytes should take.

    On one node: log P (2 alpha + S (2 beta + gamma)).
    Between nodes: one message per node and level.
    """
    return reduce_seconds(nbytes, layout) + broadcast_seconds(nbytes, layout)


def gather(
    transport: Transport, own: Array, counts: Sequence[int], root: int, deadline: Deadline
) -> Array | None:
    """Collect every rank's array, shape (counts[rank],), on the root; all know all counts.

    Returns:
        shape (sum(counts),) in the order of the ranks on the root, None elsewhere.
    """
    size = transport.size
    tree = topology.binomial_tree(transport.rank, size, root)
    starts, total = _subtree(transport, tree.span, counts)
    collected = np.empty(total, own.dtype)
    collected[: own.size] = own
    receives: list[PendingMessage] = []
    for child in tree.children:
        span = topology.binomial_tree(child, size, root).span
        length = sum(counts[(child + i) % size] for i in range(span))
        part = collected[starts[child] : starts[child] + length]
        receives += [transport.start_receive(s, child) for s in ring.slices(part)]
    transport.wait(receives, deadline)
    if tree.parent is not None:
        parent = tree.parent
        sends = [transport.start_send(s, parent) for s in ring.slices(collected)]
        transport.wait(sends, deadline)
        return None
    behind = sum(counts[root:])  # elements of the ranks root .. size - 1, which stand in front
    return np.concatenate([collected[behind:], collected[:behind]]) if root else collected


def scatter(
    transport: Transport,
    buffer: Array | None,
    counts: Sequence[int],
    root: int,
    dtype: np.dtype[Any],
    deadline: Deadline,
) -> Array:
    """Give every rank its part of the root's buffer, in the order of the ranks.

    The buffer, shape (sum(counts),), is not used elsewhere; all know all counts and the dtype.

    Returns:
        A new array, shape (counts[rank],).
    """
    if transport.rank == root:
        assert buffer is not None
        starts, held = dict(enumerate(accumulate(counts, initial=0))), buffer
    else:
        span = topology.binomial_tree(transport.rank, transport.size, root).span
        starts, total = _subtree(transport, span, counts)
        held = np.empty(total, dtype)
    _hand_down(transport, held, starts, counts, root, deadline)
    own = held[starts[transport.rank] : starts[transport.rank] + counts[transport.rank]]
    return own.copy() if own.size < held.size or held is buffer else own


def scatter_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `scatter` or `gather` should take: a level carries half of the one above."""
    machine, nodes, per_node = layout.machine, layout.num_nodes, layout.per_node
    away = nbytes * (nodes - 1) / nodes * machine.network.beta
    inside = nbytes / nodes * (per_node - 1) / per_node * machine.node.beta
    return _levels_seconds(0, layout, (layout.size - 1).bit_length()) + away + inside


def _subtree(transport: Transport, span: int, counts: Sequence[int]) -> tuple[dict[int, int], int]:
    """Lay out the elements of a subtree, which are those of `span` ranks from this one on.

    Returns:
        The offset of every such rank's elements, and the number of all elements.
    """
    members = [(transport.rank + i) % transport.size for i in range(span)]
    ends = list(accumulate((counts[m] for m in members), initial=0))
    return dict(zip(members, ends, strict=False)), ends[-1]


def _hand_down(
    transport: Transport,
    held: Array,
    starts: Mapping[int, int],
    counts: Sequence[int],
    root: int,
    deadline: Deadline,
) -> None:
    """Receive the elements of this rank's subtree, and send its children those of theirs.

    Ranks are laid out in `held` from the root on or from rank 0 on, as `starts` says: a message
    never holds the last rank's elements and the first one's.
    """
    size = transport.size
    tree = topology.binomial_tree(transport.rank, size, root)

    def parts(first: int, span: int) -> list[Array]:
        runs = topology.unwrapped(first, span, size)
        totals = [sum(counts[run.start : run.stop]) for run in runs]
        begins = [starts[run.start] for run in runs]
        whole = [held[at : at + total] for at, total in zip(begins, totals, strict=True)]
        return [s for part in whole for s in ring.slices(part)]

    if tree.parent is not None:
        into = parts(transport.rank, tree.span)
        transport.wait([transport.start_receive(p, tree.parent) for p in into], deadline)
    sends = []
    for child in reversed(tree.children):
        span = topology.binomial_tree(child, size, root).span
        sends += [transport.start_send(p, child) for p in parts(child, span)]
    transport.wait(sends, deadline)


def barrier(transport: Transport, deadline: Deadline) -> None:
    """Return when every rank has entered."""
    token = np.zeros(1, np.uint8)
    allreduce(transport, token, reduction.MAX, deadline)


def barrier_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return how long `barrier` should take."""
    return 2 * _levels_seconds(0, layout, (layout.size - 1).bit_length())
