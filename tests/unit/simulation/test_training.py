"""Steps of many replicas on a virtual clock, against arithmetic."""

import numpy as np
import pytest

from collectives.simulation import training
from collectives.simulation.training import Compute


def test_compute_is_the_same_for_the_same_seed_and_has_its_mean_and_stragglers():
    compute = Compute(0.1, spread=0.2, slow_share=0.05, slow_by=10, seed=3)
    drawn = compute.draw(2000, 50)
    np.testing.assert_array_equal(drawn, compute.draw(2000, 50))
    usual = drawn[drawn < 0.5]
    assert usual.mean() == pytest.approx(0.1, rel=0.02)
    assert usual.std() == pytest.approx(0.02, rel=0.05)
    assert (drawn > 0.5).mean() == pytest.approx(0.05, rel=0.1)
    np.testing.assert_array_equal(Compute(0.1).draw(2, 3), np.full((2, 3), 0.1))


def test_compute_is_drawn_from_times_that_were_measured():
    drawn = Compute(0.1, measured=[1.0, 1.0, 1.0, 5.0], seed=1).draw(1000, 20)
    assert set(np.unique(drawn).round(6)) == {0.05, 0.25}
    assert (drawn > 0.1).mean() == pytest.approx(0.25, rel=0.05)
    assert drawn.mean() == pytest.approx(0.1, rel=0.05)


def test_an_all_reduce_waits_for_the_slowest_and_overlaps_what_is_ready():
    drawn = np.array([[1.0, 2.0], [4.0, 2.0]])
    plain = training.all_reduce(drawn, [(1.0, 0.5)])
    assert plain.steps_per_second == pytest.approx(2 / (2.5 + 4.5))
    assert plain.waiting == pytest.approx(1 - 4.5 / 7)
    overlapped = training.all_reduce(drawn, [(0.5, 0.5), (1.0, 0.5)])
    assert overlapped.steps_per_second == pytest.approx(2 / (2.5 + 4.5))
    behind = training.all_reduce(drawn, [(0.5, 3.0), (1.0, 0.5)])
    assert behind.steps_per_second == pytest.approx(2 / (4.5 + 5.5))


def test_spare_replicas_leave_the_slowest_behind():
    drawn = np.array([[1.0, 1.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    found = training.spare_replicas(drawn, 2, 0.0)
    assert found.steps_per_second == pytest.approx(1.0)
    assert found.gradients == 2
    assert training.spare_replicas(drawn, 3, 0.0).steps_per_second == pytest.approx(3 / 11)


def test_spare_replicas_are_those_of_the_program_that_measures_them():
    # As `expected` of benchmarks/spare_replicas.py.
    drawn = np.random.default_rng(1).lognormal(0, 0.5, (200, 8))
    now, free = 0.0, np.zeros(8)
    for row in drawn:
        begun = np.maximum(free, now)
        done = begun + row
        now = float(np.sort(done)[5])
        free = np.where(begun < now, done, free)
    assert training.spare_replicas(drawn, 6, 0.0).steps_per_second == pytest.approx(200 / now)


@pytest.mark.parametrize(("tasks", "share"), [(1, 1.0), (2, 0.5)])
def test_where_the_lines_are_full_ps_tasks_say_how_fast_it_goes(tasks, share):
    drawn = np.full((50, 20), 1e-3)
    line = 1.0
    together = training.servers(drawn, tasks, line)
    assert together.steps_per_second == pytest.approx(1 / (2 * 20 * line * share), rel=0.1)
    alone = training.asynchronous(drawn, tasks, line)
    assert alone.gradients_per_second == pytest.approx(1 / (line * share), rel=0.1)


def test_without_lines_nobody_waits_and_gradients_are_as_stale_as_there_are_others():
    found = training.asynchronous(Compute(1.0, spread=0.1).draw(100, 10), 1, 1e-9)
    assert found.gradients_per_second == pytest.approx(10, rel=0.03)
    assert found.waiting == pytest.approx(0, abs=0.03)
    assert found.stale == pytest.approx(9, rel=0.05)
