"""Reading ahead in a thread: how far, in which order, errors, and early ends."""

import threading
import traceback
from itertools import count

import pytest

from strategies.input.prefetching import prefetch

LIMIT = 20.0


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "unisono-prefetch"]


def test_all_batches_come_in_order_and_the_end_stays():
    with prefetch(range(100), 3) as batches:
        assert list(batches) == list(range(100))
        with pytest.raises(StopIteration):
            next(batches)
    assert not alive()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_never_more_than_n_are_ready(n):
    read = []
    reached = threading.Semaphore(0)

    def source():
        for number in count():
            read.append(number)
            reached.release()
            yield number

    with prefetch(source(), n) as batches:
        for _ in range(n):
            assert reached.acquire(timeout=LIMIT)
        assert not reached.acquire(timeout=0.05)
        for number in range(10):
            assert next(batches) == number
            assert reached.acquire(timeout=LIMIT)
        assert not reached.acquire(timeout=0.05)
        assert len(read) == n + 10


def test_an_exception_comes_after_the_batches_before_it_and_with_its_traceback():
    def source():
        yield 1
        raise KeyError("in the source")

    with prefetch(source(), 5) as batches:
        assert next(batches) == 1
        with pytest.raises(KeyError, match="in the source") as caught:
            next(batches)
        assert "in source" in "".join(traceback.format_tb(caught.value.__traceback__))
        with pytest.raises(StopIteration):
            next(batches)


def test_leaving_early_ends_the_thread_and_the_source():
    ended = []

    def source():
        try:
            yield from count()
        finally:
            ended.append(threading.current_thread().name)

    with prefetch(source(), 2) as batches:
        next(batches)
    assert ended == ["unisono-prefetch"]
    assert not alive()
    assert list(batches) == []
    batches.close()


def test_closing_wakes_who_waits():
    go_on = threading.Event()

    def source():
        yield 0
        go_on.wait(LIMIT)

    batches = prefetch(source(), 1)
    next(batches)
    threading.Timer(0.1, lambda: (go_on.set(), batches.close())).start()
    assert list(batches) == []
    batches.close()


def test_a_source_that_blocks_is_an_error_when_closing(monkeypatch):
    monkeypatch.setattr("strategies.input.prefetching._STOP_SECONDS", 0.1)
    go_on = threading.Event()

    def source():
        go_on.wait(LIMIT)
        yield 0

    batches = prefetch(source(), 1)
    with pytest.raises(RuntimeError, match="does reading a batch block"):
        batches.close()
    go_on.set()
    batches.close()
    assert not alive()


def test_positions_belong_to_the_batches_that_were_taken():
    at = 0

    def source():
        nonlocal at
        for number in range(1, 10):
            at = number
            yield number

    with prefetch(source(), 4, position=lambda: at) as batches:
        assert batches.position() == 0
        for number in range(1, 10):
            assert next(batches) == number
            assert batches.position() == number


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one_batch(n):
    with pytest.raises(ValueError, match="bad number of batches ahead"):
        prefetch([], n)


def test_what_is_no_iterable_is_an_error_at_the_first_batch():
    with prefetch(5, 1) as batches, pytest.raises(TypeError, match="not iterable"):
        next(batches)
