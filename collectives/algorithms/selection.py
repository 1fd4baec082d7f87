"""Table of all algorithms, and the selection of one by name or cost.

With `algorithm="auto"` ranks of one node that share memory use the node engine, which was faster
than messages at every measured size. Elsewhere the cost model decides (`layout`).

"auto" never picks MPI's own algorithms ("native"), because alpha, beta and gamma do not predict
their time. They also may break the guarantees of "auto": the same bits on all ranks and in every
run, a deadline that names the missing ranks, any size, every dtype and op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from collectives.algorithms import (
    double_tree,
    halving_doubling,
    hierarchical,
    mpi_native,
    pairwise,
    recursive_doubling,
    ring,
    scan,
    size_table,
    tree,
)
from collectives.algorithms.cost_model import RankLayout
from collectives.node import kernel_selection

__all__ = [
    "ALGORITHMS",
    "SCANS",
    "ON_DEVICES",
    "Algorithm",
    "automatic",
    "check",
    "estimate",
    "pick",
    "switch_points",
]


class Algorithm(NamedTuple):
    """An algorithm of an operation by messages.

    Attributes:
        run: function over a `Transport`, or over `Levels` if it is hierarchical.
        seconds: modelled seconds for a number of bytes in a layout; None for MPI's own.
    """

    run: Callable[..., Any]
    seconds: Callable[[float, RankLayout], float] | None


# Ranks that share memory also have "node" for every operation.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": {
        "ring": Algorithm(ring.allreduce, ring.allreduce_seconds),
        "tree": Algorithm(tree.allreduce, tree.allreduce_seconds),
        "double_tree": Algorithm(double_tree.allreduce, double_tree.allreduce_seconds),
        "doubling": Algorithm(recursive_doubling.allreduce, recursive_doubling.allreduce_seconds),
        "halving": Algorithm(halving_doubling.allreduce, halving_doubling.allreduce_seconds),
        "hierarchical": Algorithm(hierarchical.allreduce, hierarchical.allreduce_seconds),
        "native": Algorithm(mpi_native.allreduce, None),
    },
    "reduce": {
        "tree": Algorithm(tree.reduce, tree.reduce_seconds),
        "double_tree": Algorithm(double_tree.reduce, double_tree.reduce_seconds),
        "native": Algorithm(mpi_native.reduce, None),
    },
    "reduce_scatter": {
        "ring": Algorithm(ring.reduce_scatter, ring.reduce_scatter_seconds),
        "halving": Algorithm(
            halving_doubling.reduce_scatter, halving_doubling.reduce_scatter_seconds
        ),
        "native": Algorithm(mpi_native.reduce_scatter, None),
    },
    "broadcast": {
        "tree": Algorithm(tree.broadcast, tree.broadcast_seconds),
        "double_tree": Algorithm(double_tree.broadcast, double_tree.broadcast_seconds),
        "ring": Algorithm(ring.broadcast, ring.broadcast_seconds),
        "hierarchical": Algorithm(hierarchical.broadcast, hierarchical.broadcast_seconds),
        "native": Algorithm(mpi_native.broadcast, None),
    },
    "gather": {
        "tree": Algorithm(tree.gather, tree.scatter_seconds),
        "native": Algorithm(mpi_native.gather, None),
    },
    "allgather": {
        "ring": Algorithm(ring.allgather, ring.allgather_seconds),
        "halving": Algorithm(halving_doubling.allgather, halving_doubling.allgather_seconds),
        "native": Algorithm(mpi_native.allgather, None),
    },
    "scatter": {
        "tree": Algorithm(tree.scatter, tree.scatter_seconds),
        "native": Algorithm(mpi_native.scatter, None),
    },
    "alltoall": {
        "rotation": Algorithm(pairwise.alltoall, pairwise.alltoall_seconds),
        "native": Algorithm(mpi_native.alltoall, None),
    },
    "barrier": {
        "tree": Algorithm(tree.barrier, tree.barrier_seconds),
        "hierarchical": Algorithm(hierarchical.barrier, hierarchical.barrier_seconds),
        "native": Algorithm(mpi_native.barrier, None),
    },
}


# Algorithms of `scan` and `exscan`: "auto" is the first one if ranks do not share memory.
SCANS: dict[str, Callable[..., Any]] = {"prefix": scan.exclusive, "native": mpi_native.exclusive}


# Algorithms for arrays on CUDA devices: not over a `Transport`, never picked (`devices.nccl`).
ON_DEVICES = {"allreduce": ("nccl",), "broadcast": ("nccl",)}


def estimate(operation: str, nbytes: int, layout: RankLayout) -> dict[str, float]:
    """Return the modelled seconds of every algorithm, fastest first.

    Ties keep the order of `ALGORITHMS`. MPI's own ("native") are left out, because MPI chooses how
    they work. "hierarchical" is left out on a single node, "node" between nodes.

    Args:
        operation: a key of `ALGORITHMS`.
        nbytes: S, of the whole array; not used for a barrier.
        layout: the ranks and their links.

    Raises:
        ValueError: the operation is unknown, or the size is negative.
    """
    if operation not in ALGORITHMS:
        raise ValueError(
            f"estimate: no such operation, expected one of {' '.join(ALGORITHMS)}, "
            f"got {operation!r}"
        )
    if nbytes < 0:
        raise ValueError(f"estimate: expected bytes >= 0, got {nbytes}")
    # The engine needs all ranks on one node.
    times = {"node": _node_seconds(operation, nbytes, layout)} if _on_one_node(layout) else {}
    for name, way in ALGORITHMS[operation].items():
        # "hierarchical" of one node would be its stages alone.
        if way.seconds is not None and (name != "hierarchical" or layout.is_hierarchical):
            times[name] = way.seconds(nbytes, layout)
    # Equal formulas may differ in the last digits, because their terms are added in another order.
    return dict(sorted(times.items(), key=lambda item: float(f"{item[1]:.9g}")))


def _node_seconds(operation: str, nbytes: int, layout: RankLayout) -> float:
    link = layout.machine.shared
    if operation == "barrier":
        return link.alpha
    if operation in ("allreduce", "reduce", "reduce_scatter"):
        return kernel_selection.reduce_seconds(nbytes, layout.size, link)
    return kernel_selection.publish_seconds(nbytes, link)


def _on_one_node(layout: RankLayout) -> bool:
    return layout.num_nodes == 1 < layout.size


def pick(operation: str, nbytes: int, layout: RankLayout) -> str:
    """Return the fastest algorithm by messages, from a table."""
    return size_table.lookup(operation, nbytes, layout, switch_points)


@lru_cache(256)  # groups of the same layout share their tables
def switch_points(operation: str, layout: RankLayout) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the sizes at which the pick changes, and the picks between them (`size_table`)."""

    # The node engine is not a choice of calls by messages.
    def first(nbytes: int) -> str:
        return next(name for name in estimate(operation, nbytes, layout) if name != "node")

    return size_table.switch_points(first)


def check(operation: str, algorithm: str, *, in_memory: bool, on_device: bool = False) -> None:
    """Raise unless an operation has an algorithm in this place.

    Args:
        operation: a key of `ALGORITHMS`, possibly grouped or planned, or "scan" or "exscan".
        algorithm: the name that the caller passed.
        in_memory: whether all ranks share memory.
        on_device: whether the array stays on a device.

    Raises:
        ValueError: the name is unknown, or is "node" and the ranks do not share memory.
    """
    # "planned allreduce" and "grouped_allreduce" have the algorithms of "allreduce".
    moved = operation.split()[-1].removeprefix("grouped_").removeprefix("plan_")
    # Buckets are reduced by all-reduces.
    moved = "allreduce" if moved == "buckets" else moved
    on_devices = ON_DEVICES.get(moved, ())
    # Operations that are not listed are prefix reductions.
    known = ["auto", "node", *ALGORITHMS.get(moved, SCANS), *on_devices]
    if algorithm not in known:
        raise ValueError(
            f"{operation}: unknown algorithm, expected one of {' '.join(known)}, got {algorithm!r}"
        )
    if algorithm in on_devices and not on_device:
        raise ValueError(
            f"{operation}: algorithm {algorithm!r} needs an array on a CUDA device that CuPy "
            "can use, got one that is staged through the host"
        )
    if algorithm == "node" and not in_memory:
        raise ValueError(
            f"{operation}: algorithm 'node' needs two or more ranks, all on one node, that share "
            "memory"
        )


def automatic(operation: str, nbytes: int, layout: RankLayout) -> str:
    """Return the choice of "auto": "node" on one node with shared memory, else `pick`."""
    return "node" if _on_one_node(layout) else pick(operation, nbytes, layout)
