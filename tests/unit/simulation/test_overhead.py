"""What Python takes for an algorithm besides its messages."""

import itertools

import pytest

from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.simulation import overhead
from collectives.simulation.cluster import SimulatedCluster

NAMES = set(selection.ALGORITHMS["allreduce"]) - {"native"}


@pytest.mark.parametrize("nodes", [1, 2, 3, 6])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_all_ranks_run_every_algorithm_to_its_end(name, nodes):
    cluster = SimulatedCluster(6, nodes)
    times = overhead.seconds(name, cluster.layout, cluster.leaders())
    assert len(times) == 6
    assert min(times) > 0


def test_the_least_of_all_calls_counts(monkeypatch):
    # Of two ranks; others took the core in each call but the eleventh of the first rank.
    took = [7.0] * 10 + [3.0] + [9.0] * 19 + [5.0] * 30
    clock = itertools.accumulate(second for each in took for second in (100.0, each))
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: next(clock))
    assert overhead.seconds("doubling", RankLayout(2, 2), (0, 1)) == [3.0, 5.0]
