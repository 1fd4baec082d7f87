"""Which algorithm an operation uses.

With `algorithm="auto"` ranks of one node that share memory meet in the node engine. Elsewhere the
size decides, by thresholds that stand with their measurements below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.algorithms import halving, hierarchical, native, node, ring, rotation, tree

__all__ = ["ALGORITHMS", "Layout", "check", "choose", "engine_for"]

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

# Bytes up to which messages cost more than what they carry, so that log2 P rounds beat P - 1.
# All-reduce by messages on 2 cores, halving / ring, in us: 2 ranks 4 KiB 62 / 93, 64 KiB 74 / 104,
# 128 KiB 75 / 73; 4 ranks 4 KiB 259 / 434, 64 KiB 289 / 400, 256 KiB 397 / 405.
FEW_ROUNDS_BYTES = 1 << 16


class Layout(NamedTuple):
    """How the ranks of a group are spread."""

    size: int
    num_nodes: int

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, and several ranks on some of them."""
        return 1 < self.num_nodes < self.size


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
        nbytes: the size of the whole array, equal on all ranks.
        layout: of the group.
    """
    known = ALGORITHMS[operation]
    if algorithm != "auto":
        return algorithm
    if layout.is_hierarchical and "hierarchical" in known:
        return "hierarchical"
    if "halving" in known:
        return "halving" if nbytes <= FEW_ROUNDS_BYTES else "ring"
    if operation == "broadcast" and nbytes >= ring.SLICE_BYTES * layout.size:
        return "ring"  # a slice for every link of the chain
    return next(iter(known))
