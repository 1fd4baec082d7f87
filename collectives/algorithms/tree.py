"""Binomial tree algorithms: ceil(log2 P) rounds, whole buffers, best for small arrays.

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

Cost: at most ceil(log2 P) messages of S bytes at the root, one at a leaf. A gather moves
S (P - 1)/P bytes into the root, where S is the size of the result.

Order: a rank adds its children in the order of growing subtrees, so the sum is the same tree of
pairs in every run.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), sections 4.2 and 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives import reduction, topology
from collectives.arrays import Array
from collectives.transport import Deadline, Transport

__all__ = ["allreduce", "barrier", "broadcast", "gather", "reduce"]


def broadcast(transport: Transport, buffer: Array, root: int, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the root's, in place."""
    tree = topology.binomial_tree(transport.rank, transport.size, root)
    if tree.parent is not None:
        transport.receive(buffer, tree.parent, deadline)
    largest_first = reversed(tree.children)
    transport.wait([transport.start_send(buffer, child) for child in largest_first], deadline)


def reduce(
    transport: Transport, buffer: Array, op: reduction.Op, root: int, deadline: Deadline
) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks on the root, in place.

    On the other ranks the buffer holds the reduction over their subtree afterwards.
    """
    tree = topology.binomial_tree(transport.rank, transport.size, root)
    combine = reduction.combine(op)
    scratch = np.empty_like(buffer) if tree.children else None
    for child in tree.children:
        assert scratch is not None
        transport.receive(scratch, child, deadline)
        combine(buffer, scratch)
    if tree.parent is not None:
        transport.send(buffer, tree.parent, deadline)


def allreduce(transport: Transport, buffer: Array, op: reduction.Op, deadline: Deadline) -> None:
    """Replace `buffer`, shape (n,), by the reduction over all ranks: reduce, then broadcast."""
    reduce(transport, buffer, op, 0, deadline)
    broadcast(transport, buffer, 0, deadline)


def gather(
    transport: Transport, own: Array, counts: Sequence[int], root: int, deadline: Deadline
) -> Array | None:
    """Collect every rank's array on the root.

    Args:
        transport: the ranks.
        own: shape (counts[rank],), this rank's elements.
        counts: the number of elements of every rank, equal on all ranks.
        root: who gets them.
        deadline: the limit of every wait.

    Returns:
        shape (sum(counts),) in the order of the ranks on the root, None elsewhere.
    """
    size = transport.size
    tree = topology.binomial_tree(transport.rank, size, root)
    # A subtree holds consecutive ranks counted from the root, so its elements are one run.
    members = [(transport.rank + i) % size for i in range(tree.span)]
    starts = dict(
        zip(members, np.cumsum([0] + [counts[m] for m in members]).tolist(), strict=False)
    )
    collected = np.empty(sum(counts[m] for m in members), own.dtype)
    collected[: own.size] = own
    receives = []
    for child in tree.children:
        span = topology.binomial_tree(child, size, root).span
        length = sum(counts[(child + i) % size] for i in range(span))
        part = collected[starts[child] : starts[child] + length]
        receives.append(transport.start_receive(part, child))
    transport.wait(receives, deadline)
    if tree.parent is not None:
        transport.send(collected, tree.parent, deadline)
        return None
    behind = sum(counts[root:])  # elements of the ranks root .. size - 1, which stand in front
    return np.concatenate([collected[behind:], collected[:behind]]) if root else collected


def barrier(transport: Transport, deadline: Deadline) -> None:
    """Return when every rank has entered."""
    token = np.zeros(1, np.uint8)
    allreduce(transport, token, reduction.MAX, deadline)
