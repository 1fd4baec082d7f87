"""Properties of all kinds of queues, seen only through blocking calls of several threads.

They use nothing but the public methods, so that they hold for a queue wherever it lives: `queues`
is the fixture to replace. Threads that must be seen to wait are watched through `size`, or through
other operations that can only succeed because they wait.
"""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import numpy as np
import pytest

from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfRangeError,
)
from strategies.queues.queue_types import (
    FIFOQueue,
    PaddingFIFOQueue,
    PriorityQueue,
    RandomShuffleQueue,
)

LIMIT = 20.0
SOON = 0.05  # seconds for which a call that must wait is watched


class Numbers:
    """A queue of int64 numbers of any kind; a number is its own priority."""

    def __init__(self, kind, make, capacity, keep=0, seed=None):
        self.kind, self.ordered = kind, kind != "shuffle"
        self.queue = {
            "fifo": lambda: make(FIFOQueue, capacity, "int64", [()]),
            "shuffle": lambda: make(RandomShuffleQueue, capacity, keep, "int64", [()], seed=seed),
            "padding": lambda: make(PaddingFIFOQueue, capacity, "int64", [()]),
            "priority": lambda: make(PriorityQueue, capacity, "int64", [()]),
        }[kind]()
        for name in ("size", "is_closed", "close", "cancel_pending"):
            setattr(self, name, getattr(self.queue, name))

    def put(self, number, **options):
        row = (number, number) if self.kind == "priority" else number
        self.queue.enqueue(row, **options)

    def put_many(self, numbers, **options):
        column = np.array(numbers, np.int64)
        self.queue.enqueue_many((column,) * (1 + (self.kind == "priority")), **options)

    def _own(self, values):
        return values[1] if self.kind == "priority" else values

    def take(self, **options):
        return int(self._own(self.queue.dequeue(**options)))

    def take_many(self, count, **options):
        return self._own(self.queue.dequeue_many(count, **options)).tolist()

    def take_up_to(self, count, **options):
        return self._own(self.queue.dequeue_up_to(count, **options)).tolist()

    def same(self, got, expected):
        """Whether what came out is right: in order, unless the queue shuffles."""
        return list(got) == list(expected) if self.ordered else Counter(got) == Counter(expected)


@pytest.fixture
def make():
    """How a queue is made: class and arguments; to be replaced for queues that live elsewhere."""
    return lambda kind, *args, **options: kind(*args, **options)


@pytest.fixture(params=["fifo", "shuffle", "padding", "priority"])
def numbers(request, make):
    return lambda capacity=10, **options: Numbers(request.param, make, capacity, **options)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as threads:
        yield threads


def waits(future):
    with pytest.raises(NotYet):
        future.result(SOON)
    return True


def fails(error, function, *args, match=None, **options):
    with pytest.raises(error, match=match):
        function(*args, **options)


def test_size_after_enqueue_and_dequeue(numbers):
    queue = numbers()
    sizes = [queue.size()]
    queue.put(1)
    sizes.append(queue.size())
    assert queue.take() == 1
    assert [*sizes, queue.size()] == [0, 1, 0]


def test_enqueue_many_repeats_in_order(numbers):
    queue = numbers()
    for _ in range(2):
        queue.put_many([10, 20, 30, 40])
    assert queue.size() == 8
    got = [queue.take() for _ in range(8)]
    expected = [10, 20, 30, 40] * 2
    assert queue.same(got, sorted(expected) if queue.kind == "priority" else expected)


def test_nothing(numbers):
    queue = numbers()
    assert queue.take_many(0) == queue.take_up_to(0) == []
    queue.put_many([])
    assert queue.size() == 0
    queue.put(1)
    assert queue.take_many(0) == queue.take_up_to(0) == []
    queue.close()
    queue.put_many([])
    assert queue.take_many(0) == []
    fails(ValueError, queue.take_many, -1)


@pytest.mark.parametrize("put_many", [False, True])
@pytest.mark.parametrize("take_many", [False, True])
def test_parallel_enqueue_and_dequeue(numbers, pool, put_many, take_many):
    queue = numbers(20)
    each, threads = 60, 10

    def put(start):
        values = range(start, start + each)
        if put_many:
            queue.put_many(values, timeout=LIMIT)
        else:
            for value in values:
                queue.put(value, timeout=LIMIT)

    def take():
        if take_many:
            return queue.take_many(each, timeout=LIMIT)
        return [queue.take(timeout=LIMIT) for _ in range(each)]

    puts = [pool.submit(put, each * index) for index in range(threads)]
    takes = [pool.submit(take) for _ in range(threads)]
    batches = [future.result(LIMIT) for future in takes]
    assert Counter(value for batch in batches for value in batch) == Counter(range(each * threads))
    if put_many and take_many and queue.kind in ("fifo", "padding"):  # rows stay together
        assert all(batch == list(range(batch[0], batch[0] + each)) for batch in batches)
    assert [future.result(LIMIT) for future in puts] == [None] * threads
    assert queue.size() == 0


def test_parallel_around_a_half_full_queue(numbers, pool):
    queue = numbers(50)
    queue.put_many(range(25))
    puts = [
        pool.submit(lambda s: [queue.put(s + k) for k in range(100)], 1000 * i) for i in range(10)
    ]
    takes = [pool.submit(lambda: [queue.take() for _ in range(100)]) for _ in range(10)]
    got = [value for future in takes for value in future.result(LIMIT)]
    assert all(future.result(LIMIT) for future in puts)
    got += queue.take_many(25)
    assert Counter(got) == Counter(
        [*range(25), *(1000 * i + k for i in range(10) for k in range(100))]
    )


def test_parallel_up_to_returns_all(numbers, pool):
    queue = numbers(1000)
    queue.put_many(range(1000))
    queue.close()

    def take():
        return queue.take_up_to(101)

    batches = [future.result(LIMIT) for future in [pool.submit(take) for _ in range(10)]]
    assert sorted(map(len, batches)) == [91] + [101] * 9
    assert sorted(value for batch in batches for value in batch) == list(range(1000))


def test_mixed_ways_in_and_out_keep_the_order(numbers, pool):
    queue = numbers(10)

    def put():
        queue.put_many([])
        for start in range(0, 250, 10):
            if start % 20:
                queue.put_many(range(start, start + 10))
            else:
                for value in range(start, start + 10):
                    queue.put(value)

    putting = pool.submit(put)
    got = []
    while len(got) < 250:
        got += [queue.take(timeout=LIMIT)]
        got += queue.take_many(min(6, 250 - len(got)), timeout=LIMIT)
    putting.result(LIMIT)
    assert queue.same(got, range(250))


def test_a_dequeue_waits_until_there_is_enough(numbers, pool):
    queue = numbers()
    for take, count in ((queue.take_many, 4), (queue.take_up_to, 4)):
        future = pool.submit(take, count)
        queue.put_many([1, 2, 3])
        assert waits(future)
        assert queue.size() == 0  # what has come is kept for it
        queue.put(4)
        assert queue.same(future.result(LIMIT), [1, 2, 3, 4])
    single = pool.submit(queue.take)
    assert waits(single)
    queue.put(5)
    assert single.result(LIMIT) == 5


def test_a_big_enqueue_ends_with_the_fifth_dequeue(numbers, pool):
    queue = numbers(5)
    future = pool.submit(queue.put_many, range(10))
    got = []
    for left in range(5, 0, -1):
        assert waits(future) if left in (5, 1) else not future.done()
        assert queue.size() == 5
        got.append(queue.take())
    future.result(LIMIT)
    assert queue.size() == 5
    assert queue.same(got + queue.take_many(5), range(10))


def test_closed_queue(numbers):
    queue = numbers()
    queue.put_many([1, 2, 3])
    queue.close()
    assert queue.is_closed()
    fails(CancelledError, queue.put, 4, match="closed")
    fails(CancelledError, queue.put_many, [4, 5], match="closed")
    fails(CancelledError, queue.close, match="closed")
    for _ in range(2):
        queue.close(cancel_pending_enqueues=True)
    assert queue.same([queue.take() for _ in range(3)], [1, 2, 3])
    fails(OutOfRangeError, queue.take)
    fails(OutOfRangeError, queue.take_many, 1)
    fails(OutOfRangeError, queue.take_up_to, 1)


def test_waiting_dequeues_of_an_empty_queue_end_with_the_close(numbers, pool):
    queue = numbers()
    futures = [pool.submit(queue.take), pool.submit(queue.take_many, 2)]
    futures.append(pool.submit(queue.take_up_to, 2))
    assert all(waits(future) for future in futures)
    queue.close()
    assert all(isinstance(future.exception(LIMIT), OutOfRangeError) for future in futures)


def test_a_partial_batch_is_restored(numbers, pool):
    queue = numbers(4)
    queue.put_many([1, 2, 3])
    future = pool.submit(queue.take_many, 4)
    assert waits(future)
    queue.close()
    why = r"insufficient elements \(requested 4, current size 3"
    fails(OutOfRangeError, future.result, LIMIT, match=why)
    assert queue.same([queue.take() for _ in range(3)], [1, 2, 3])
    assert queue.size() == 0


def test_up_to_returns_the_remainder_when_closed(numbers, pool):
    queue = numbers()
    queue.put_many([1, 2, 3, 4])
    got = queue.take_up_to(3)
    future = pool.submit(queue.take_up_to, 3)
    assert waits(future)
    queue.close()
    assert queue.same(got + future.result(LIMIT), [1, 2, 3, 4])


def test_too_many_of_a_closed_queue_leave_the_rest(numbers, pool):
    queue = numbers(4)
    queue.put_many([1, 2, 3, 4])
    queue.close()
    got = queue.take_many(3)
    fails(OutOfRangeError, queue.take_many, 3)
    assert queue.same([*got, queue.take()], [1, 2, 3, 4])


def test_pending_enqueues_survive_a_plain_close(numbers, pool):
    queue = numbers(2)
    queue.put_many([1, 2])
    entering = pool.submit(queue.put_many, [3, 4])
    assert waits(entering)
    closing = pool.submit(queue.close)
    assert waits(closing)
    assert not queue.is_closed()
    fails(CancelledError, queue.put, 5)
    fails(CancelledError, queue.close)
    queue.put_many([])
    assert queue.same(queue.take_many(3) + queue.take_up_to(3), [1, 2, 3, 4])
    assert entering.result(LIMIT) is closing.result(LIMIT) is None
    assert queue.is_closed()


def test_a_cancelling_close_ends_pending_enqueues(numbers, pool):
    queue = numbers(4)
    queue.put_many([1, 2, 3])
    half = pool.submit(queue.put_many, [4, 5])
    assert waits(half)
    more = [pool.submit(queue.put, 6), pool.submit(queue.close)]
    queue.close(cancel_pending_enqueues=True)
    assert all(isinstance(future.exception(LIMIT), CancelledError) for future in [half, *more])
    assert queue.same(queue.take_up_to(9), [1, 2, 3, 4])


def test_a_deadline_leaves_the_queue_usable(numbers):
    queue = numbers(2)
    why = "not finished after 0.01 s"
    fails(DeadlineExceededError, queue.take, timeout=0.01, match=why)
    fails(DeadlineExceededError, queue.take_many, 1, timeout=0.01, match=why)
    queue.put_many([1, 2], timeout=LIMIT)
    fails(DeadlineExceededError, queue.put, 3, timeout=0)
    fails(DeadlineExceededError, queue.take_many, 3, timeout=0.01)
    for timeout in (-1, float("nan")):
        fails(ValueError, queue.take, timeout=timeout, match="timeout")
    assert queue.size() == 2
    assert queue.same(queue.take_many(2, timeout=1e300), [1, 2])


def test_polling_the_size_changes_nothing(numbers, pool):
    queue = numbers()
    stop = threading.Event()

    def poll():
        while not stop.is_set():
            assert 0 <= queue.size() <= 10

    polling = pool.submit(poll)
    queue.put_many(range(10))
    for _ in range(50):
        queue.size()
    assert queue.same(queue.take_many(10), range(10))
    stop.set()
    polling.result(LIMIT)


def test_wrong_values_leave_the_queue_as_it_was(numbers):
    queue = numbers()
    fails(InvalidArgumentError, queue.queue.enqueue, (np.arange(2),) * len(queue.queue.dtypes))
    fails(ValueError, queue.queue.enqueue, {"x": 1})
    fails(ValueError, queue.queue.enqueue, (1, 1, 1))
    assert queue.size() == 0


# Priorities, with threads.


@pytest.mark.parametrize("put_many", [False, True])
@pytest.mark.parametrize("take_many", [False, True])
def test_priorities_sort_what_threads_put_in(make, pool, put_many, take_many):
    random = np.random.default_rng(3)
    queue = make(PriorityQueue, 2000, "int64", [()])
    priorities = random.integers(-100, 100, (10, 200))

    def put(row):
        if put_many:
            queue.enqueue_many((row, row * 3))
        else:
            for value in row:
                queue.enqueue((value, value * 3))

    for future in [pool.submit(put, row) for row in priorities]:
        future.result(LIMIT)
    if take_many:
        got = [queue.dequeue_many(200) for _ in range(10)]
        first, second = (np.concatenate(parts) for parts in zip(*got, strict=True))
    else:
        first, second = np.array([queue.dequeue() for _ in range(2000)]).T
    assert first.tolist() == sorted(priorities.ravel().tolist())
    assert (second == first * 3).all()


def test_priorities_with_a_full_queue(make, pool):
    queue = make(PriorityQueue, 10, "int64", [()])
    puts = [
        pool.submit(lambda s: [queue.enqueue((v, v)) for v in range(s, 600, 10)], s)
        for s in range(10)
    ]
    takes = [pool.submit(lambda: [queue.dequeue() for _ in range(60)]) for _ in range(10)]
    got = [pair for future in takes for pair in future.result(LIMIT)]
    assert all(future.result(LIMIT) for future in puts)
    assert sorted(int(value) for value, _ in got) == list(range(600))
    assert all(priority == value for priority, value in got)
