"""Which algorithm an operation uses: the table of all, and how one of them is picked.

With `algorithm="auto"` ranks of one node that share memory meet in the node engine, which beats
messages at every size that was measured. Elsewhere the cost model decides (`layout`).

MPI's own ("native") is never picked: how long it takes is not known from alpha, beta and gamma, and
"auto" promises what it may not keep: the same bits on all ranks and in every run, a deadline that
names who is missing, any size, every dtype and op. Who wants it says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from collectives.algorithms import halving, hierarchical, native, ring, rotation, tree
from collectives.algorithms.layout import Layout
from collectives.node import engine as node

__all__ = [
    "ALGORITHMS",
    "TABLE",
    "Algorithm",
    "Layout",
    "automatic",
    "check",
    "choose",
    "engine_for",
    "estimate",
    "pick",
    "switch_points",
]


class Algorithm(NamedTuple):
    """How an operation is carried out.

    Attributes:
        run: the function over a `Transport` (over `Levels` where it is hierarchical); None in the
            node engine, which needs no messages.
        seconds: what it should take for some bytes in a layout; None where only MPI knows.
    """

    run: Callable[..., Any] | None
    seconds: Callable[[float, Layout], float] | None


def _reduced(nbytes: float, layout: Layout) -> float:
    return node.reduce_seconds(nbytes, layout.size, layout.machine.shared)


def _published(nbytes: float, layout: Layout) -> float:
    return node.publish_seconds(nbytes, layout.machine.shared)


def _met(nbytes: float, layout: Layout) -> float:
    return layout.machine.shared.alpha


TABLE: dict[str, dict[str, Algorithm]] = {
    "allreduce": {
        "node": Algorithm(None, _reduced),
        "ring": Algorithm(ring.allreduce, ring.allreduce_seconds),
        "tree": Algorithm(tree.allreduce, tree.allreduce_seconds),
        "halving": Algorithm(halving.allreduce, halving.allreduce_seconds),
        "hierarchical": Algorithm(hierarchical.allreduce, hierarchical.allreduce_seconds),
        "native": Algorithm(native.allreduce, None),
    },
    "reduce": {
        "node": Algorithm(None, _reduced),
        "tree": Algorithm(tree.reduce, tree.reduce_seconds),
        "native": Algorithm(native.reduce, None),
    },
    "reduce_scatter": {
        "node": Algorithm(None, _reduced),
        "ring": Algorithm(ring.reduce_scatter, ring.reduce_scatter_seconds),
        "halving": Algorithm(halving.reduce_scatter, halving.reduce_scatter_seconds),
        "native": Algorithm(native.reduce_scatter, None),
    },
    "broadcast": {
        "node": Algorithm(None, _published),
        "tree": Algorithm(tree.broadcast, tree.broadcast_seconds),
        "ring": Algorithm(ring.broadcast, ring.broadcast_seconds),
        "hierarchical": Algorithm(hierarchical.broadcast, hierarchical.broadcast_seconds),
        "native": Algorithm(native.broadcast, None),
    },
    "gather": {
        "node": Algorithm(None, _published),
        "tree": Algorithm(tree.gather, tree.scatter_seconds),
        "native": Algorithm(native.gather, None),
    },
    "allgather": {
        "node": Algorithm(None, _published),
        "ring": Algorithm(ring.allgather, ring.allgather_seconds),
        "halving": Algorithm(halving.allgather, halving.allgather_seconds),
        "native": Algorithm(native.allgather, None),
    },
    "scatter": {
        "node": Algorithm(None, _published),
        "tree": Algorithm(tree.scatter, tree.scatter_seconds),
        "native": Algorithm(native.scatter, None),
    },
    "alltoall": {
        "node": Algorithm(None, _published),
        "rotation": Algorithm(rotation.alltoall, rotation.alltoall_seconds),
        "native": Algorithm(native.alltoall, None),
    },
    "barrier": {
        "node": Algorithm(None, _met),
        "tree": Algorithm(tree.barrier, tree.barrier_seconds),
        "hierarchical": Algorithm(hierarchical.barrier, hierarchical.barrier_seconds),
        "native": Algorithm(native.barrier, None),
    },
}

# The functions of those that send messages.
ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    operation: {name: way.run for name, way in ways.items() if way.run is not None}
    for operation, ways in TABLE.items()
}

# Sizes beyond which "auto" stays at what it picks there.
_MOST_BYTES = 1 << 40


def estimate(operation: str, nbytes: int, layout: Layout) -> dict[str, float]:
    """Return the seconds that every algorithm should take, fastest first.

    Among equals the one that is listed first in `TABLE` comes first. MPI's own ("native") is not
    among them: what it does is its own choice. Neither are operations between ranks of one node by
    "hierarchical", and between nodes by "node".

    Args:
        operation: a key of `TABLE`.
        nbytes: S, of the whole array; not used for a barrier.
        layout: the ranks and their links.

    Raises:
        ValueError: there is no such operation, or a negative size.
    """
    if operation not in TABLE:
        raise ValueError(
            f"estimate: no such operation, expected one of {' '.join(TABLE)}, got {operation!r}"
        )
    if nbytes < 0:
        raise ValueError(f"estimate: expected bytes >= 0, got {nbytes}")
    possible = {"node": layout.num_nodes == 1 < layout.size, "hierarchical": layout.is_hierarchical}
    times = {
        name: way.seconds(nbytes, layout)
        for name, way in TABLE[operation].items()
        if way.seconds is not None and possible.get(name, True)
    }
    # Equal formulas may differ in the last digits, summed in another order.
    return dict(sorted(times.items(), key=lambda item: float(f"{item[1]:.9g}")))


def pick(operation: str, nbytes: int, layout: Layout) -> str:
    """Return the algorithm by messages that should be the fastest: a look-up in a table."""
    table = layout.picks.get(operation)
    if table is None:
        table = layout.picks[operation] = switch_points(operation, layout)
    sizes, names = table
    return names[bisect_right(sizes, nbytes)]


@lru_cache(256)  # groups of the same layout share their tables
def switch_points(operation: str, layout: Layout) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return at which sizes the pick changes, and what it is between them.

    Returns:
        Sizes in bytes, ascending, and one name more: `names[i]` holds from `sizes[i - 1]` on and
        below `sizes[i]`. Where a pick holds for less than an octave it may be missed.
    """

    def fastest(nbytes: int) -> str:
        return next(name for name in estimate(operation, nbytes, layout) if name != "node")

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
    known = ["auto", *TABLE[operation]]
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
        operation: a key of `TABLE`.
        algorithm: one of the names listed there for the operation, or "auto".
        nbytes: the size of the whole array, equal on all ranks; not used where "auto" has only one
            algorithm to pick.
        layout: of the group, and its links.
    """
    return pick(operation, nbytes, layout) if algorithm == "auto" else algorithm


def automatic(operation: str, nbytes: int, layout: Layout) -> str:
    """Return what "auto" does where ranks of one node share memory: "node", or as `choose`."""
    alone = layout.num_nodes == 1 < layout.size
    return "node" if alone else choose(operation, "auto", nbytes, layout)
