"""Double binary tree: two trees, each for half of the buffer, for large arrays in few hops.

In a binary tree inner ranks send everything to two children, and leaves send nothing. Two trees, in
which a rank with children in one is a leaf of the other, balance the load: all ranks send and
receive the same amount. The root is above both. For 7 ranks and root 0:

    first half         0              second half        0
                       |                                 |
                       4                                 3
                    /     \\                           /     \\
                   2       6                         1       5
                 /   \\    /                         /   \\    /
                1     3  5                         6     2  4

A *broadcast* runs down both trees at once, and a *reduce* runs up. Ranks forward slices as they
arrive. An all-reduce is a reduce and a broadcast.

Cost per rank:

    operation  messages sent  bytes sent  scratch
    allreduce  up to 4        up to 2 S   S
    reduce     2              S           S
    broadcast  up to 2        up to S     none

A broadcast or a reduce takes about log2 P hops more than its number of slices. Few messages cross
between distant ranks, which helps if the upper switches are oversubscribed.

Order: a rank adds its left child's part, then its right child's; all ranks get the same bits, in
every run.

Source: P. Sanders, J. Speck, J. L. Traff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009), sections 2 and 3.
"""

from __future__ import annotations

from itertools import pairwise

from collectives.algorithms import ring
from collectives.algorithms.cost_model import RankLayout
from collectives.arrays import device, reduction
from collectives.arrays.host_arrays import Array
from collectives.core import topology
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = [
    "allreduce",
    "allreduce_seconds",
    "broadcast",
    "broadcast_seconds",
    "reduce",
    "reduce_seconds",
]

# Slices of a half per level of a tree: the latency of the first slice is then a quarter of the
# whole time. Slices below the minimum size cost programs as much time as the line.
_SLICES_PER_LEVEL = 4
_LEAST_SLICE_BYTES = 1 << 15


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    # A rank is in both trees, with other neighbours.
    trees = topology.double_tree(transport.rank, transport.size, root)
    halves = _halves(buffer, transport.size)
    receives: list[dict[int, PendingMessage]] = [{}, {}]
    # All receives first: slices arrive while earlier ones are forwarded.
    for number, at in _in_turns(halves):
        parent = trees[number].parent
        if parent is not None:
            receives[number][at] = transport.start_receive(halves[number][at], parent)
    sends: list[PendingMessage] = []
    # The root has no parent, and begins to send at once.
    for number, at in _in_turns(halves):
        children = trees[number].children
        if children and at in receives[number]:
            # Slice by slice: a child waits for nothing but this slice.
            transport.wait((receives[number][at],), deadline)
        sends += [transport.start_send(halves[number][at], child) for child in children]
    transport.wait([*receives[0].values(), *receives[1].values(), *sends], deadline)


def broadcast_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `broadcast`."""
    return _seconds(nbytes, layout, 0.0)


def reduce(
    transport: Transport, buffer: Array, op: reduction.Op, root: int, deadline: Deadline
) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks on the root, in place.

    Afterwards the buffer holds partial results on the other ranks.
    """
    trees = topology.double_tree(transport.rank, transport.size, root)
    halves = _halves(buffer, transport.size)
    combine = reduction.combine(op)
    # Memory for both children, because their slices arrive at the same time.
    halves_of_children = [
        [
            ring.scratch_views(device.empty(sum(p.size for p in half), buffer), half)
            for _ in tree.children
        ]
        for half, tree in zip(halves, trees, strict=True)
    ]
    # The order of `_in_turns` is equal on all ranks, so messages match.
    arriving = []  # in the order in which children send
    for number, at in _in_turns(halves):
        for child, parts in zip(trees[number].children, halves_of_children[number], strict=True):
            arriving.append(transport.start_receive(parts[at], child))
    # A slice that moves up one tree has passed a leaf, which is an inner rank of the other tree. So
    # ranks first send ahead from the tree in which they are leaves.
    free = [
        (halves[number][at], parent)
        for number, at in _in_turns(halves)
        if (parent := trees[number].parent) is not None and not trees[number].children
    ]
    # Twice the levels fill both trees from the leaves to the top.
    ahead = 2 * _levels(transport.size)
    sends = [transport.start_send(*each) for each in free[:ahead]]
    begun = len(sends)
    received = 0
    for number, at in _in_turns(halves):
        tree, part = trees[number], halves[number][at]
        for parts in halves_of_children[number]:
            transport.wait((arriving[received],), deadline)
            received += 1
            # Left child first, then the right one, in every slice.
            combine(part, parts[at])
        # A leaf sends from `free`, and the root sends nothing.
        if tree.children and tree.parent is not None:
            sends.append(transport.start_send(part, tree.parent))
            # One slice of the other tree for each forwarded one keeps both trees busy.
            sends += [transport.start_send(*each) for each in free[begun : begun + 1]]
            begun += 1
    sends += [transport.start_send(*each) for each in free[begun:]]
    transport.wait(sends, deadline)


def reduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `reduce`."""
    return _seconds(nbytes, layout, layout.combined(1.0))


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks: reduce, then broadcast."""
    reduce(transport, buffer, op, 0, deadline)
    broadcast(transport, buffer, 0, deadline)


def allreduce_seconds(nbytes: float, layout: RankLayout) -> float:
    """Return the modelled seconds of `allreduce`.

    On one node: 2 log P (alpha + 2 s beta + s gamma) + 2 S beta, with slices of s bytes.
    Between nodes: k messages per node.
    """
    return reduce_seconds(nbytes, layout) + broadcast_seconds(nbytes, layout)


def _levels(size: int) -> int:
    """Return the number of hops from the root to the farthest leaf."""
    return (size - 1).bit_length()


def _slice_bytes(nbytes: float, size: int) -> float:
    wanted = nbytes / 2 / (_SLICES_PER_LEVEL * max(1, _levels(size)))
    return min(ring.SLICE_BYTES, max(_LEAST_SLICE_BYTES, wanted))


def _halves(buffer: Array, size: int) -> list[list[Array]]:
    """Cut both halves of a buffer into slices."""
    length = max(1, int(_slice_bytes(buffer.nbytes, size)) // buffer.itemsize)
    bounds = topology.chunk_bounds(buffer.size, 2)
    return [
        [buffer[at : min(at + length, end)] for at in range(begin, end, length)]
        for begin, end in pairwise(bounds)
    ]


def _in_turns(halves: list[list[Array]]) -> list[tuple[int, int]]:
    """Return (half, number of the slice), slice by slice, in the order of their messages."""
    longest = max(map(len, halves))
    return [(half, at) for at in range(longest) for half in (0, 1) if at < len(halves[half])]


def _seconds(nbytes: float, layout: RankLayout, gamma: float) -> float:
    """Return the time of all slices, with two children at every rank.

    Args:
        nbytes: bytes of the buffer.
        layout: the ranks and their links.
        gamma: seconds per byte that is combined.
    """
    if layout.size == 1:
        return 0.0
    own = min(nbytes / 2, _slice_bytes(nbytes, layout.size))
    more = max(0.0, nbytes / 2 / own - 1) if own else 0.0
    hops, follows = [], []
    for link, programs, at_once in layout.links():
        # Few edges of a tree leave a node: above the edges inside it there are two per half.
        line = 2 * own * link.beta * min(at_once, 2)
        hops.append(link.alpha + programs + max(0.0, line - programs) + own * gamma)
        follows.append(max(line, 4 * programs + 2 * own * gamma))
    return _levels(layout.size) * max(hops) + more * max(follows)
