"""Binomial tree algorithms: ceil(log2 P) rounds of whole buffers, best for small arrays.

The tree of 5 ranks with root 0. A broadcast runs down from the largest subtree to the smallest; a
reduce or gather runs up from the smallest to the largest:

    round 0:  0 -> 4
    round 1:  0 -> 2
    round 2:  0 -> 1,  2 -> 3

            0
          / | \\
         4  2  1
            |
            3

Cost per rank; for a gather or scatter S is the whole array:

    operation  messages sent       bytes sent            scratch
    allreduce  up to ceil(log2 P)  up to ceil(log2 P) S  S
    reduce     1                   S                     S
    broadcast  up to ceil(log2 P)  up to ceil(log2 P) S  none
    gather     1                   up to S/2             up to S/2
    scatter    up to ceil(log2 P)  up to (P - 1)/P S     up to S/2
    barrier    up to ceil(log2 P)  up to ceil(log2 P)    none

The root sends or receives ceil(log2 P) messages, a leaf one. A broadcast of a large buffer
(`SCATTER_BYTES`) is a scatter along the tree and an all-gather around the ring: the root sends
2 (P - 1)/P S bytes instead of ceil(log2 P) S, in P - 1 more rounds. (`ring.broadcast` sends S, in
even more rounds.) Buffers are sent in slices, which a rank forwards as they arrive.

Order: a rank adds its children in the order of growing subtrees, so that the tree of additions is
the same in every run.

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

# Bytes from which a broadcast among more than four ranks is a scatter and an all-gather. 8 network
# namespaces at 500 Mbit/s, this way / the tree alone, in ms: 256 KiB 15 / 11, 512 KiB 13 / 26.
# Among 3 or 4 ranks it gains nothing up to 16 MiB.
SCATTER_BYTES = 1 << 19


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    # The root would send the whole buffer to log P children.
    if transport.size > 4 and buffer.nbytes >= SCATTER_BYTES:
        bounds = topology.chunk_bounds(buffer.size, transport.size)
        counts = np.diff(bounds).tolist()
        _hand_down(transport, buffer, dict(enumerate(bounds)), counts, root, deadline)
        ring.allgather(transport, buffer, bounds, deadline)
        return
    tree = topology.binomial_tree(transport.rank, transport.size, root)
    # The largest subtree first, because it has the most levels.
    largest_first = tree.children[::-1]
    ring.relay(transport, buffer, tree.parent, largest_first, deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `broadcast`."""
    if layout.size > 4 and nbytes >= SCATTER_BYTES:
        return scatter_seconds(nbytes, layout) + ring.allgather_seconds(nbytes, layout)
    levels = (layout.size - 1).bit_length()
    # A rank sends to all its children at once, so the messages share its line.
    shared = max(
        (
            # The line is shared only while the programs do not limit the rate.
            sum(max(0.0, n * (nbytes * link.beta - programs)) for n in range(levels))
            for link, programs, _ in layout.links()
        ),
        default=0.0,
    )
    return _levels_seconds(nbytes, layout, levels) + shared


def _levels_seconds(nbytes: float, layout: RankLayout, levels: int) -> float:
    """Return the time in which a whole buffer passes `levels` levels of the tree."""
    node = layout.machine.node
    # Nodes of 2^k ranks: the first k levels stay inside a node.
    together = (layout.per_node & -layout.per_node).bit_length() - 1  # levels inside a node
    inside = levels if layout.num_nodes == 1 else min(levels, together)
    between = (levels - inside) * layout.step(nbytes) if levels > inside else 0.0
    return between + inside * (node.alpha + nbytes * node.beta)


def reduce(
    transport: Transport, buffer: Array, op: reduction.Op, root: int, deadline: Deadline
) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks on the root, in place.

    Afterwards the buffer holds the reduction over a subtree on the other ranks.
    """
    tree = topology.binomial_tree(transport.rank, transport.size, root)
    combine = reduction.combine(op)
    parts = ring.slices(buffer)
    # For one child at a time; a leaf needs none.
    theirs = ring.scratch_views(device.empty(buffer.size, buffer), parts) if tree.children else []
    # In the order of growing subtrees, which is the order of completion.
    for child in tree.children:
        receives = [transport.start_receive(landed, child) for landed in theirs]
        for part, landed, receive in zip(parts, theirs, receives, strict=True):
            transport.wait((receive,), deadline)
            combine(part, landed)
    if tree.parent is not None:
        sends = [transport.start_send(part, tree.parent) for part in parts]
        transport.wait(sends, deadline)


def reduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `reduce`."""
    levels = layout.size.bit_length() - 1  # most one bits in the number of a rank
    return _levels_seconds(nbytes, layout, levels) + levels * layout.combined(nbytes)


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks: reduce, then broadcast."""
    reduce(transport, buffer, op, 0, deadline)
    broadcast(transport, buffer, 0, deadline)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `allreduce`.

    On one node: log P (2 alpha + S (2 beta + gamma)).
    Between nodes: one message per node and level.
    """
    return reduce_seconds(nbytes, layout) + broadcast_seconds(nbytes, layout)


def gather(
    transport: Transport, own: Array, counts: Sequence[int], root: int, deadline: Deadline
) -> Array | None:
    """Collect every rank's array, shape (counts[rank],), on the root.

    All ranks pass the same counts.

    Returns:
        shape (sum(counts),) in rank order on the root, None elsewhere.
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
        # All children at once, because each has its own place.
        receives += [transport.start_receive(s, child) for s in ring.slices(part)]
    transport.wait(receives, deadline)
    if tree.parent is not None:
        parent = tree.parent
        sends = [transport.start_send(s, parent) for s in ring.slices(collected)]
        transport.wait(sends, deadline)
        return None
    # The subtree of the root begins with the root, and the result with rank 0.
    behind = sum(counts[root:])  # elements of ranks root .. size - 1, which come before rank 0's
    return np.concatenate([collected[behind:], collected[:behind]]) if root else collected


def scatter(
    transport: Transport,
    buffer: Array | None,
    counts: Sequence[int],
    root: int,
    dtype: np.dtype[Any],
    deadline: Deadline,
) -> Array:
    """Send every rank its part of the root's buffer, in rank order.

    The buffer, shape (sum(counts),), is used on the root only; all ranks pass the same counts and
    dtype.

    Returns:
        a new array, shape (counts[rank],).
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
    # Without a copy the result would keep the elements of the subtree alive, or be the caller's
    # memory.
    return own.copy() if own.size < held.size or held is buffer else own


def scatter_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `scatter` or `gather`: a level has half the bytes above."""
    machine, nodes, per_node = layout.machine, layout.num_nodes, layout.per_node
    away = nbytes * (nodes - 1) / nodes * machine.network.beta
    inside = nbytes / nodes * (per_node - 1) / per_node * machine.node.beta
    return _levels_seconds(0, layout, (layout.size - 1).bit_length()) + away + inside


def _subtree(transport: Transport, span: int, counts: Sequence[int]) -> tuple[dict[int, int], int]:
    """Return the layout of a subtree's elements: those of `span` ranks, from this one on.

    Returns:
        offset of each of these ranks' elements, and the number of all elements.
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
    """Receive the elements of this rank's subtree, and send each child those of its subtree.

    `starts` gives the ranks' offsets in `held`, in rank order from the root or from rank 0. A
    message never spans the last rank's elements and the first one's.
    """
    size = transport.size
    tree = topology.binomial_tree(transport.rank, size, root)

    def parts(first: int, span: int) -> list[Array]:
        # A subtree may wrap around from the last rank to rank 0.
        runs = topology.unwrapped(first, span, size)
        totals = [sum(counts[run.start : run.stop]) for run in runs]
        begins = [starts[run.start] for run in runs]
        whole = [held[at : at + total] for at, total in zip(begins, totals, strict=True)]
        return [s for part in whole for s in ring.slices(part)]

    if tree.parent is not None:
        into = parts(transport.rank, tree.span)
        transport.wait([transport.start_receive(p, tree.parent) for p in into], deadline)
    sends = []
    # The largest subtree first, as in `broadcast`.
    for child in reversed(tree.children):
        span = topology.binomial_tree(child, size, root).span
        sends += [transport.start_send(p, child) for p in parts(child, span)]
    transport.wait(sends, deadline)


def barrier(transport: Transport, deadline: Deadline) -> None:
    """Return when every rank has entered."""
    # A token of one byte, because messages must not be empty.
    token = np.zeros(1, np.uint8)
    allreduce(transport, token, reduction.MAX, deadline)


def barrier_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `barrier`."""
    return 2 * _levels_seconds(0, layout, (layout.size - 1).bit_length())
