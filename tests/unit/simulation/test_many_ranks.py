"""Every algorithm on more ranks than any machine of the tests could run, with contents.

Sums of integers are exact in any order: a contribution that is missing or comes twice shows. So
are maxima of floats.
"""

import numpy as np
import pytest
from wrong_steps import (
    wrong_double_tree,
    wrong_doubling,
    wrong_halving,
    wrong_neighbours,
    wrong_rails,
    wrong_ring,
    wrong_tree,
)

import collectives as cc
from collectives.algorithms import selection
from collectives.core import topology
from collectives.simulation import ranks
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.transport import EAGER_BYTES
from collectives.transport.transport import Deadline
from pairwise import also

ROWS = [
    (operation, name)
    for operation, table in selection.ALGORITHMS.items()
    for name in table
    if name != "native"
]

# -1: no message goes before its receiver has asked, which finds what sends before it receives.
EAGER = {"eager": EAGER_BYTES, "synchronous": -1}


def spread(size, per_node):
    return SimulatedCluster(size, -(-size // per_node))


# How reductions combine numbers, and of which dtype.
KINDS = {"int64 SUM": (np.int64, cc.SUM), "float32 MAX": (np.float32, cc.MAX)}
REDUCTIONS = [row for row in ROWS if row[0] in ("allreduce", "reduce", "reduce_scatter")]


def brought(rank, count, dtype=np.int64):
    """What a rank brings: numbers of its own."""
    return np.random.default_rng([rank, count]).integers(-(1 << 40), 1 << 40, count).astype(dtype)


def conform(operation, algorithm, cluster, *, eager=EAGER_BYTES, count=1500, kind="int64 SUM"):
    """Check what all ranks get; `count` elements in all, or on each."""
    size = cluster.size
    dtype, op = KINDS[kind]
    run = selection.ALGORITHMS[operation][algorithm].run
    arrays = [brought(rank, count, dtype) for rank in range(size)]
    total = np.max(arrays, axis=0) if op is cc.MAX else np.sum(arrays, axis=0)
    bounds = [0, *sorted((7919 * c) % (count + 1) for c in range(size - 1)), count]
    counts = np.diff(bounds).tolist()
    root = size // 3

    def call(access):
        rank = access.transport.rank
        over = access.levels if algorithm == "hierarchical" else access.transport
        own, deadline = slice(bounds[rank], bounds[rank + 1]), Deadline(operation, 60.0)
        buffer = arrays[rank].copy()
        memory = access.memory.holding(buffer)
        if operation == "allreduce":
            run(over, memory, op, deadline)
            return buffer, total
        if operation == "reduce":
            run(over, memory, op, root, deadline)
            return (buffer, total) if rank == root else (0, 0)
        if operation == "reduce_scatter":
            run(over, memory, bounds, op, deadline)
            return buffer[own], total[own]
        if operation == "broadcast":
            run(over, memory, root, deadline)
            return buffer, arrays[root]
        if operation == "allgather":
            run(over, memory, bounds, deadline)
            joined = [arrays[r][bounds[r] : bounds[r + 1]] for r in range(size)]
            return buffer, np.concatenate(joined)
        if operation == "gather":
            got = run(over, buffer[own].copy(), counts, root, deadline)
            joined = [arrays[r][bounds[r] : bounds[r + 1]] for r in range(size)]
            return (got, np.concatenate(joined)) if rank == root else (0, 0)
        if operation == "scatter":
            whole = buffer if rank == root else None
            got = run(over, whole, counts, root, buffer.dtype, deadline)
            return got, arrays[root][own]
        if operation == "alltoall":
            takes = [bounds[rank + 1] - bounds[rank]] * size
            got = run(over, buffer, counts, takes, deadline)
            return got, np.concatenate([a[own] for a in arrays])
        access.transport.simulated.advance(1.0 if rank == root else 0.0)
        return run(over, deadline), None

    ended = ranks.run(cluster, call, payload=True, eager=eager)
    error = ranks.first_error(ended)
    if error is not None:
        raise error
    for rank, (got, expected) in enumerate(rank.result for rank in ended):
        np.testing.assert_array_equal(got, expected, f"rank {rank} of {size}")
    if operation == "barrier":
        assert min(rank.seconds for rank in ended) > 1.0, "a rank left before the last one came"


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.parametrize("size", [17, 64, also(100), also(256)])
@pytest.mark.parametrize("per_node", [3, 8])
@pytest.mark.parametrize(("operation", "algorithm"), ROWS, ids=map("-".join, ROWS))
def test_an_algorithm_gives_its_result(operation, algorithm, size, per_node, mode):
    conform(operation, algorithm, spread(size, per_node), eager=EAGER[mode])


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.parametrize("per_node", [3, 8])
@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS, ids=map("-".join, REDUCTIONS))
def test_the_largest_floats_are_found(operation, algorithm, per_node, mode):
    cluster = spread(64, per_node)
    conform(operation, algorithm, cluster, eager=EAGER[mode], kind="float32 MAX")


@pytest.mark.parametrize("size", [100, also(256)])
@pytest.mark.parametrize(
    "algorithm", [also("ring"), "tree", "double_tree", "halving", "hierarchical"]
)
def test_allreduce_of_many_slices_gives_its_result(algorithm, size):
    conform("allreduce", algorithm, spread(size, 8), count=100_003)


MUTATIONS = {
    "double_tree": (wrong_double_tree, "allreduce", "double_tree"),
    "doubling": (wrong_doubling, "allreduce", "doubling"),
    "halving_reduce_scatter": (wrong_halving, "allreduce", "halving"),
    "binomial_tree": (wrong_tree, "allreduce", "tree"),
    "ring_reduce_scatter": (wrong_ring, "allreduce", "ring"),
    "rails": (wrong_rails, "allreduce", "hierarchical"),
    "ring_neighbours": (wrong_neighbours, "alltoall", "rotation"),
}


@pytest.mark.parametrize("schedule", MUTATIONS)
def test_a_wrong_step_beyond_16_ranks_is_caught(schedule, monkeypatch):
    mutate, operation, algorithm = MUTATIONS[schedule]
    per_node = 2 if algorithm == "hierarchical" else 1
    monkeypatch.setattr(topology, schedule, mutate(getattr(topology, schedule)))
    conform(operation, algorithm, spread(16, per_node), count=10_000)  # where it does no harm
    with pytest.raises((AssertionError, cc.CollectiveError)):
        conform(operation, algorithm, spread(20, per_node), count=10_000)
