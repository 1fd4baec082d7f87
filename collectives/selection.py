"""Which algorithm an operation uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.algorithms import native, ring, tree

__all__ = ["ALGORITHMS", "choose"]

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    "allreduce": {"ring": ring.allreduce, "tree": tree.allreduce, "native": native.allreduce},
    "reduce": {"tree": tree.reduce, "native": native.reduce},
    "reduce_scatter": {"ring": ring.reduce_scatter, "native": native.reduce_scatter},
    "broadcast": {"tree": tree.broadcast, "native": native.broadcast},
    "gather": {"tree": tree.gather, "native": native.gather},
    "allgather": {"ring": ring.allgather, "native": native.allgather},
    "barrier": {"tree": tree.barrier, "native": native.barrier},
}

# Bytes up to which an all-reduce takes 2 log2 P rounds of whole arrays rather than 2 (P - 1)
# rounds of chunks.
TREE_BYTES = 1 << 12


def choose(operation: str, algorithm: str, nbytes: int) -> Callable[..., Any]:
    """Return the function that carries out one call.

    Args:
        operation: a key of `ALGORITHMS`.
        algorithm: one of the names listed there for the operation, or "auto".
        nbytes: the size of the array, equal on all ranks.

    Raises:
        ValueError: the operation has no algorithm of that name.
    """
    known = ALGORITHMS[operation]
    if algorithm == "auto":
        if operation == "allreduce":
            return known["tree" if nbytes <= TREE_BYTES else "ring"]
        return next(iter(known.values()))
    if algorithm not in known:
        raise ValueError(
            f"{operation}: unknown algorithm, expected one of auto {' '.join(known)}, "
            f"got {algorithm!r}"
        )
    return known[algorithm]
