"""Sources of elements, epoch after epoch."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from strategies.errors import OutOfRangeError
from strategies.input.coordinator import Coordinator
from strategies.input.producers import (
    input_producer,
    limit_epochs,
    preload,
    range_input_producer,
    slice_input_producer,
    string_input_producer,
)

LIMIT = 20.0


@pytest.fixture
def started():
    """Start producers; stop their threads at the end."""
    coord = Coordinator()

    def start(producer):
        producer.runner.create_threads(coord, daemon=True, start=True)
        return producer.queue

    yield start
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)


def drain(queue):
    values = []
    while True:
        try:
            values.append(queue.dequeue(timeout=LIMIT))
        except OutOfRangeError:
            return values


def test_limit_epochs():
    calls = []
    limited = limit_epochs(lambda: calls.append(1) or "love me two times", 2)
    assert [limited(), limited()] == ["love me two times"] * 2
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="2 epochs are over"):
            limited()
    assert len(calls) == 2
    assert limit_epochs(limited, None) is limited
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="num_epochs"):
            limit_epochs(limited, wrong)


def test_strings_in_order(started):
    numbers = [str(n) for n in range(100)]  # more than the capacity
    for strings, epochs, capacity in ((["to", "be", "or"], 3, 32), (numbers, 2, 7)):
        options = {"num_epochs": epochs, "shuffle": False, "capacity": capacity}
        assert drain(started(string_input_producer(strings, **options))) == strings * epochs


def test_epochs_are_permutations_that_do_not_mix(started):
    """600 epochs of three strings: each of the six orders in about 100 of them."""

    def produced(seed):
        return drain(started(string_input_producer(["a", "b", "c"], num_epochs=600, seed=seed)))

    values = produced(271828)
    orders = Counter("".join(values[at : at + 3]) for at in range(0, 1800, 3))
    assert len(values) == 1800
    assert sorted(orders) == ["abc", "acb", "bac", "bca", "cab", "cba"]
    assert all(60 <= count <= 140 for count in orders.values())
    assert produced(271828) == values != produced(1)


def test_no_epoch_limit(started):
    queue = started(string_input_producer(["a"], capacity=3))
    assert [queue.dequeue(timeout=LIMIT) for _ in range(100)] == ["a"] * 100


def test_arguments_of_strings(started):
    for strings in ([], (), "abc", "", np.array([], str)):
        with pytest.raises(ValueError, match="at least one string"):
            string_input_producer(strings)
    for epochs in (0, -1):
        with pytest.raises(ValueError, match="num_epochs"):
            string_input_producer(["a"], num_epochs=epochs)
    for options in ({"capacity": 0, "num_epochs": 1}, {"capacity": 0}, {"capacity": -1}):
        with pytest.raises(ValueError, match="bad capacity, expected at least 1.*, got "):
            string_input_producer(["a"], **options)
    endless = string_input_producer(["a"], num_epochs=2, capacity=-1)
    assert drain(started(endless)) == ["a", "a"]
    assert string_input_producer(["a"]).queue.capacity == 32


def test_one_queue_for_several_readers(started):
    queue = started(string_input_producer(list("abcdefgh"), num_epochs=50, capacity=3))
    with ThreadPoolExecutor(4) as pool:
        parts = [future.result(LIMIT) for future in [pool.submit(drain, queue) for _ in range(4)]]
    assert Counter(sum(parts, [])) == dict.fromkeys("abcdefgh", 50)


def test_rows_of_an_array(started):
    table = np.arange(12.0).reshape(4, 3)
    queue = started(input_producer(table, num_epochs=2, shuffle=False))
    assert queue.shapes == ((3,),)
    assert [row.tolist() for row in drain(queue)] == table.tolist() * 2
    table[:] = 0


def test_several_arrays_with_names(started):
    values = {"x": np.arange(1000), "name": [str(n) for n in range(1000)]}
    queue = started(input_producer(values, num_epochs=1, seed=1))
    rows = drain(queue)
    assert all(row["name"] == str(row["x"]) for row in rows)
    order = [int(row["x"]) for row in rows]
    assert sorted(order) == list(range(1000))
    assert order != list(range(1000))


@pytest.mark.parametrize("shuffle", [False, True])
def test_range(started, shuffle):
    queue = started(range_input_producer(5, num_epochs=4, shuffle=shuffle, seed=3))
    values = [int(value) for value in drain(queue)]
    epochs = [values[at : at + 5] for at in range(0, 20, 5)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5))] * 4
    assert (epochs == [list(range(5))] * 4) == (not shuffle)
    with pytest.raises(ValueError, match="limit"):
        range_input_producer(0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_slices_belong_together(started, shuffle):
    source = (["A", "B", "D", "G"], [7, 3, 5, 1])
    queue = started(slice_input_producer(source, num_epochs=3, shuffle=shuffle, seed=5))
    pairs = [(text, int(number)) for text, number in drain(queue)]
    assert len(pairs) == 12
    assert set(pairs) == set(zip(*source, strict=True))
    assert (pairs == list(zip(*source, strict=True)) * 3) == (not shuffle)
    for wrong in ([], [[]], [[1, 2], [1]], [1]):
        with pytest.raises(ValueError, match="number of rows"):
            slice_input_producer(wrong)


def test_a_producer_stops_with_its_coordinator():
    coord = Coordinator()
    before = threading.active_count()
    producer = range_input_producer(10)
    producer.runner.create_threads(coord, daemon=True, start=True)
    producer.queue.dequeue(timeout=LIMIT)
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)
    assert threading.active_count() == before
    assert producer.queue.is_closed()


# Data in memory.


def test_preload_is_a_copy_that_cannot_be_changed():
    mine = np.arange(6).reshape(3, 2)
    read = preload(mine, num_epochs=1, shuffle=False)
    mine[:] = 9
    row = read()
    assert row.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 5
    chunks = preload(mine, rows=2, num_epochs=1)
    chunks()[:] = 0


@pytest.mark.parametrize("rows", [None, 1, 3, 7, 100])
def test_preload_returns_each_row_once_per_epoch(rows):
    read = preload((np.arange(7), np.arange(7) * 2.0), rows=rows, num_epochs=3, seed=1)
    epochs, sizes = [[]], []
    while True:
        try:
            first, second = read()
        except OutOfRangeError:
            break
        assert np.array_equal(first * 2, second)
        sizes.append(np.size(first))
        if len(epochs[-1]) == 7:
            epochs.append([])
        epochs[-1] += np.atleast_1d(first).tolist()
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1]
    assert max(sizes) == min(rows or 1, 7)


def test_preload_from_several_threads():
    read = preload(np.arange(100), num_epochs=10)

    def all_of_it():
        values = []
        while True:
            try:
                values.append(int(read()))
            except OutOfRangeError:
                return values

    with ThreadPoolExecutor(8) as pool:
        parts = [future.result(LIMIT) for future in [pool.submit(all_of_it) for _ in range(8)]]
    assert Counter(sum(parts, [])) == dict.fromkeys(range(100), 10)


def test_preload_arguments():
    for wrong in ([], 5, {}, (), {"x": [1], "y": [1, 2]}):
        with pytest.raises(ValueError, match="same number of rows"):
            preload(wrong)
    with pytest.raises(ValueError, match="rows"):
        preload([1], rows=0)
    assert preload(["text"])() == "text"
    assert type(preload(["text"])()) is str
