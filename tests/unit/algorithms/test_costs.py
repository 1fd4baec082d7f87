"""The cost model: what must hold whatever the constants are, and what was measured."""

import itertools
from dataclasses import replace

import pytest

from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.algorithms.selection import estimate
from collectives.core.links import DEFAULT, LinkCost, Machine

KIB, MIB = 1 << 10, 1 << 20
SHAPES = [(1,), (2,), (5,), (8,), (4, 4), (8, 4), (7, 3), (64, 8), (1024, 128)]
LAYOUTS = [RankLayout(*shape) for shape in SHAPES]
ROWS = [
    (operation, name)
    for operation, ways in selection.ALGORITHMS.items()
    for name in ("node", *ways)
    if name != "native"
]


def test_every_algorithm_but_mpis_own_has_a_model():
    for ways in selection.ALGORITHMS.values():
        assert [name for name, way in ways.items() if way.seconds is None] == ["native"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("operation", selection.ALGORITHMS)
def test_estimates_are_sorted_and_of_what_there_is(operation, layout):
    times = estimate(operation, 3 * MIB, layout)
    assert list(times.values()) == pytest.approx(sorted(times.values()), rel=1e-8)
    assert all(seconds > 0 or layout.size == 1 for seconds in times.values())
    assert ("hierarchical" in times) <= (1 < layout.num_nodes < layout.size)
    assert ("node" in times) == (1 == layout.num_nodes < layout.size)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("operation", selection.ALGORITHMS)
def test_the_fastest_grows_with_the_bytes(operation, layout):
    best = [min(estimate(operation, 4**k, layout).values()) for k in range(16)]
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
    layouts = [RankLayout(2**k, 1 if name == "node" else 2**k) for k in range(1, 9)]
    times = [estimate(operation, nbytes, layout)[name] for layout in layouts]
    for fewer, more in itertools.pairwise(times):
        assert fewer <= more * (1 + 1e-12)


@pytest.mark.parametrize("ranks", [3, 4, 8, 64])
def test_small_arrays_go_in_few_rounds_and_large_ones_around_the_ring(ranks):
    layout = RankLayout(ranks, ranks)
    small = estimate("allreduce", 8, layout)
    assert small["doubling"] <= min(small["ring"], small["halving"])
    large = estimate("allreduce", 64 * MIB, layout)
    assert large["ring"] < large["halving"] < large["tree"]
    assert next(iter(large)) == "ring"


@pytest.mark.parametrize("nbytes", [64, 64 * KIB, MIB, 16 * MIB])
@pytest.mark.parametrize(
    "layout", [RankLayout(8, 4), RankLayout(64, 8), RankLayout(256, 32)], ids=str
)
def test_several_nodes_of_several_ranks_go_by_hierarchy(layout, nbytes):
    times = estimate("allreduce", nbytes, layout)
    assert next(iter(times)) == "hierarchical"
    assert times["doubling"] > times["hierarchical"]  # its ranks share the node's link


def test_the_node_engine_beats_messages_inside_a_node():
    for ranks in (2, 4, 16):
        for nbytes in (8, KIB, 64 * KIB, MIB, 64 * MIB):
            assert next(iter(estimate("allreduce", nbytes, RankLayout(ranks)))) == "node"


def test_trees_and_exchanges_stay_on_a_node_as_long_as_they_can():
    far = Machine(LinkCost(0.0, 0.0, 0.0), LinkCost(0.0, 0.0, 0.0), LinkCost(1.0, 0.0, 0.0))
    levels = {(8, 2): 1, (8, 4): 2, (8, 8): 3, (6, 2): 2, (12, 3): 1, (8, 1): 0}
    for (size, nodes), number in levels.items():
        assert estimate("reduce", 8, RankLayout(size, nodes, far))["tree"] == number
    assert estimate("allreduce", 8, RankLayout(8, 2, far))["doubling"] == 1


def test_an_alltoall_shares_the_link_of_a_node():
    bytes_alone = LinkCost(0.0, 1.0, 0.0)
    free = LinkCost(0.0, 0.0, 0.0)
    for layout in (RankLayout(4, 4), RankLayout(8, 4), RankLayout(64, 8)):
        machine = Machine(free, free, bytes_alone)
        times = estimate("alltoall", MIB, replace(layout, machine=machine))
        away = MIB * (layout.size - layout.per_node) / layout.size  # of what a rank sends
        assert times["rotation"] == pytest.approx(layout.per_node * away)


def test_no_algorithm_beats_the_line():
    for nodes in (2, 4, 8):
        line = 2 * (nodes - 1) / nodes * 16 * MIB * DEFAULT.network.beta
        for ranks in (nodes, 2 * nodes, 4 * nodes):
            times = estimate("allreduce", 16 * MIB, RankLayout(ranks, nodes))
            assert min(times.values()) >= line


def test_without_cost_of_bytes_only_messages_count():
    free = LinkCost(1.0, 0.0, 0.0)
    times = estimate("allreduce", MIB // 2, RankLayout(8, 8, Machine(free, free, free)))
    assert times["ring"] == 14
    assert times["halving"] == pytest.approx(2 * (2 + 2 + 1))  # runs of chunks wrap around
    assert times["tree"] == 3 + 3 + 7  # up; down as a scatter, then around the ring
    few = estimate("allreduce", 8, RankLayout(8, 8, Machine(free, free, free)))
    assert few["doubling"] == 3
    assert few["tree"] == 6


def test_without_cost_of_messages_only_bytes_count():
    link = LinkCost(0.0, 1.0, 0.0)
    times = estimate("allreduce", 80, RankLayout(4, 4, Machine(link, link, link)))
    assert times["ring"] == 2 * 80 * 3 / 4
    assert times["tree"] == (2 + 3) * 80  # the root sends to two children at once
    assert times["doubling"] == 2 * 80
    assert times["halving"] == 2 * 80 * 3 / 4


@pytest.mark.parametrize(
    ("layout", "nbytes", "name", "milliseconds"),
    [
        # Between network namespaces with links of 1 Gbit/s.
        (RankLayout(4, 4), MIB, "ring", 13.4),
        (RankLayout(4, 4), MIB, "halving", 14.3),
        (RankLayout(4, 4), 4 * MIB, "ring", 54),
        (RankLayout(4, 4), 4 * MIB, "halving", 61),
        # Two ranks on two cores.
        (RankLayout(2), 8, "node", 0.00032),
        (RankLayout(2), 64 * KIB, "node", 0.0033),
        (RankLayout(2), 16 * MIB, "node", 0.95),
    ],
)
def test_defaults_are_near_to_what_was_measured(layout, nbytes, name, milliseconds):
    estimated = 1e3 * estimate("allreduce", nbytes, layout)[name]
    assert estimated == pytest.approx(milliseconds, rel=0.25)


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="1 <= nodes <= ranks, got 3 nodes, 2 ranks"):
        RankLayout(2, 3)
    with pytest.raises(ValueError, match="no such operation"):
        estimate("allgatherv", 8, RankLayout(2))
    with pytest.raises(ValueError, match="bytes >= 0, got -1"):
        estimate("allreduce", -1, RankLayout(2))
