"""Which algorithm an operation uses.

With `algorithm="auto"` ranks of one node that share memory meet in the node engine, which beats
messages at every size that was measured. Elsewhere the cost model decides
(`collectives.algorithms.costs`).

MPI's own ("native") is never picked: how long it takes is not known from alpha, beta and gamma, and
"auto" promises what it may not keep: the same bits on all ranks and in every run, a deadline that
names who is missing, any size, every dtype and op. Who wants it says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from collectives.algorithms import costs, halving, hierarchical, native, ring, rotation, tree
from collectives.links import DEFAULT, Machine
from collectives.node import engine as node

__all__ = [
    "ALGORITHMS",
    "Layout",
    "automatic",
    "check",
    "choose",
    "engine_for",
    "switch_points",
]

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    "allreduce": {
        "ring": ring.allreduce,
        "tree": tree.allreduce,
        "halving": halving.allreduce,
        "hierarchical": hierarchical.allreduce,
        "native": native.allreduce,
    },
    "reduce": {"tree": tree.reduce, "native": native.reduce},
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving": halving.reduce_scatter,
        "native": native.reduce_scatter,
    },
    "broadcast": {
        "tree": tree.broadcast,
        "ring": ring.broadcast,
        "hierarchical": hierarchical.broadcast,
        "native": native.broadcast,
    },
    "gather": {"tree": tree.gather, "native": native.gather},
    "allgather": {"ring": ring.allgather, "halving": halving.allgather, "native": native.allgather},
    "scatter": {"tree": tree.scatter, "native": native.scatter},
    "alltoall": {"rotation": rotation.alltoall, "native": native.alltoall},
    "barrier": {
        "tree": tree.barrier,
        "hierarchical": hierarchical.barrier,
        "native": native.barrier,
    },
}

# Sizes beyond which "auto" stays at what it picks there.
_MOST_BYTES = 1 << 40


class Layout:
    """What "auto" goes by: how the ranks of a group are spread, and what their links cost.

    Both are equal on all ranks, so that all pick the same algorithm.

    Args:
        size: how many ranks there are.
        num_nodes: on how many nodes.
        machine: the links, as the ranks have agreed on them.
    """

    def __init__(self, size: int, num_nodes: int, machine: Machine = DEFAULT) -> None:
        self.size = size
        self.num_nodes = num_nodes
        self.machine = machine
        self._tables: dict[str, tuple[Sequence[int], Sequence[str]]] = {}

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, and several ranks on some of them."""
        return 1 < self.num_nodes < self.size

    def pick(self, operation: str, nbytes: int) -> str:
        """Return the algorithm by messages that should be the fastest: a look-up in a table."""
        table = self._tables.get(operation)
        if table is None:
            shape = costs.Shape(self.size, self.num_nodes)
            table = self._tables[operation] = switch_points(operation, shape, self.machine)
        sizes, names = table
        return names[bisect_right(sizes, nbytes)]


@lru_cache(256)  # groups of the same layout share their tables
def switch_points(
    operation: str, shape: costs.Shape, machine: Machine
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return at which sizes the pick changes, and what it is between them.

    Returns:
        Sizes in bytes, ascending, and one name more: `names[i]` holds from `sizes[i - 1]` on and
        below `sizes[i]`. Where a pick holds for less than an octave it may be missed.
    """

    def fastest(nbytes: int) -> str:
        times = costs.estimate(operation, nbytes, shape, machine)
        return next(name for name in times if name != "node")

    sizes: list[int] = []
    names = [fastest(0)]
    low = 0
    high = 1
    while high <= _MOST_BYTES:
        while fastest(high) != names[-1]:
            below, above = low, high
            while above - below > 1:
                middle = (below + above) // 2
                if fastest(middle) == names[-1]:
                    below = middle
                else:
                    above = middle
            sizes.append(above)
            names.append(fastest(above))
            low = above
        low, high = high, 2 * high
    return tuple(sizes), tuple(names)


def check(operation: str, algorithm: str, engine: node.Engine | None) -> None:
    """Refuse an algorithm that the operation does not have here.

    Raises:
        ValueError: there is none of that name, or "node" where ranks do not share memory.
    """
    known = ["auto", "node", *ALGORITHMS[operation]]
    if algorithm not in known:
        raise ValueError(
            f"{operation}: unknown algorithm, expected one of {' '.join(known)}, got {algorithm!r}"
        )
    if algorithm == "node" and engine is None:
        raise ValueError(
            f"{operation}: algorithm 'node' needs two or more ranks, all on one node, that share "
            "memory"
        )


def engine_for(engine: node.Engine | None, algorithm: str) -> node.Engine | None:
    """Return the node engine if the call goes through it, None if it goes by messages."""
    return engine if algorithm in ("auto", "node") else None


def choose(operation: str, algorithm: str, nbytes: int, layout: Layout) -> str:
    """Return the name of the algorithm that carries out one call by messages.

    Args:
        operation: a key of `ALGORITHMS`.
        algorithm: one of the names listed there for the operation, or "auto".
        nbytes: the size of the whole array, equal on all ranks; not used where "auto" has only one
            algorithm to pick.
        layout: of the group, and its links.
    """
    return layout.pick(operation, nbytes) if algorithm == "auto" else algorithm


def automatic(operation: str, nbytes: int, layout: Layout) -> str:
    """Return what "auto" does where ranks of one node share memory: "node", or as `choose`."""
    alone = layout.num_nodes == 1 < layout.size
    return "node" if alone else choose(operation, "auto", nbytes, layout)
