"""What "auto" picks: the cost model's fastest, alike on all ranks, where it was measured to be."""

import inspect
import itertools
import random
import re
import timeit
from dataclasses import replace

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.communicator import group_of
from collectives.core.links import DEFAULT, LinkCost, Machine, MeasuredMachine
from collectives.core.settings import Settings

KIB, MIB = 1 << 10, 1 << 20
LAYOUTS = [RankLayout(size) for size in (1, 2, 3, 4, 8)]
LAYOUTS += [RankLayout(*both) for both in [(2, 2), (4, 4), (5, 2), (8, 4), (64, 8), (1000, 1000)]]
FAST = DEFAULT._replace(network=LinkCost(alpha=3e-6, beta=8e-11, gamma=3e-11))

# On the fast one algorithms change places more often.
MACHINES = {"default": DEFAULT, "fast network": FAST}

# What was measured on 2 cores, in log2 P rounds / in a ring: at the first size the rounds took less
# time, at the second one no less any more.
MEASURED = [
    (RankLayout(2), 64 * KIB, 128 * KIB),  # 74 / 104 us, 75 / 73 us
    (RankLayout(4), 64 * KIB, 256 * KIB),  # 289 / 400 us, 397 / 405 us
    (RankLayout(4, 4), 256 * KIB, MIB),  # 1 Gbit/s: 3.3 / 5.0 ms, 14.3 / 13.4 ms
]


@pytest.mark.parametrize(("layout", "below", "above"), MEASURED, ids=str)
def test_the_defaults_switch_where_it_was_measured_or_lose_a_quarter(layout, below, above):
    assert selection.pick("allreduce", 8, layout) == "doubling"
    assert selection.pick("allreduce", below // 2, layout) in ("doubling", "halving")
    sizes = range(2 * above, 8 * above, above // 3)
    for nbytes in sizes:
        times = selection.estimate("allreduce", nbytes, layout)
        assert times["ring"] <= 1.25 * times[selection.pick("allreduce", nbytes, layout)]


@pytest.mark.parametrize("nbytes", [4 * KIB, 64 * KIB, MIB, 16 * MIB])
def test_several_nodes_of_several_ranks_reduce_by_hierarchy(nbytes):
    # 4 machines of 2 ranks at 1 Gbit/s: a flat ring takes 1.5 times as long and more.
    assert selection.pick("allreduce", nbytes, RankLayout(8, 4)) == "hierarchical"


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("operation", selection.ALGORITHMS)
def test_tables_ascend_and_say_what_the_model_says(operation, layout, machine):
    sizes, names = selection.switch_points(operation, replace(layout, machine=machine))
    assert len(names) == len(sizes) + 1
    assert list(sizes) == sorted(set(sizes))
    assert all(size > 0 for size in sizes)
    assert all(one != other for one, other in itertools.pairwise(names))
    assert set(names) <= set(selection.ALGORITHMS[operation]) - {"native"}
    layout = replace(layout, machine=machine)
    random.seed(1)
    near = [size + step for size in sizes for step in (-1, 0, 1)]
    for nbytes in [0, 1, 8, *near, *(int(2 ** random.uniform(0, 34)) for _ in range(50))]:
        times = selection.estimate(operation, nbytes, layout)
        times.pop("node", None)
        picked = selection.pick(operation, nbytes, layout)
        # Where a pick holds for less than an octave the table may miss it, and little is lost.
        assert times[picked] <= 1.1 * min(times.values())
        assert selection.pick(operation, nbytes, layout) == picked


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_operation_with_one_algorithm_has_nothing_to_look_up(layout):
    # The size may then differ between ranks, as that of an all-to-all.
    for operation in ("alltoall", "gather", "scatter"):
        sizes, names = selection.switch_points(operation, layout)
        assert sizes == ()
        assert len(names) == 1


def test_other_links_switch_elsewhere():
    # Messages that cost little let the ring, with its many, win earlier.
    slow = DEFAULT._replace(network=LinkCost(alpha=5e-2, beta=8.5e-9, gamma=3.3e-11))
    nbytes = [
        selection.pick("allreduce", 1 << 24, RankLayout(8, 8, machine)) for machine in (slow, FAST)
    ]
    assert nbytes[0] in ("doubling", "halving", "double_tree")
    assert nbytes[1] == "ring"


def test_native_is_only_taken_by_name():
    layout = RankLayout(4, 2)
    for operation, algorithms in selection.ALGORITHMS.items():
        for nbytes in (0, 8, KIB, MIB, 1 << 33):
            name = selection.pick(operation, nbytes, layout)
            assert name in algorithms
            assert name != "native"


def test_auto_is_the_node_engine_on_one_node_and_the_model_elsewhere():
    assert selection.automatic("allreduce", MIB, RankLayout(4, 1)) == "node"
    assert selection.automatic("allreduce", MIB, RankLayout(1, 1)) != "node"
    for size, nodes in [(4, 4), (8, 2)]:
        layout = RankLayout(size, nodes)
        chosen = selection.pick("allreduce", MIB, layout)
        assert selection.automatic("allreduce", MIB, layout) == chosen


def test_a_pick_costs_next_to_nothing():
    layout = RankLayout(64, 8)
    selection.pick("allreduce", 8, layout)
    seconds = min(
        timeit.repeat(lambda: selection.pick("allreduce", MIB, layout), number=1000, repeat=20)
    )
    assert seconds / 1000 < 1e-5


@pytest.mark.parametrize("leaders", [[0, 1, 2], [0, 0, 2], [0, 1, 0, 1, 4]], ids=str)
def test_all_ranks_of_all_groups_pick_by_the_links_that_were_agreed_on(leaders):
    dear = Machine(*(LinkCost(alpha=1.0, beta=1e-12, gamma=1e-12) for _ in range(3)))
    settings = Settings(
        timeout=20, links=MeasuredMachine(dear, ("a", "b", "c")), shared_memory=None
    )
    sizes = [4**k for k in range(16)]

    def check(comm):
        for group in (comm, comm.split(0, -comm.rank), comm.group(list(range(comm.size - 1)))):
            if group is not None:
                own = [
                    selection.pick("allreduce", nbytes, group_of(group).layout) for nbytes in sizes
                ]
                assert group.allgather_object(own) == [own] * group.size
                layout = RankLayout(group.size, group.num_nodes, dear)
                assert own == [selection.pick("allreduce", nbytes, layout) for nbytes in sizes]
                assert group_of(group).layout.machine == dear

    inprocess.run_ranks(len(leaders), check, leaders=leaders, settings=settings)


def test_an_operation_goes_the_way_that_is_picked(monkeypatch):
    """`comm.allreduce` asks the table: each size by the algorithm that stands there."""
    taken = []
    for name in selection.ALGORITHMS["allreduce"]:
        way = selection.ALGORITHMS["allreduce"][name]

        def spy(*arguments, run=way.run, name=name):
            taken.append(name)
            return run(*arguments)

        monkeypatch.setitem(selection.ALGORITHMS["allreduce"], name, way._replace(run=spy))

    def check(comm):
        for count in (1024, 1 << 20):  # smaller ones travel with the comparison
            x = np.full(count, comm.rank, np.float32)
            assert comm.allreduce(x, op=cc.SUM)[-1] == 3

    settings = Settings(timeout=20, shared_memory=None)
    inprocess.run_ranks(3, check, settings=settings)
    picks = [selection.pick("allreduce", nbytes, RankLayout(3)) for nbytes in (4096, 1 << 22)]
    assert picks[0] != picks[1] == "ring"
    assert taken == [picks[0]] * 3 + [picks[1]] * 3


def test_no_algorithm_is_named_in_the_table_that_does_not_take_its_operation():
    for operation, algorithms in selection.ALGORITHMS.items():
        for name, way in algorithms.items():
            assert list(inspect.signature(way.run).parameters)[-1] == "deadline", (operation, name)


@pytest.mark.parametrize("operation", selection.ALGORITHMS)
def test_the_documentation_of_an_operation_names_its_algorithms(operation):
    text = inspect.getdoc(getattr(cc.Communicator, operation))
    (named,) = re.findall(r'[Aa]lgorithms?(?: are|:)\s+((?:"\w+"(?:,| or| and)?\s*)+)', text)
    assert re.findall(r"\w+(?=\")", named) == ["auto", "node", *selection.ALGORITHMS[operation]]
