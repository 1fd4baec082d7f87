"""Who talks to whom and when, as pure functions of integers.

Nothing here sends or allocates anything, so every schedule is tested for any number of ranks
without MPI. Words: `rank` in `0 .. size - 1`; a `chunk` is a rank's share of a buffer, and chunk
`c` belongs to rank `c`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Nodes",
    "RingStep",
    "Tree",
    "binomial_tree",
    "chunk_bounds",
    "nodes",
    "ring_allgather",
    "ring_neighbours",
    "ring_reduce_scatter",
]


def chunk_bounds(count: int, size: int) -> list[int]:
    """Cut `count` elements into `size` chunks whose lengths differ by at most one.

    Returns:
        `size + 1` offsets; chunk `c` is `[bounds[c], bounds[c + 1])`, longer chunks first.

    Example:
        >>> chunk_bounds(7, 3)
        [0, 3, 5, 7]
    """
    length, longer = divmod(count, size)
    return [c * length + min(c, longer) for c in range(size + 1)]


class RingStep(NamedTuple):
    """One step of a ring: which chunk goes to the right while which one comes from the left."""

    send: int
    receive: int


def ring_neighbours(rank: int, size: int) -> tuple[int, int]:
    """Return the ranks to the left (received from) and to the right (sent to)."""
    return (rank - 1) % size, (rank + 1) % size


def ring_reduce_scatter(rank: int, size: int) -> Iterator[RingStep]:
    """Yield the `size - 1` steps after which chunk `rank` holds every rank's contribution.

    Chunk `c` starts at rank `c + 1` and travels right, gaining one contribution at each rank, until
    it reaches its owner `c`.
    """
    for step in range(size - 1):
        yield RingStep(send=(rank - step - 1) % size, receive=(rank - step - 2) % size)


def ring_allgather(rank: int, size: int) -> Iterator[RingStep]:
    """Yield the `size - 1` steps that bring every rank's own chunk to all ranks."""
    for step in range(size - 1):
        yield RingStep(send=(rank - step) % size, receive=(rank - step - 1) % size)


class Tree(NamedTuple):
    """A rank's place in a binomial tree.

    `children` are in the order of growing subtrees. `span` is the number of ranks in the subtree of
    this rank: counted from the root, they are this rank and the `span - 1` ranks behind it.
    """

    parent: int | None
    children: tuple[int, ...]
    span: int


def binomial_tree(rank: int, size: int, root: int) -> Tree:
    """Place `rank` in the binomial tree of `size` ranks that hangs from `root`.

    Counted from the root, rank `v` has as parent `v` without its lowest set bit, and as children
    `v + 1, v + 2, v + 4, ...` below that bit. The tree has `ceil(log2(size))` levels.

    Example:
        >>> binomial_tree(0, 6, root=0)
        Tree(parent=None, children=(1, 2, 4), span=6)
        >>> binomial_tree(4, 6, root=0)
        Tree(parent=0, children=(5,), span=2)
    """
    place = (rank - root) % size
    reach = place & -place if place else 1 << size.bit_length()  # ranks below the lowest set bit
    children = []
    distance = 1
    while distance < reach and place + distance < size:
        children.append((place + distance + root) % size)
        distance *= 2
    parent = None if place == 0 else ((place & (place - 1)) + root) % size
    return Tree(parent, tuple(children), min(reach, size - place))


class Nodes(NamedTuple):
    """Where one rank sits: its place on its node, and its node's place among the nodes."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


def nodes(leaders: Sequence[int], rank: int) -> Nodes:
    """Number the nodes in the order of their lowest ranks.

    Args:
        leaders: for every rank, any integer that is the same exactly for the ranks of one node.
        rank: the rank to place.

    Example:
        >>> nodes([0, 0, 2, 2, 2], rank=3)
        Nodes(local_rank=1, local_size=3, node_rank=1, num_nodes=2)
    """
    own = leaders[rank]
    order = list(dict.fromkeys(leaders))
    return Nodes(
        local_rank=leaders[:rank].count(own),
        local_size=leaders.count(own),
        node_rank=order.index(own),
        num_nodes=len(order),
    )
