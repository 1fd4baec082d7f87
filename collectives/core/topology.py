"""Communication schedules as pure functions of integers: who talks to whom and when.

Nothing here sends or allocates anything, so every schedule is tested for any number of ranks
without MPI. Terms: `rank` is in `0 .. size - 1`; a `chunk` is a rank's share of a buffer, and chunk
`c` belongs to rank `c`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "BinaryTree",
    "Doubling",
    "HalvingStep",
    "Nodes",
    "PrefixStep",
    "Rails",
    "RingStep",
    "Tree",
    "binomial_tree",
    "chunk_bounds",
    "double_tree",
    "doubling",
    "doubling_allgather",
    "halving_reduce_scatter",
    "nodes",
    "prefix",
    "rails",
    "ring_allgather",
    "ring_neighbours",
    "ring_reduce_scatter",
    "unwrapped",
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
    """One step of a ring: the chunk sent to the right, and the chunk received from the left."""

    send: int
    receive: int


def ring_neighbours(rank: int, size: int, distance: int = 1) -> tuple[int, int]:
    """Return the left rank, the source, and the right rank, the destination."""
    return (rank - distance) % size, (rank + distance) % size


def ring_reduce_scatter(rank: int, size: int) -> Iterator[RingStep]:
    """Yield the `size - 1` steps after which chunk `rank` holds every rank's contribution.

    Chunk `c` starts at rank `c + 1` and travels right, gaining one contribution at each rank, until
    it reaches its owner `c`.
    """
    for step in range(size - 1):
        # In the first step the chunk of the left neighbour, which then travels all around.
        yield RingStep(send=(rank - step - 1) % size, receive=(rank - step - 2) % size)


def ring_allgather(rank: int, size: int) -> Iterator[RingStep]:
    """Yield the `size - 1` steps after which all ranks have every rank's own chunk."""
    for step in range(size - 1):
        yield RingStep(send=(rank - step) % size, receive=(rank - step - 1) % size)


class HalvingStep(NamedTuple):
    """One step of a halving: a run of `chunks` chunks is sent to `dest`, another received.

    `send` and `receive` are the first chunks of the runs, which wrap around to chunk 0 after the
    last chunk (see `unwrapped`).
    """

    dest: int
    source: int
    send: int
    receive: int
    chunks: int


def halving_reduce_scatter(rank: int, size: int) -> Iterator[HalvingStep]:
    """Yield the `ceil(log2(size))` steps after which chunk `rank` has all contributions.

    Before a step a rank is in charge of the `reach` chunks from its own on. It sends the farther
    half to the rank `distance` to the right, where they are the first ones, and stays in charge of
    `distance = ceil(reach / 2)` chunks.

    Example:
        >>> [(step.dest, step.send, step.chunks) for step in halving_reduce_scatter(0, 5)]
        [(3, 3, 2), (2, 2, 1), (1, 1, 1)]
    """
    reach = size
    while reach > 1:
        # Rounded up, so that the rank keeps the middle chunk of an odd number.
        distance = (reach + 1) // 2
        yield HalvingStep(
            dest=(rank + distance) % size,
            source=(rank - distance) % size,
            send=(rank + distance) % size,
            receive=rank,
            chunks=reach - distance,
        )
        reach = distance


def doubling_allgather(rank: int, size: int) -> Iterator[HalvingStep]:
    """Yield the `ceil(log2(size))` steps after which all ranks have every rank's own chunk.

    They are the steps of `halving_reduce_scatter` in reverse order and direction.
    """
    # A reversed step sends what the other received.
    for step in reversed(list(halving_reduce_scatter(rank, size))):
        yield HalvingStep(
            dest=step.source,
            source=step.dest,
            send=step.receive,
            receive=step.send,
            chunks=step.chunks,
        )


def unwrapped(first: int, count: int, size: int) -> list[range]:
    """Split a run of `count <= size` chunks (or ranks) from `first` on where it wraps around to 0.

    Example:
        >>> unwrapped(3, 4, size=5)
        [range(3, 5), range(0, 2)]
    """
    # The second range is empty if the run does not wrap around.
    parts = [range(first, min(first + count, size)), range(first + count - size)]
    return [part for part in parts if part]


class Doubling(NamedTuple):
    """A rank's part in a recursive doubling.

    A rank with a `proxy` sends its contribution to it first, receives the result last, and has no
    partners. Other ranks receive the contribution of their `guest`, if they have one, and exchange
    everything with each partner in turn. In a pair, the contributions of the lower rank come first
    in the order of the result.
    """

    proxy: int | None
    guest: int | None
    partners: tuple[int, ...]


@functools.lru_cache  # used by every small operation
def doubling(rank: int, size: int) -> Doubling:
    """Return the part of `rank` in a recursive doubling among `size` ranks.

    The largest power of two of them is active. Each of the other `size - 2^k` ranks, the odd ones
    among the first ranks, has its left neighbour as proxy.

    Example:
        >>> [doubling(rank, 3) for rank in range(3)]  # doctest: +NORMALIZE_WHITESPACE
        [Doubling(proxy=None, guest=1, partners=(2,)),
         Doubling(proxy=0, guest=None, partners=()),
         Doubling(proxy=None, guest=None, partners=(0,))]
    """
    # The largest power of two that is not above `size`.
    active = 1 << (size.bit_length() - 1)
    others = size - active
    if rank < 2 * others and rank % 2:
        return Doubling(rank - 1, None, ())
    # Positions among the active ranks, without the guests.
    place = rank // 2 if rank < 2 * others else rank - others
    # The partner of a round differs in one bit of the position.
    places = [place ^ (1 << level) for level in range(active.bit_length() - 1)]
    # Back from positions to ranks.
    partners = tuple(2 * p if p < others else p + others for p in places)
    return Doubling(None, rank + 1 if rank < 2 * others else None, partners)


class PrefixStep(NamedTuple):
    """One round of a prefix reduction: the rank to receive from, and the rank to send to."""

    source: int | None
    dest: int | None


def prefix(rank: int, size: int) -> Iterator[PrefixStep]:
    """Yield the rounds after which a rank has combined all ranks before it; distances double.

    Example:
        >>> list(prefix(1, 3))
        [PrefixStep(source=0, dest=2), PrefixStep(source=None, dest=None)]
    """
    distance = 1
    while distance < size:
        source, dest = rank - distance, rank + distance
        yield PrefixStep(source if source >= 0 else None, dest if dest < size else None)
        distance *= 2


class Tree(NamedTuple):
    """A rank's position in a binomial tree.

    `children` are in the order of growing subtrees. `span` is the number of ranks in the subtree of
    this rank: counted from the root, this rank and the `span - 1` ranks after it.
    """

    parent: int | None
    children: tuple[int, ...]
    span: int


def binomial_tree(rank: int, size: int, root: int) -> Tree:
    """Return the position of `rank` in the binomial tree of `size` ranks with this root.

    Counted from the root, the parent of rank `v` is `v` without its lowest set bit, and its
    children are `v + 1, v + 2, v + 4, ...` below that bit. The tree has `ceil(log2(size))` levels.

    Example:
        >>> binomial_tree(0, 6, root=0)
        Tree(parent=None, children=(1, 2, 4), span=6)
        >>> binomial_tree(4, 6, root=0)
        Tree(parent=0, children=(5,), span=2)
    """
    place = (rank - root) % size
    # The root is above all: its reach is the next power of two.
    reach = place & -place if place else 1 << size.bit_length()  # ranks below the lowest set bit
    children = []
    distance = 1
    while distance < reach and place + distance < size:
        children.append((place + distance + root) % size)
        distance *= 2
    parent = None if place == 0 else ((place & (place - 1)) + root) % size
    return Tree(parent, tuple(children), min(reach, size - place))


class BinaryTree(NamedTuple):
    """A rank's position in a binary tree: up to two children, the left one first."""

    parent: int | None
    children: tuple[int, ...]


def double_tree(rank: int, size: int, root: int) -> tuple[BinaryTree, BinaryTree]:
    """Return the positions of `rank` in two binary trees; only the root has children in both.

    The other ranks, counted from the root as 1, 2, ..., n, are in order in the first tree: a rank
    with a left child has an even number. In the second tree number i has the position of number
    i + 1 in the first, and number n that of number 1, a leaf.

    Example:
        >>> double_tree(2, 4, root=0)  # doctest: +NORMALIZE_WHITESPACE
        (BinaryTree(parent=0, children=(1, 3)),
         BinaryTree(parent=1, children=()))
    """
    number = (rank - root) % size
    others = size - 1
    trees = []
    for shift in (0, 1):
        if number == 0:
            parent, children = None, [_top(1, others)] if others else []
        else:
            # Numbers 1 .. n rotate by one in the second tree, so inner ranks become leaves.
            parent, children = _in_order((number + shift - 1) % others + 1, others)

        def ranked(place: int, shift: int = shift) -> int:
            # The inverse of that rotation, back to ranks.
            return (root + (place - shift - 1) % others + 1) % size

        above = root if parent == 0 else parent if parent is None else ranked(parent)
        trees.append(BinaryTree(above, tuple(ranked(child) for child in children)))
    return trees[0], trees[1]


def _in_order(place: int, count: int) -> tuple[int, list[int]]:
    """Return parent (0 at the top) and children of a number in the ordered tree of 1 .. count."""
    first, last, parent = 1, count, 0
    while (top := _top(first, last)) != place:
        parent = top
        first, last = (first, top - 1) if place < top else (top + 1, last)
    below = [(first, place - 1), (place + 1, last)]
    return parent, [_top(*each) for each in below if each[0] <= each[1]]


def _top(first: int, last: int) -> int:
    """Return the top of the tree of first .. last, where first - 1 is a multiple of its size."""
    # The largest power of two up to the number of ranks, so that the left subtree is full.
    return first - 1 + (1 << ((last - first + 1).bit_length() - 1))


class Nodes(NamedTuple):
    """Position of a rank on its node, and of its node among the nodes."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


def nodes(leaders: Sequence[int], rank: int) -> Nodes:
    """Return a rank's position; nodes are numbered in the order of their lowest ranks.

    Args:
        leaders: an integer per rank, equal for two ranks if and only if they share a node.
        rank: the rank.

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


class Rails(NamedTuple):
    """The ranks that one rank works with on each level of a hierarchical operation.

    `number` rails connect the nodes: rail `i` has the ranks with local rank `i`, one per node. The
    smallest node gives the number of rails.
    """

    number: int
    node: tuple[int, ...]  # the ranks of the same node, by local rank
    rail: tuple[int, ...] | None  # the ranks of the same rail, by node; None for further ranks


def rails(leaders: Sequence[int], rank: int) -> Rails:
    """Return the node and the rail of a rank; arguments as `nodes`.

    Example:
        >>> rails([0, 0, 2, 2, 2], rank=3)
        Rails(number=2, node=(2, 3, 4), rail=(1, 3))
    """
    members = _by_node(tuple(leaders))
    node = members[leaders[rank]]
    local_rank = node.index(rank)
    # All nodes must have a rank on each rail.
    number = min(map(len, members.values()))
    rail = tuple(m[local_rank] for m in members.values()) if local_rank < number else None
    return Rails(number, node, rail)


@functools.lru_cache(4)  # called by each of thousands of simulated ranks
def _by_node(leaders: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each node."""
    members: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        members.setdefault(leader, []).append(rank)
    return {leader: tuple(ranks) for leader, ranks in members.items()}
