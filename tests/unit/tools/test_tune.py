"""Measuring: what is fitted to times, and all of it among ranks that are threads."""

import itertools

import numpy as np
import pytest

import inprocess
from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.core.links import DEFAULT, LinkCost
from collectives.core.settings import Settings
from collectives.tools import measure, tune
from collectives.tools.tune import TunedRow

LAYOUTS = {"one node": [0, 0, 0], "two of two": [0, 0, 2, 2], "uneven": [0, 0, 2], "each": [0, 1]}


@pytest.mark.parametrize(
    "link", [LinkCost(1e-6, 8e-11, 0), LinkCost(2e-5, 8e-9, 0), LinkCost(1e-4, 1e-9, 0)]
)
def test_a_link_is_found_again_from_its_times(link):
    times = [link.alpha + nbytes * link.beta for nbytes in measure.SIZES]
    shape = [[1.0, nbytes] for nbytes in measure.SIZES]
    assert measure.fitted(shape, times) == pytest.approx(link[:2], rel=1e-6)
    noise = np.random.default_rng(1).uniform(1.0, 1.1, len(times))
    assert measure.fitted(shape, times * noise) == pytest.approx(link[:2], rel=0.25)


@pytest.mark.parametrize(
    "times", [[5e-6, 4e-6, 3e-6], [1e-6, 1e-6, 1e-3], [2e-6, 2e-6, 2e-6], [3e-6]], ids=str
)
def test_times_that_contradict_the_model_still_give_numbers_above_zero(times):
    shape = [[1.0, nbytes] for nbytes in measure.SIZES[: len(times)]]
    assert all(0 < number < 1 for number in measure.fitted(shape, times))


# Of three nodes leaders make more steps than the others: all must make as many calls.
@pytest.mark.parametrize(
    "leaders", [*LAYOUTS.values(), [0, 0, 2, 2, 4, 4]], ids=[*LAYOUTS, "three of two"]
)
def test_every_link_that_there_is_gets_measured_alike_on_all_ranks(leaders):
    def check(comm):
        return measure.measure(measure.MeasuringClock(comm), 0.2)

    several = len(set(leaders)) > 1
    with_company = len(set(leaders)) < len(leaders)
    found = inprocess.run_ranks(len(leaders), check, leaders=leaders)
    expected = {"network"} if several else set()
    expected |= {"node", "shared"} if with_company else set()
    assert found[0].keys() == expected
    assert all(other == found[0] for other in found)
    assert all(0 < number < 1 for link in found[0].values() for number in link[:3])
    by_messages = {name: link for name, link in found[0].items() if name != "shared"}
    assert all(0 < n < 1 for link in by_messages.values() for n in (link.eager, link.program))
    assert all(0 <= link.call < 1 for link in by_messages.values())
    assert all(link.eager > 1 for name, link in found[0].items() if name == "shared")


def test_without_shared_memory_its_link_is_left_out():
    def check(comm):
        return measure.measure(measure.MeasuringClock(comm), 0.1).keys()

    settings = Settings(timeout=20, shared_memory=None)
    assert inprocess.run_ranks(2, check, settings=settings) == [{"node"}] * 2


@pytest.mark.parametrize("leaders", LAYOUTS.values(), ids=LAYOUTS)
def test_what_has_several_algorithms_is_timed_by_all_of_them(leaders):
    layout = RankLayout(len(leaders), len(set(leaders)))

    def check(comm):
        return list(tune.check(measure.MeasuringClock(comm), DEFAULT, 0.1))

    results = inprocess.run_ranks(len(leaders), check, leaders=leaders)
    assert all(other == results[0] for other in results)
    operations = {group[0].operation for group in results[0]}
    assert {"allreduce", "broadcast", "allgather", "reduce_scatter"} <= operations
    assert ("barrier" in operations) == (layout.is_hierarchical)
    for group in results[0]:
        operation, nbytes = group[0][:2]
        assert {row.algorithm for row in group} == set(
            selection.estimate(operation, nbytes, layout)
        ) - {"node"}
        assert [row.picked for row in group].count(True) == 1
        (picked,) = (row.algorithm for row in group if row.picked)
        assert picked == selection.pick(operation, nbytes, layout)
        for one, other in itertools.pairwise(group):
            assert 0 < one.measured <= other.measured


@pytest.mark.parametrize("operation", selection.ALGORITHMS)
def test_every_operation_can_be_timed(operation):
    def check(comm):
        clock = measure.MeasuringClock(comm)
        comm.barrier()
        times = clock.times(measure.algorithms(clock, operation, 1000), 0.01)
        assert all(seconds > 0 for seconds in times.values())
        return times

    names = [set(times) for times in inprocess.run_ranks(4, check, leaders=[0, 0, 2, 2])]
    assert names == [set(selection.ALGORITHMS[operation]) - {"native"}] * 4


def test_the_summary_counts_good_picks_and_good_predictions():
    rows = [
        TunedRow("allreduce", 8, "native", None, 0.5, False),  # faster, but never picked
        TunedRow("allreduce", 8, "halving", 1.0, 1.0, True),
        TunedRow("allreduce", 8, "ring", 1.0, 4.0, False),
        TunedRow("broadcast", 8, "ring", 2.0, 1.0, False),
        TunedRow("broadcast", 8, "tree", 1.0, 1.15, True),
    ]
    text = tune.summary(rows)
    assert "10 % of the fastest of ours in 1 of 2 cases" in text
    assert "20 % in 2, at worst 1.15 x" in text
    assert "factor of 2 of predicted in 3 of 4" in text
