"""What only some kinds of queues do: padding, priorities, and choosing one of several."""

import tracemalloc

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
    Queue,
    RandomShuffleQueue,
)
from strategies.queues.state_machine import Close, Dequeue, Enqueue

I64, F32 = np.dtype("int64"), np.dtype("float32")


# Padding.


def test_padding_the_batch_of_the_chapter():
    """Arrays of 3x2, 1x1 and 2x4 become a batch of 3x3x4."""
    queue = PaddingFIFOQueue(10, F32, [(None, None)])
    for rows, columns in ((3, 2), (1, 1), (2, 4)):
        queue.enqueue(np.full((rows, columns), rows * 10 + columns, F32))
    batch = queue.dequeue_many(3)
    assert batch.shape == (3, 3, 4)
    assert batch.dtype == F32
    for index, (rows, columns) in enumerate(((3, 2), (1, 1), (2, 4))):
        assert (batch[index, :rows, :columns] == rows * 10 + columns).all()
        assert batch[index].sum() == rows * columns * (rows * 10 + columns)


def test_padding_of_text():
    queue = PaddingFIFOQueue(10, [str, str], [(None,), (1, None)])
    words = [["a"], ["ab"], ["abc"], ["abc", "d"], ["abc", "d", "e"], ["abc", "d", "e", "f"]]
    for row in words:
        queue.enqueue((row, [row]))
    first, second = queue.dequeue_many(5)
    expected = [row + [""] * (3 - len(row)) for row in words[:5]]
    assert first.tolist() == expected
    assert second.tolist() == [[row] for row in expected]
    first, second = queue.dequeue()
    assert first.tolist() == words[5]
    assert second.tolist() == [words[5]]


@pytest.mark.parametrize(
    ("dtype", "value", "filler"),
    [(bool, True, False), (bytes, b"x", b""), ("int32", 7, 0), ("complex64", 1j, 0)],
)
def test_what_padding_consists_of(dtype, value, filler):
    queue = PaddingFIFOQueue(10, dtype, [(None,)])
    queue.enqueue(([value],))
    queue.enqueue(([value, value],))
    assert queue.dequeue_many(2).tolist() == [[value, filler], [value, value]]


def test_padding_only_where_sizes_are_unknown():
    queue = PaddingFIFOQueue(10, [F32, "int32"], [(None, 3), ()])
    queue.enqueue((np.ones((2, 3)).astype(F32), 5))
    queue.enqueue_many((np.ones((2, 1, 3), F32), [6, 7]))
    for wrong in (np.ones((2, 4), F32), np.ones(3, F32), np.ones((1, 2, 3), F32)):
        with pytest.raises(InvalidArgumentError, match=r"component 0, expected \[\?,3\], got \["):
            queue.enqueue((wrong, 5))
        with pytest.raises(InvalidArgumentError, match=r"component 0, expected \[\?,3\], got \["):
            queue.enqueue_many((wrong[None], [5]))
    values, numbers = queue.dequeue_many(3)
    assert values.sum(axis=(1, 2)).tolist() == [6, 3, 3]
    assert numbers.tolist() == [5, 6, 7]
    assert numbers.dtype == np.int32


def test_padding_of_nothing():
    queue = PaddingFIFOQueue(10, [F32, str], [(None, 2, None), (None,)])
    queue.enqueue_many(([], []))
    for take in (queue.dequeue_many, queue.dequeue_up_to):
        numbers, texts = take(0)
        assert (numbers.shape, numbers.dtype, texts.shape) == ((0, 0, 2, 0), F32, (0, 0))
    queue.enqueue((np.zeros((0, 2, 3), F32), []))
    assert queue.dequeue_many(1)[0].shape == (1, 0, 2, 3)


def test_padding_is_per_batch_and_survives_a_restore():
    queue = PaddingFIFOQueue(10, "int64", [(None,)])
    many = Dequeue(4)
    queue.state_machine.submit(many)
    for size in (3, 1, 2):
        queue.enqueue((np.arange(size),))
    queue.state_machine.withdraw(many, DeadlineExceededError("late"))
    assert queue.size() == 3
    assert queue.dequeue().tolist() == [0, 1, 2]
    assert queue.dequeue_many(2).tolist() == [[0, 0], [0, 1]]


def test_padded_elements_are_copies():
    queue = PaddingFIFOQueue(10, "int64", [(None,)])
    mine = np.arange(3)
    queue.enqueue((mine,))
    queue.enqueue_many((mine[None],))
    mine[:] = 9
    assert queue.dequeue().tolist() == [0, 1, 2]
    assert queue.dequeue_many(1).tolist() == [[0, 1, 2]]


def test_padding_needs_shapes_of_known_rank():
    with pytest.raises(ValueError, match="list of shapes must be provided"):
        PaddingFIFOQueue(10, F32, None)
    for shapes in ([None], [(None,), ()], [(-1,)]):
        with pytest.raises(ValueError, match="shape"):
            PaddingFIFOQueue(10, F32, shapes)


# Priorities.


def test_smallest_priority_first_and_equal_ones_in_order():
    queue = PriorityQueue(100, str, [()])
    queue.enqueue_many(([3, 1, 2, 1, 3], ["c", "a", "b", "a2", "c2"]))
    queue.enqueue((np.int64(-(2**63)), "first"))
    queue.enqueue((2**63 - 1, "last"))
    priorities, texts = queue.dequeue_many(5)
    assert texts.tolist() == ["first", "a", "a2", "b", "c"]
    assert priorities.tolist() == [-(2**63), 1, 1, 2, 3]
    assert priorities.dtype == I64
    assert queue.dequeue() == (3, "c2")
    assert queue.dequeue() == (2**63 - 1, "last")


def test_priority_attributes():
    queue = PriorityQueue(5, ["int32", str], [(2,), ()], names=["p", "x", "y"], name="jobs")
    assert queue.dtypes == (I64, np.dtype("int32"), str)
    assert queue.shapes == ((), (2,), ())
    assert queue.names == ("p", "x", "y")
    queue.enqueue({"p": 1, "x": [1, 2], "y": "z"})
    assert queue.dequeue()["y"] == "z"
    alone = PriorityQueue(5)
    alone.enqueue(2)
    alone.enqueue(1)
    assert (alone.dequeue(), alone.dequeue()) == (1, 2)
    with pytest.raises(ValueError, match="names"):
        PriorityQueue(5, str, names=["x"])


@pytest.mark.parametrize("shapes", [None, [()]])
@pytest.mark.parametrize("priority", ["a", 1.5, np.int32(1), np.float64(1), True, None])
def test_a_priority_is_an_int64(shapes, priority):
    queue = PriorityQueue(5, str, shapes)
    with pytest.raises(TypeError, match="int64"):
        queue.enqueue((priority, "x"))
    with pytest.raises(TypeError, match="int64"):
        queue.enqueue_many((np.array([priority]), ["x"]))
    assert queue.size() == 0


@pytest.mark.parametrize("shapes", [None, [()]])
def test_a_priority_is_a_scalar(shapes):
    queue = PriorityQueue(5, str, shapes)
    with pytest.raises(InvalidArgumentError, match=r"component 0, expected \[\], got \[2\]"):
        queue.enqueue(([1, 2], "x"))
    with pytest.raises(InvalidArgumentError, match=r"component 0, expected \[\], got \[2\]"):
        queue.enqueue_many(([[1, 2]], ["x"]))
    queue.enqueue_many(([], []))
    queue.enqueue((1, "x"))
    assert queue.dequeue() == (1, "x")


def test_priorities_survive_growth_and_restore():
    random = np.random.default_rng(1)
    queue = PriorityQueue(-1, "int64", [()])
    expected = []
    for number, priority in enumerate(random.integers(0, 20, 300).tolist()):
        queue.enqueue((priority, 2 * number))
        expected.append((priority, 2 * number))
        if number % 3 == 2:
            expected.sort()
            assert tuple(map(int, queue.dequeue())) == expected.pop(0)
        if number % 50 == 49:  # some leave, with a batch that never becomes full, and come back
            many = Dequeue(1000)
            queue.state_machine.submit(many)
            queue.enqueue((5, 2 * number + 1))
            expected.append((5, 2 * number + 1))
            assert queue.size() == 0
            queue.state_machine.withdraw(many, DeadlineExceededError("late"))
    expected.sort()
    priorities, numbers = queue.dequeue_many(len(expected))
    assert list(zip(priorities.tolist(), numbers.tolist(), strict=True)) == expected


def test_a_priority_queue_forgets_objects_that_have_left():
    queue = PriorityQueue(-1, str, [()])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for priority in range(40):
            queue.enqueue((priority, str(priority) * 10_000))
        assert tracemalloc.get_traced_memory()[0] - before > 600_000
        queue.dequeue()
        queue.dequeue_many(39)
        assert tracemalloc.get_traced_memory()[0] - before < 10_000  # no text
    finally:
        tracemalloc.stop()


def test_memory_of_a_priority_queue_does_not_grow_with_use():
    queue = PriorityQueue(-1, "float32", [(1000,)])
    rows = np.zeros((10, 1000), "float32")
    peaks = []
    tracemalloc.start()
    try:
        for step in range(200):
            queue.enqueue_many((np.arange(10) + step, rows))
            queue.enqueue((0, rows[0]))
            queue.dequeue()
            queue.dequeue_many(10)
            peaks.append(tracemalloc.get_traced_memory()[1])
        assert peaks[-1] < 1.5 * peaks[20]
    finally:
        tracemalloc.stop()


# What is the same for all.


def make_all():
    return [
        FIFOQueue(4, "int64", [()]),
        RandomShuffleQueue(4, 0, "int64", [()], seed=7),
        PaddingFIFOQueue(4, "int64", [()]),
        PriorityQueue(4),
    ]


def test_constructor_arguments_can_be_read_back():
    for queue in make_all():
        assert queue.capacity == 4
        assert queue.dtypes == (I64,)
        assert queue.shapes == ((),)
        assert queue.names is None
    shuffled = make_all()[1]
    assert (shuffled.min_after_dequeue, shuffled.seed) == (0, 7)


@pytest.mark.parametrize("index", range(4))
def test_ending_the_process_cancels_what_waits(index):
    queue = make_all()[index]
    taking = [Dequeue(3), Dequeue()]
    for attempt in taking:
        queue.state_machine.submit(attempt)
    queue.enqueue_many(np.arange(2))
    queue.cancel_pending()
    assert [type(attempt.error) for attempt in taking] == [CancelledError] * 2
    assert "was cancelled" in str(taking[0].error)
    assert sorted(queue.dequeue_many(2).tolist()) == [0, 1]
    queue.enqueue_many(np.arange(4))
    entering = [Enqueue((np.int64(5),)), Enqueue((np.arange(2),), 2), Close()]
    for attempt in entering:
        queue.state_machine.submit(attempt)
    queue.cancel_pending()
    assert [type(attempt.error) for attempt in entering] == [CancelledError] * 3
    assert not queue.is_closed()
    assert queue.size() == 4
    queue.cancel_pending()
    queue.close()
    with pytest.raises(OutOfRangeError):
        queue.dequeue_many(5)


def test_one_of_a_list():
    queues = make_all()
    for index, queue in enumerate(queues):
        assert Queue.from_list(np.int64(index), queues) is queue
        assert FIFOQueue.from_list(index, queues) is queue
    for index in (-1, 4):
        with pytest.raises(InvalidArgumentError, match=r"is not in \[0, 4\)"):
            Queue.from_list(index, queues)
    for wrong in (tuple(queues), [], queues[0], [queues[0], "queue"]):
        with pytest.raises(TypeError, match="list of queues"):
            Queue.from_list(0, wrong)
    with pytest.raises(TypeError, match="dtypes"):
        Queue.from_list(0, [*queues, FIFOQueue(4, F32)])
    with pytest.raises(TypeError, match="names"):
        Queue.from_list(0, [*queues, FIFOQueue(4, "int64", names=["x"])])


def test_numbers_of_python_become_numbers_of_the_queue():
    queue = FIFOQueue(4, F32)
    queue.enqueue(0.1)
    queue.enqueue(F32.type(0.1))
    assert [type(queue.dequeue()) for _ in range(2)] == [np.float32] * 2
