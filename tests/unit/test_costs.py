"""The cost model: what must hold whatever the constants are, and what was measured."""

from __future__ import annotations

import itertools

import pytest

from collectives import costs, selection
from collectives.costs import DEFAULT, Link, Machine, Shape

KIB, MIB = 1 << 10, 1 << 20
SHAPES = [Shape(1), Shape(2), Shape(5), Shape(8), Shape(4, 4), Shape(8, 4), Shape(7, 3),
          Shape(64, 8), Shape(1024, 128)]  # fmt: skip
ROWS = [(operation, name) for operation in costs.OPERATIONS for name in costs._MODELS[operation]]


@pytest.mark.parametrize(("operation", "name"), ROWS)
def test_a_model_is_of_an_algorithm_that_exists(operation, name):
    assert name in (*selection.ALGORITHMS[operation], "node")


@pytest.mark.parametrize("operation", costs.OPERATIONS)
def test_every_algorithm_but_mpis_own_has_a_model(operation):
    assert set(selection.ALGORITHMS[operation]) - {"native"} <= set(costs._MODELS[operation])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", costs.OPERATIONS)
def test_estimates_are_sorted_and_of_what_there_is(operation, shape):
    times = costs.estimate(operation, 3 * MIB, shape)
    assert list(times.values()) == sorted(times.values())
    assert all(seconds > 0 or shape.ranks == 1 for seconds in times.values())
    assert times[costs.pick(operation, 3 * MIB, shape)] == min(times.values())
    assert ("hierarchical" in times) <= (1 < shape.nodes < shape.ranks)
    assert ("node" in times) == (1 == shape.nodes < shape.ranks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", costs.OPERATIONS)
def test_the_fastest_grows_with_the_bytes(operation, shape):
    best = [min(costs.estimate(operation, 4**k, shape).values()) for k in range(16)]
    for less, more in itertools.pairwise(best):
        assert less <= more * (1 + 1e-12)


# A tree's broadcast passes on whole buffers up to 4 ranks, and parts of them above.
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation, name in ROWS
        if name != "hierarchical"
        and (operation, name) not in (("broadcast", "tree"), ("allreduce", "tree"))
    ],
)
@pytest.mark.parametrize("nbytes", [8, 8 * KIB, 64 * MIB])
def test_time_grows_with_the_ranks(operation, name, nbytes):
    # Twice as many: between powers of two a halving needs more rounds than at the next one.
    shapes = [Shape(2**k, 1 if name == "node" else 2**k) for k in range(1, 9)]
    times = [costs.estimate(operation, nbytes, shape)[name] for shape in shapes]
    for fewer, more in itertools.pairwise(times):
        assert fewer <= more * (1 + 1e-12)


@pytest.mark.parametrize("ranks", [3, 4, 8, 64])
def test_small_arrays_go_in_few_rounds_and_large_ones_around_the_ring(ranks):
    shape = Shape(ranks, ranks)
    small = costs.estimate("allreduce", 8, shape)
    assert small["halving"] < small["ring"]
    large = costs.estimate("allreduce", 64 * MIB, shape)
    assert large["ring"] < large["halving"] < large["tree"]
    assert next(iter(large)) == "ring"


@pytest.mark.parametrize("nbytes", [8, 64 * KIB, MIB, 64 * MIB])
@pytest.mark.parametrize("shape", [Shape(8, 4), Shape(64, 8), Shape(256, 32)], ids=str)
def test_several_nodes_of_several_ranks_go_by_hierarchy(shape, nbytes):
    times = costs.estimate("allreduce", nbytes, shape)
    assert next(iter(times)) == "hierarchical"
    assert times["halving"] > times["hierarchical"]  # its ranks share the node's link


def test_the_node_engine_beats_messages_inside_a_node():
    for ranks in (2, 4, 16):
        for nbytes in (8, KIB, 64 * KIB, MIB, 64 * MIB):
            assert costs.pick("allreduce", nbytes, Shape(ranks)) == "node"


def test_no_algorithm_beats_the_line():
    for nodes in (2, 4, 8):
        line = 2 * (nodes - 1) / nodes * 16 * MIB * DEFAULT.network.beta
        for ranks in (nodes, 2 * nodes, 4 * nodes):
            times = costs.estimate("allreduce", 16 * MIB, Shape(ranks, nodes))
            assert min(times.values()) >= line


def test_without_cost_of_bytes_only_messages_count():
    free = Link(1.0, 0.0, 0.0)
    times = costs.estimate("allreduce", MIB, Shape(8, 8), Machine(free, free, free))
    assert times["ring"] == 14
    assert times["halving"] == pytest.approx(6)


def test_without_cost_of_messages_only_bytes_count():
    link = Link(0.0, 1.0, 0.0)
    times = costs.estimate("allreduce", 80, Shape(4, 4), Machine(link, link, link))
    assert times["ring"] == 2 * 80 * 3 / 4
    assert times["tree"] == 2 * 2 * 80
    assert times["halving"] == 2 * 80


@pytest.mark.parametrize(
    ("shape", "nbytes", "name", "milliseconds"),
    [
        # Between network namespaces with links of 1 Gbit/s.
        (Shape(4, 4), MIB, "ring", 13.4),
        (Shape(4, 4), MIB, "halving", 14.3),
        (Shape(4, 4), 4 * MIB, "ring", 54),
        (Shape(4, 4), 4 * MIB, "halving", 61),
        # Two ranks on two cores.
        (Shape(2), 8, "node", 0.00032),
        (Shape(2), 64 * KIB, "node", 0.0033),
        (Shape(2), 16 * MIB, "node", 0.95),
    ],
)
def test_defaults_are_near_to_what_was_measured(shape, nbytes, name, milliseconds):
    estimated = 1e3 * costs.estimate("allreduce", nbytes, shape)[name]
    assert estimated == pytest.approx(milliseconds, rel=0.25)


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="1 <= nodes <= ranks, got 3 nodes, 2 ranks"):
        Shape(2, 3)
    with pytest.raises(ValueError, match="no model of the operation"):
        costs.estimate("barrier", 8, Shape(2))
    with pytest.raises(ValueError, match="bytes >= 0, got -1"):
        costs.estimate("allreduce", -1, Shape(2))
