"""How stale gradients are judged, and where parts of variables lie."""

import numpy as np
import pytest

from strategies.cluster.device_setter import GreedyLoadBalancing, RoundRobin
from strategies.cluster.scopes import PlacementRequest
from strategies.core.sparse import Rows
from strategies.parameter_server.staleness import (
    Decision,
    Drop,
    Scale,
    StalenessTracker,
    WorkerStats,
    weight,
)
from strategies.parameter_server.variable import number_of_parts, offsets, parts_of
from strategies.variables import partition


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_workers_that_take_turns_are_workers_minus_one_behind(workers):
    tracker = StalenessTracker()
    pulled = [0] * workers
    rounds = 20
    version = 0
    for _ in range(rounds):
        for worker in range(workers):
            tracker.weigh(worker, version - pulled[worker])
            version += 1
            pulled[worker] = version
    total = sum(tracker.records.values(), WorkerStats())
    assert total.applied == version == rounds * workers
    assert total.most_staleness == workers - 1
    # But for the first round, in which worker w is w updates behind.
    first = workers * (workers - 1) / 2
    assert total.total_staleness == (rounds - 1) * workers * (workers - 1) + first


def test_what_is_too_stale_is_dropped_and_counted():
    tracker = StalenessTracker(Drop(2))
    assert tracker.weigh(1, 2) == Decision(2, 1.0)
    assert tracker.weigh(1, 3) == Decision(3, 0.0)
    assert tracker.weigh(2, 5) == Decision(5, 0.0)
    assert tracker.records == {1: WorkerStats(1, 1, 2, 2), 2: WorkerStats(0, 1, 0, 0)}
    assert tracker.records[1].mean_staleness == 2
    assert tracker.records[2].mean_staleness == 0


def test_scaling_counts_fresh_gradients_in_full():
    assert [weight(Scale(), s) for s in range(4)] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [weight(None, s) for s in (0, 1000)] == [1, 1]
    assert [weight(Drop(0), s) for s in (0, 1)] == [1, 0]


@pytest.mark.parametrize("most", [-1, 1.5, True, None])
def test_a_bad_limit_is_refused(most):
    with pytest.raises(ValueError, match="Drop: bad largest staleness"):
        Drop(most)


@pytest.mark.parametrize("rows", [*range(1, 12), 100])
@pytest.mark.parametrize("count", range(1, 5))
def test_parts_cover_all_rows_once(rows, count):
    choice = RoundRobin(3)
    count = number_of_parts("v", (rows, 2), "f4", lambda shape, dtype: [count, 1])
    parts = parts_of("v", (rows, 2), "f4", count, choice)
    assert len(parts) == count <= rows
    values = np.arange(2 * rows).reshape(rows, 2)
    ends = offsets(values.shape, count)
    np.testing.assert_array_equal(np.concatenate(partition.pieces(values, ends)), values)
    sizes = [len(piece) for piece in partition.pieces(values, ends)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [part.task for part in parts] == [i % 3 for i in range(count)]
    assert [p.name for p in parts] == (
        ["v"] if count == 1 else [f"v/part_{i}" for i in range(count)]
    )
    # Rows go where the part is, by their index in it.
    indices = np.array([rows - 1, 0, rows // 2, 0])
    total = np.zeros((rows, 2))
    rows_of = partition.row_pieces(Rows(indices, np.ones((4, 2))), ends)
    for piece, own in zip(partition.pieces(total, ends), rows_of, strict=True):
        np.add.at(piece, own.indices, own.values)
    expected = np.zeros((rows, 2))
    np.add.at(expected, indices, 1)
    np.testing.assert_array_equal(total, expected)


def test_ten_rows_in_four_parts():
    assert offsets((10,), 4) == (0, 3, 6, 8, 10)


def test_greedy_placement_sees_the_bytes_of_parts():
    choice = GreedyLoadBalancing(2)
    assert [p.task for p in parts_of("a", (8, 2), "f4", 1, choice)] == [0]
    assert [p.task for p in parts_of("b", (8, 2), "f4", 2, choice)] == [1, 1]
    assert choice(PlacementRequest("c", "Variable", shape=(1,), dtype="f8")) == 0


@pytest.mark.parametrize("answer", [[], [2], [0, 1], [1, 2], [1.5, 1], [2, 1, 1]])
def test_a_partitioner_that_answers_nonsense_is_named(answer):
    with pytest.raises(ValueError, match="bad answer of the partitioner"):
        number_of_parts("v", (4, 4), "f4", lambda shape, dtype: answer)


def test_scalars_and_empty_variables_stay_whole():
    assert number_of_parts("v", (), "f4", lambda shape, dtype: [3]) == 1
    assert number_of_parts("v", (0, 4), "f4", lambda shape, dtype: [3, 1]) == 1
