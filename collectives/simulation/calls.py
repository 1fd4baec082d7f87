"""One simulated call with its signature check; arrays are lengths without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.algorithms import hierarchical, recursive_doubling, selection, tree
from collectives.algorithms.eager import HEAD_BYTES
from collectives.arrays.reduction import SUM
from collectives.core import topology
from collectives.simulation import ranks
from collectives.simulation.clock import NEVER
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.ranks import RankContext, RankResult
from collectives.simulation.transport import EAGER_BYTES
from collectives.transport.transport import Deadline, Transport

__all__ = ["seconds", "simulate_sequence", "simulate_check"]

_DTYPE = np.dtype(np.float32)


def seconds(
    operation: str,
    algorithm: str,
    nbytes: int,
    cluster: SimulatedCluster,
    *,
    eager: int = EAGER_BYTES,
    within: float = NEVER,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Return the seconds from the common start of a call until the last rank has finished.

    Args:
        operation: a key of `selection.ALGORITHMS`.
        algorithm: an algorithm of the operation, except "native"; the root is rank 0.
        nbytes: bytes of the whole float32 array, rounded down to a multiple of 4.
        cluster: the ranks.
        eager: bytes of the longest eager message.
        within: limit of the simulation in real seconds.
        progress: as for `EventClock.run`.

    Raises:
        Stopped: the simulation exceeded its limit.
        PeerFailure: a rank died.
        ImportError: greenlet is not installed.
    """
    call = _algorithm(operation, algorithm, nbytes, cluster)
    return _last(cluster, call, eager=eager, within=within, progress=progress)


def simulate_sequence(
    nbytes: int,
    cluster: SimulatedCluster,
    *,
    by_nodes: bool,
    within: float = NEVER,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Return the seconds of a signature check that carries `nbytes`.

    In a real job compiled code calls MPI for eager messages (`algorithms.eager`). The simulation
    runs the same schedule at the cost of eager messages.

    Args:
        nbytes: bytes of the contribution; 0 for the check alone.
        cluster: the ranks.
        by_nodes: whether one rank per node uses the network.
        within: as for `seconds`.
        progress: as for `seconds`.

    Raises:
        As `seconds`.
    """
    call = _comparison(nbytes, cluster, by_nodes=by_nodes)
    return _last(cluster, call, within=within, progress=progress)


def simulate_check(
    algorithm: str | None,
    nbytes: int,
    cluster: SimulatedCluster,
    *,
    by_nodes: bool,
    calls: int = 1,
    python: Sequence[float] | None = None,
) -> float:
    """Return the seconds of one of several consecutive all-reduces, each with its signature check.

    As in the benchmarks: the ranks leave a barrier, and the slowest rank counts.

    Args:
        algorithm: None if the array travels with the check.
        nbytes: as for `seconds`.
        cluster: the ranks.
        by_nodes: as for `simulate_sequence`.
        calls: number of all-reduces.
        python: seconds of each rank's program for the algorithm, without messages (`overhead`).

    Raises:
        As `seconds`.
    """
    compared = _comparison(nbytes if algorithm is None else 0, cluster, by_nodes=by_nodes)
    run = None if algorithm is None else _algorithm("allreduce", algorithm, nbytes, cluster)

    def series(access: RankContext) -> float:
        rank = access.transport.simulated
        # The ranks leave the barrier at different times, as in a benchmark.
        tree.barrier(access.transport, Deadline("barrier", NEVER))
        began = rank.now
        for _ in range(calls):
            # The array travels with the comparison, or after it.
            compared(access)
            if run is not None:
                own = 0.0 if python is None else python[rank.number]
                # Python before and inside the algorithm, slower if other ranks have used the core.
                rank.advance((cluster.layout.call + own) * rank.cache_cold)
                run(access)
        return rank.now - began

    # Of all calls, because one call may overlap with the next.
    slowest: float = max(rank.result for rank in _check_ended(cluster, series))
    return slowest / calls


def _algorithm(
    operation: str, algorithm: str, nbytes: int, cluster: SimulatedCluster
) -> Callable[[RankContext], None]:
    run = selection.ALGORITHMS[operation][algorithm].run
    # Shared by all ranks, because thousands of lists would fill the memory.
    bounds = topology.chunk_bounds(nbytes // _DTYPE.itemsize, cluster.size)
    lengths = np.diff(bounds).tolist()

    def call(access: RankContext) -> None:
        over = access.levels if algorithm == "hierarchical" else access.transport
        run(over, *_arguments(operation, access, bounds, lengths), Deadline(operation, NEVER))

    return call


def _comparison(
    nbytes: int, cluster: SimulatedCluster, *, by_nodes: bool
) -> Callable[[RankContext], None]:
    length = HEAD_BYTES + nbytes
    # Combining takes time on the processor, not on a link.
    combining = cluster.layout.combined(nbytes)

    def call(over: RankContext) -> None:
        # The comparison runs in compiled code.
        access = over.eager()
        deadline = Deadline("comparison", NEVER)
        rank = access.transport.simulated

        def combine(ours: object, theirs: object) -> None:
            rank.advance(combining)

        def between(network: Transport, message: Any) -> None:
            recursive_doubling.allgather_combine(network, message, combine, deadline)

        if by_nodes:
            assert access.levels is not None
            # The engine's stages need an array; without payload nothing touches it.
            message = np.empty(length, np.uint8)
            hierarchical.allreduce_custom(access.levels, message, combine, between, deadline)
        else:
            between(access.transport, access.memory.empty(length, np.dtype(np.uint8)))

    return call


def _last(cluster: SimulatedCluster, call: Callable[[RankContext], None], **how: Any) -> float:
    return max(rank.seconds for rank in _check_ended(cluster, call, **how))


def _check_ended(
    cluster: SimulatedCluster, call: Callable[[RankContext], Any], **how: Any
) -> list[RankResult]:
    """Return the results of all ranks.

    Raises:
        The error of a rank.
    """
    # Only lengths: the seconds do not depend on contents.
    ended = ranks.run(cluster, call, payload=False, **how)
    error = ranks.first_error(ended)
    if error is not None:
        raise error
    return ended


def _arguments(
    operation: str, access: RankContext, bounds: list[int], lengths: list[int]
) -> tuple[Any, ...]:
    """Return an algorithm's arguments between the ranks and the deadline."""
    rank, count = access.transport.rank, bounds[-1]
    # NumPy arrays are not touched here, so that they take no memory.
    if operation == "gather":
        return np.empty(lengths[rank], _DTYPE), lengths, 0
    if operation == "scatter":
        return np.empty(count, _DTYPE) if rank == 0 else None, lengths, 0, _DTYPE
    if operation == "alltoall":
        return np.empty(count, _DTYPE), lengths, [lengths[rank]] * len(lengths)
    buffer = access.memory.empty(count, _DTYPE)
    arguments: dict[str, tuple[Any, ...]] = {
        "allreduce": (buffer, SUM),
        "reduce": (buffer, SUM, 0),
        "reduce_scatter": (buffer, bounds, SUM),
        "broadcast": (buffer, 0),
        "allgather": (buffer, bounds),
        "barrier": (),
    }
    return arguments[operation]
