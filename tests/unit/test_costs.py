"""The cost model: what must hold whatever the constants are, and what was measured."""

from __future__ import annotations

import itertools

import pytest

from collectives.algorithms import costs, selection
from collectives.algorithms.costs import Shape
from collectives.links import DEFAULT, Link, Machine

KIB, MIB = 1 << 10, 1 << 20
SHAPES = [Shape(1), Shape(2), Shape(5), Shape(8), Shape(4, 4), Shape(8, 4), Shape(7, 3),
          Shape(64, 8), Shape(1024, 128)]  # fmt: skip
ROWS = [(operation, name) for operation in costs.OPERATIONS for name in costs._MODELS[operation]]


@pytest.mark.parametrize(("operation", "name"), ROWS)
def test_a_model_is_of_an_algorithm_that_exists(operation, name):
    assert name in (*selection.ALGORITHMS[operation], "node")


def test_every_algorithm_but_mpis_own_has_a_model():
    assert set(costs.OPERATIONS) == set(selection.ALGORITHMS)
    for operation, algorithms in selection.ALGORITHMS.items():
        assert {*algorithms, "node"} - {"native"} == set(costs._MODELS[operation])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", costs.OPERATIONS)
def test_estimates_are_sorted_and_of_what_there_is(operation, shape):
    times = costs.estimate(operation, 3 * MIB, shape)
    assert list(times.values()) == pytest.approx(sorted(times.values()), rel=1e-8)
    assert all(seconds > 0 or shape.ranks == 1 for seconds in times.values())
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


@pytest.mark.parametrize("nbytes", [64, 64 * KIB, MIB, 16 * MIB])
@pytest.mark.parametrize("shape", [Shape(8, 4), Shape(64, 8), Shape(256, 32)], ids=str)
def test_several_nodes_of_several_ranks_go_by_hierarchy(shape, nbytes):
    times = costs.estimate("allreduce", nbytes, shape)
    assert next(iter(times)) == "hierarchical"
    assert times["halving"] > times["hierarchical"]  # its ranks share the node's link


def test_the_node_engine_beats_messages_inside_a_node():
    for ranks in (2, 4, 16):
        for nbytes in (8, KIB, 64 * KIB, MIB, 64 * MIB):
            assert next(iter(costs.estimate("allreduce", nbytes, Shape(ranks)))) == "node"


def test_trees_and_exchanges_stay_on_a_node_as_long_as_they_can():
    far = Machine(Link(0.0, 0.0, 0.0), Link(0.0, 0.0, 0.0), Link(1.0, 0.0, 0.0))
    for shape, levels in [(Shape(8, 2), 1), (Shape(8, 4), 2), (Shape(8, 8), 3), (Shape(6, 2), 3),
                          (Shape(12, 3), 2), (Shape(8, 1), 0)]:  # fmt: skip
        assert costs.estimate("reduce", 8, shape, far)["tree"] == levels
    assert costs.estimate("allreduce", 8, Shape(8, 2), far)["halving"] == 1


def test_an_alltoall_shares_the_link_of_a_node():
    bytes_alone = Link(0.0, 1.0, 0.0)
    free = Link(0.0, 0.0, 0.0)
    for shape in (Shape(4, 4), Shape(8, 4), Shape(64, 8)):
        times = costs.estimate("alltoall", MIB, shape, Machine(free, free, bytes_alone))
        away = MIB * (shape.ranks - shape.per_node) / shape.ranks  # of what a rank sends
        assert times["rotation"] == pytest.approx(shape.per_node * away)


def test_no_algorithm_beats_the_line():
    for nodes in (2, 4, 8):
        line = 2 * (nodes - 1) / nodes * 16 * MIB * DEFAULT.network.beta
        for ranks in (nodes, 2 * nodes, 4 * nodes):
            times = costs.estimate("allreduce", 16 * MIB, Shape(ranks, nodes))
            assert min(times.values()) >= line


def test_without_cost_of_bytes_only_messages_count():
    free = Link(1.0, 0.0, 0.0)
    times = costs.estimate("allreduce", MIB // 2, Shape(8, 8), Machine(free, free, free))
    assert times["ring"] == 14
    assert times["halving"] == pytest.approx(2 * (2 + 2 + 1))  # runs of chunks wrap around
    assert times["tree"] == 3 + 3 + 7  # up; down as a scatter, then around the ring
    few = costs.estimate("allreduce", 8, Shape(8, 8), Machine(free, free, free))
    assert few["halving"] == 3
    assert few["tree"] == 6


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
        costs.estimate("allgatherv", 8, Shape(2))
    with pytest.raises(ValueError, match="bytes >= 0, got -1"):
        costs.estimate("allreduce", -1, Shape(2))
