"""maybe_batch and its relatives."""

import numpy as np
import pytest

from strategies.input.filtering import (
    maybe_batch,
    maybe_batch_join,
    maybe_shuffle_batch,
    maybe_shuffle_batch_join,
)
from strategies.input.producers import preload


def numbers(**options):
    return preload(np.arange(60), num_epochs=1, shuffle=False, **options)


def even(number):
    return number % 2 == 0


MAYBE = {
    "batch": lambda read, keep, **o: maybe_batch(read, keep, 5, **o),
    "join": lambda read, keep, **o: maybe_batch_join([read], keep, 5, **o),
    "shuffle": lambda read, keep, **o: maybe_shuffle_batch(
        read, keep, 5, capacity=20, min_after_dequeue=10, **o
    ),
    "shuffle_join": lambda read, keep, **o: maybe_shuffle_batch_join(
        [read], keep, 5, capacity=20, min_after_dequeue=10, **o
    ),
}


@pytest.fixture(params=MAYBE)
def maybe(request):
    def run(read, keep, **options):
        with MAYBE[request.param](read, keep, **options) as batches:
            got = list(batches)
        if got and "shuffle" not in request.param and not isinstance(got[0], dict):
            flat = np.concatenate(got).tolist()
            assert flat == sorted(flat)
        return got

    return run


def test_single_rows(maybe):
    got = maybe(numbers(), even)
    assert [len(batch) for batch in got] == [5] * 6
    assert sorted(np.concatenate(got).tolist()) == list(range(0, 60, 2))


def test_several_rows_all_or_none(maybe):
    got = maybe(numbers(rows=6), lambda rows: even(rows[0] // 6), enqueue_many=True)
    assert sorted(np.concatenate(got).tolist()) == [n for n in range(60) if even(n // 6)]


def test_each_of_several_rows(maybe):
    read = preload({"x": np.arange(60), "text": list(map(str, range(60)))}, rows=7, num_epochs=1)
    got = maybe(read, lambda rows: rows["x"] % 2 == 0, enqueue_many=True)
    assert [len(batch["x"]) for batch in got] == [5] * 6
    for batch in got:
        assert (batch["x"] % 2 == 0).all()
        assert batch["text"].tolist() == list(map(str, batch["x"]))


def test_nothing_is_kept(maybe):
    assert maybe(numbers(), lambda _: False) == []
    assert maybe(numbers(rows=7), np.zeros_like, enqueue_many=True) == []
    assert maybe(numbers(rows=7), lambda _: False, enqueue_many=True) == []


def test_what_keep_must_not_return(maybe):
    with pytest.raises(ValueError, match="cannot be a vector"):
        maybe(numbers(), lambda _: [True])
    with pytest.raises(ValueError, match="0 or 1 dimensions"):
        maybe(numbers(rows=7), lambda _: [[True]], enqueue_many=True)
    with pytest.raises(ValueError, match="one truth value per row"):
        maybe(numbers(rows=7), lambda _: [True, False], enqueue_many=True)


def test_only_some_are_counted():
    with maybe_batch(numbers(), even, 5, num_threads=3) as batches:
        assert sorted(np.concatenate(list(batches)).tolist()) == list(range(0, 60, 2))
        assert batches.rows_read == 30
