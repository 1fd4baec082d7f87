"""FIFOQueue and RandomShuffleQueue, without threads; `test_queue_conformance` has them."""

import copy
import pickle
import sys
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from strategies import errors
from strategies.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfRangeError,
)
from strategies.queues.queue_types import FIFOQueue, RandomShuffleQueue
from strategies.queues.state_machine import Dequeue, Enqueue

F32 = np.float32


def fifo(capacity=10, dtypes=F32, shapes=((),), **options):
    return FIFOQueue(capacity, dtypes, shapes, **options)


def shuffled(capacity=10, keep=0, dtypes=F32, shapes=((),), **options):
    return RandomShuffleQueue(capacity, keep, dtypes, shapes, **options)


both = pytest.mark.parametrize("make", [fifo, shuffled])


class Pending:
    """An operation submitted without a thread; tells whether and how often it has finished."""

    def __init__(self, queue, attempt):
        self.queue, self.attempt, self.calls = queue, attempt, 0
        attempt.on_done = self.called
        queue.state_machine.submit(attempt)

    def called(self):
        self.calls += 1

    @property
    def done(self):
        assert self.calls == self.attempt.done
        return self.attempt.done

    @property
    def error(self):
        return type(self.attempt.error)

    @property
    def values(self):
        assert self.done
        assert self.attempt.error is None
        if self.attempt.count is None:
            return self.attempt.row[0]
        pieces = self.attempt.pieces or []
        return [value for piece in pieces for value in piece[0].tolist()]


def enqueue(queue, value):
    return Pending(queue, Enqueue((F32(value),)))


def enqueue_many(queue, values):
    return Pending(queue, Enqueue((np.array(values, F32),), len(values)))


def dequeue(queue):
    return Pending(queue, Dequeue())


def dequeue_many(queue, count):
    return Pending(queue, Dequeue(count))


def dequeue_up_to(queue, count):
    return Pending(queue, Dequeue(count, up_to=True))


# Construction and what is accepted.


def test_attributes_are_kept():
    queue = FIFOQueue(10, ["int32", str, F32], [(1,), (), (5, 8)], names=["a", "b", "c"], name="q")
    assert queue.capacity == 10
    assert queue.dtypes == (np.dtype("int32"), str, np.dtype("float32"))
    assert queue.shapes == ((1,), (), (5, 8))
    assert queue.names == ("a", "b", "c")
    assert queue.name == "q"
    assert fifo().name != fifo().name
    assert shuffled(keep=3).min_after_dequeue == 3
    assert FIFOQueue(1, np.str_).dtypes == (str,)
    assert FIFOQueue(1, ">f4").dtypes == (np.dtype("float32"),)


@pytest.mark.parametrize(
    ("dtypes", "options", "error"),
    [
        ([], {}, ValueError),
        ([F32], {"shapes": [(), ()]}, ValueError),
        ([F32], {"shapes": [(None, 2)]}, ValueError),
        ([F32], {"shapes": [(-1,)]}, ValueError),
        ([F32], {"names": ["a", "b"]}, ValueError),
        ([F32, F32], {"names": ["a", "a"]}, ValueError),
        ([object], {}, TypeError),
        (["datetime64[s]"], {}, TypeError),
    ],
)
def test_construction_rejects(dtypes, options, error):
    with pytest.raises(error):
        FIFOQueue(10, dtypes, **options)


@pytest.mark.parametrize(("capacity", "keep"), [(10, -1), (10, 10), (10, 11), (0, 0)])
def test_min_after_dequeue_is_below_the_capacity(capacity, keep):
    with pytest.raises(InvalidArgumentError):
        shuffled(capacity, keep)


def test_unlimited_shuffle_queue_may_keep_any_number():
    queue = shuffled(-1, 100)
    queue.enqueue_many(np.arange(101, dtype=F32))
    queue.dequeue()
    with pytest.raises(DeadlineExceededError):
        queue.dequeue(timeout=0)


@both
def test_queues_do_not_share(make):
    first, second = make(), make()
    first.enqueue(1.0)
    assert (first.size(), second.size()) == (1, 0)


def test_sixteen_bit_dtypes():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        queue = fifo(4, dtype, [(2,)])
        queue.enqueue(np.array([1, 2], dtype))
        queue.enqueue_many(np.array([[3, 4]], dtype))
        batch = queue.dequeue_many(2)
        assert batch.dtype == dtype
        assert batch.astype(F32).tolist() == [[1, 2], [3, 4]]


def test_return_forms():
    queue = FIFOQueue(4, [F32, "int32"], [(), (2,)])
    queue.enqueue((1.5, [1, 2]))
    value, pair = queue.dequeue()
    assert value == 1.5
    assert type(value) is F32
    assert pair.dtype == np.int32
    named = FIFOQueue(4, [F32, str], [(), ()], names=["x", "y"])
    named.enqueue({"y": "one", "x": 1})
    named.enqueue_many({"x": [2, 3], "y": ["two", "three"]})
    assert named.dequeue() == {"x": 1.0, "y": "one"}
    batch = named.dequeue_many(2)
    assert batch["x"].tolist() == [2, 3]
    assert batch["y"].tolist() == ["two", "three"]
    single = FIFOQueue(4, F32, names=["x"])
    single.enqueue({"x": 1})
    assert single.dequeue() == {"x": 1.0}


def test_names_decide_whether_dicts_are_taken():
    with pytest.raises(ValueError, match="must have names"):
        fifo().enqueue({"x": 1.0})
    named = FIFOQueue(4, [F32], names=["x"])
    with pytest.raises(ValueError, match="enqueue a dictionary"):
        named.enqueue(1.0)
    with pytest.raises(ValueError, match="match names"):
        named.enqueue({"y": 1.0})
    with pytest.raises(ValueError, match="match names"):
        named.enqueue_many({"x": [1.0], "y": [1.0]})
    assert named.size() == 0


@pytest.mark.parametrize("values", [(1.0, 2.0), (), [1.0, 2.0, 3.0]])
def test_wrong_number_of_components(values):
    for queue in (fifo(), FIFOQueue(5, F32)):
        with pytest.raises(ValueError, match=f"expected 1, got {len(values)}"):
            queue.enqueue(values)
        with pytest.raises(ValueError, match=f"expected 1, got {len(values)}"):
            queue.enqueue_many(values)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (F32, np.float64(1)),
        (F32, np.int32(1)),
        (F32, "1"),
        (F32, b"1"),
        (F32, None),
        (F32, [[1.0], [1.0, 2.0]]),
        ("int32", 1.5),
        ("int32", 2**40),
        ("uint8", -1),
        ("uint8", 256),
        ("uint8", np.int64(1)),
        ("uint64", -1),
        ("uint64", 2**64),
        ("uint64", [2**63, -1]),
        ("int64", 2**63),
        ("int32", np.array([1.0])),
        (str, 1.0),
        (str, b"bytes"),
        (str, ["a", b"b"]),
        (bytes, "text"),
    ],
)
@pytest.mark.parametrize("shapes", [None, [()]])
def test_wrong_type(dtype, value, shapes):
    queue = FIFOQueue(5, dtype, shapes)
    with pytest.raises(InvalidArgumentError):
        queue.enqueue((value,))
    with pytest.raises(InvalidArgumentError):
        queue.enqueue_many((np.array([value]) if isinstance(value, np.generic) else [value],))
    assert queue.size() == 0


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int64"])
def test_whole_numbers_take_the_dtype(dtype):
    most = int(np.iinfo(dtype).max)
    queue = FIFOQueue(5, dtype, [()])
    queue.enqueue(5)
    queue.enqueue_many(([most, most],))
    row = queue.dequeue_many(3)
    assert (row.tolist(), row.dtype) == ([5, most, most], dtype)


def test_empty_lists_take_the_dtype():
    queue = FIFOQueue(5, ["int64", str], [(2, 2), ()])
    queue.enqueue_many(([], []))
    assert queue.size() == 0
    FIFOQueue(5, "int64").enqueue_many(([],))


def test_wrong_shape_names_the_component():
    queue = FIFOQueue(5, [F32, F32], [(), (3, 3)])
    with pytest.raises(InvalidArgumentError, match=r"component 1, expected \[3,3\], got \[3,4\]"):
        queue.enqueue((1.0, np.zeros((3, 4), F32)))
    with pytest.raises(InvalidArgumentError, match=r"component 1, expected \[3,3\], got \[3\]"):
        queue.enqueue_many((np.zeros(2, F32), np.zeros((2, 3), F32)))
    with pytest.raises(InvalidArgumentError, match=r"component 0, expected \[\], got \[1\]"):
        queue.enqueue(([1.0], np.zeros((3, 3), F32)))
    with pytest.raises(InvalidArgumentError, match=r"component 0, expected \[\], got \[2\]"):
        FIFOQueue(5, str, [()]).enqueue((["a", "b"],))
    assert queue.size() == 0


@pytest.mark.parametrize("shapes", [None, [(), ()]])
def test_enqueue_many_needs_the_same_number_of_rows(shapes):
    queue = FIFOQueue(5, [F32, F32], shapes)
    with pytest.raises(InvalidArgumentError, match="same size in dimension 0"):
        queue.enqueue_many(([1.0, 2.0], [1.0]))
    with pytest.raises(InvalidArgumentError, match="scalar"):
        queue.enqueue_many((1.0, 2.0))


def test_values_are_copied_both_ways():
    for shapes in (None, [(2,)]):
        queue = FIFOQueue(9, F32, shapes)
        mine = np.array([[1, 2], [3, 4]], F32)
        queue.enqueue(mine[0])
        queue.enqueue_many(mine)
        mine[:] = 0
        got = [queue.dequeue() for _ in range(3)]
        got[1][:] = 9
        assert [value.tolist() for value in got] == [[1, 2], [9, 9], [3, 4]]
    queue = FIFOQueue(9, F32, [(2,)])
    queue.enqueue_many(np.ones((4, 2), F32))
    queue.dequeue_many(2)[:] = 0
    assert queue.dequeue_many(2).tolist() == [[1, 1], [1, 1]]


def test_shapes_may_differ_if_none_are_given():
    queue = FIFOQueue(9, [F32, str])
    queue.enqueue(([1, 2, 3], "a"))
    queue.enqueue((4, ["b", "c"]))
    queue.enqueue_many(([[5, 6]], [["d"]]))
    first, second, third = queue.dequeue(), queue.dequeue(), queue.dequeue()
    assert (first[0].tolist(), first[1]) == ([1, 2, 3], "a")
    assert (second[0], second[1].tolist()) == (4, ["b", "c"])
    assert (third[0].tolist(), third[1].tolist()) == ([5, 6], ["d"])
    for batch in (queue.dequeue_many, queue.dequeue_up_to):
        for count in (0, 2):
            with pytest.raises(InvalidArgumentError, match="specified shapes"):
                batch(count)


def test_text_and_bytes():
    queue = FIFOQueue(9, [str, bytes], [(), (2,)])
    queue.enqueue(("ä", [b"1", b"\0"]))
    queue.enqueue_many((np.array(["b", "c"]), [[b"3", b"4"], [b"5", b"6"]]))
    text, data = queue.dequeue()
    assert text == "ä"
    assert data.tolist() == [b"1", b"\0"]
    texts, datas = queue.dequeue_many(2)
    assert texts.tolist() == ["b", "c"]
    assert all(type(value) is str for value in texts)
    assert datas.tolist() == [[b"3", b"4"], [b"5", b"6"]]


# Order and batches in one thread.


def test_fifo_order_over_many_rounds():
    queue = fifo(-1, "int64")
    seen, sent = [], 0
    for step in range(200):
        for _ in range(step % 7):
            queue.enqueue(sent)
            sent += 1
        queue.enqueue_many(np.arange(sent, sent + step % 40))
        sent += step % 40
        taken = min(queue.size(), step % 31)
        seen.extend(queue.dequeue_many(taken).tolist())
        if queue.size():
            seen.append(int(queue.dequeue()))
    seen.extend(queue.dequeue_many(queue.size()).tolist())
    assert seen == list(range(sent))


@both
def test_high_dimensions(make):
    queue = make(10, dtypes="int64", shapes=[(4, 4, 4, 4)])
    rows = np.arange(5 * 256).reshape(5, 4, 4, 4, 4)
    queue.enqueue_many(rows)
    batch = queue.dequeue_many(5)
    assert sorted(batch.reshape(5, -1).tolist()) == rows.reshape(5, -1).tolist()


@both
def test_nothing_is_enough_for_nothing(make):
    queue = make(5, shapes=[(3, 2)])
    for enqueued in (False, True):
        if enqueued:
            queue.enqueue(np.zeros((3, 2), F32))
        assert queue.dequeue_many(0).shape == (0, 3, 2)
        assert queue.dequeue_up_to(0).shape == (0, 3, 2)
    queue.enqueue_many(np.zeros((0, 3, 2), F32))
    queue.close()
    queue.enqueue_many(np.zeros((0, 3, 2), F32))
    assert queue.dequeue_many(0).shape == (0, 3, 2)
    with pytest.raises(ValueError, match="negative"):
        queue.dequeue_many(-1)


def test_shuffle_is_a_permutation_that_depends_on_the_seed():
    def order(seed, take):
        queue = shuffled(-1, 0, "int64", seed=seed)
        queue.enqueue_many(np.arange(500))
        queue.close()
        return take(queue)

    def singly(queue):
        return [int(queue.dequeue()) for _ in range(500)]

    def in_batches(queue):
        return queue.dequeue_many(300).tolist() + queue.dequeue_up_to(300).tolist()

    one, other = order(1729, singly), order(87539319, singly)
    assert sorted(one) == sorted(other) == list(range(500))
    assert one != other
    assert one != list(range(500))
    assert order(1729, singly) == one
    assert order(1729, in_batches) == one  # however many are taken at a time
    assert order(None, in_batches) != order(None, in_batches)


def test_shuffle_is_uniform():
    rounds, size = 2000, 5
    counts = np.zeros((size, size), int)
    queue = shuffled(size, 0, "int64", seed=1)
    for _ in range(rounds):
        queue.enqueue_many(np.arange(size))
        counts[np.arange(size), queue.dequeue_many(size)] += 1
    # Each count is binomial; 6 standard deviations.
    expected = rounds / size
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected * (1 - 1 / size))


def test_shuffle_keeps_the_minimum_while_open():
    queue = shuffled(50, 10)
    queue.enqueue_many(np.arange(22, dtype=F32))
    sizes = []
    for _ in range(2):
        assert dequeue_many(queue, 5).done
        sizes.append(queue.size())
    third = dequeue_many(queue, 5)
    assert (sizes, queue.size(), third.done) == ([17, 12], 10, False)
    for value in range(3):
        assert not third.done
        enqueue(queue, 100 + value)
    assert third.done
    assert queue.size() == 10
    queue.close()
    assert len(dequeue_many(queue, 10).values) == 10


@both
def test_memory_does_not_grow_with_use(make):
    queue = make(-1, shapes=[(1000,)])
    rows = np.zeros((10, 1000), F32)
    queue.enqueue_many(rows)
    tracemalloc.start()
    try:
        for _ in range(200):
            queue.enqueue_many(rows)
            queue.enqueue(rows[0])
            queue.dequeue()
            queue.dequeue_many(10)
        assert tracemalloc.get_traced_memory()[1] < 20 * rows.nbytes
    finally:
        tracemalloc.stop()


@both
def test_objects_that_have_left_are_forgotten(make):
    queue = make(dtypes=str)
    text = "long text" * 100
    queue.enqueue(text)
    queue.enqueue_many(([text, text],))
    held = sys.getrefcount(text)
    queue.dequeue()
    queue.dequeue_many(2)
    assert sys.getrefcount(text) == held - 3


# Waiting, seen through attempts that need no thread.


@both
def test_dequeue_waits_for_an_element(make):
    queue = make()
    waiting = [dequeue(queue) for _ in range(3)]
    values = []
    for value in range(3):
        assert [one.done for one in waiting] == [index < value for index in range(3)]
        enqueue(queue, value)
        values.append(waiting[value].values)
    assert values == [0, 1, 2]  # the first to come is the first to be served


@both
def test_enqueue_waits_for_room(make):
    queue = make(2)
    queue.enqueue_many(([1.0, 2.0],))
    more = enqueue_many(queue, [3, 4, 5])
    last = enqueue(queue, 6)
    taken = []
    for _ in range(3):
        assert not more.done
        assert queue.size() == 2
        taken.append(queue.dequeue())
    assert more.done
    assert not last.done
    taken += queue.dequeue_many(3).tolist()
    assert last.done
    assert sorted(taken) == [1, 2, 3, 4, 5, 6]


def test_capacity_zero_lets_nothing_in():
    queue = fifo(0)
    waiting = enqueue(queue, 1)
    assert not waiting.done
    assert not dequeue(queue).done
    assert not waiting.done


def test_a_big_dequeue_collects_as_rows_come():
    queue = fifo(2)
    many = dequeue_many(queue, 4)
    single = dequeue(queue)
    for value in range(4):
        assert not many.done
        enqueue(queue, value)
        assert queue.size() == 0
    assert many.values == [0, 1, 2, 3]
    assert not single.done
    enqueue(queue, 4)
    assert single.values == 4


def test_big_enqueue_and_big_dequeue_pass_through_a_small_queue():
    queue = fifo(5)
    many = enqueue_many(queue, range(100))
    assert dequeue_many(queue, 93).values == list(range(93))
    assert not many.done
    assert dequeue_many(queue, 2).values == [93, 94]
    assert many.done
    assert queue.size() == 5


# Closing.


@both
@pytest.mark.parametrize("cancel", [False, True])
def test_close_ends_waiting_dequeues(make, cancel):
    queue = make()
    waiting = [dequeue(queue), dequeue_many(queue, 2), dequeue_up_to(queue, 2)]
    queue.close(cancel_pending_enqueues=cancel)
    assert [one.error for one in waiting] == [OutOfRangeError] * 3


def test_up_to_smaller_than_the_minimum_waits_for_the_close():
    queue = shuffled(5, 2)
    queue.enqueue_many(([1.0, 2.0, 3.0, 4.0],))
    waiting = dequeue_up_to(queue, 3)
    assert not waiting.done
    queue.close()
    assert len(waiting.values) == 3
    assert len(queue.dequeue_up_to(3)) == 1


# Deadlines.


def test_rows_of_an_expired_dequeue_go_back_in_front():
    queue = fifo(3)
    queue.enqueue_many(([1.0, 2.0],))
    many = dequeue_many(queue, 4)
    after = dequeue_many(queue, 2)
    queue.enqueue(3.0)
    queue.state_machine.withdraw(many.attempt, DeadlineExceededError("late"))
    assert many.error is DeadlineExceededError
    assert after.values == [1, 2]
    queue.state_machine.withdraw(after.attempt, DeadlineExceededError("late"))
    assert after.attempt.error is None
    assert queue.dequeue() == 3


def test_rows_given_back_may_exceed_the_capacity():
    queue = fifo(2)
    many = dequeue_many(queue, 5)
    entering = enqueue_many(queue, [1, 2, 3, 4])
    queue.state_machine.withdraw(many.attempt, DeadlineExceededError("late"))
    assert entering.done
    assert queue.size() == 4
    waiting = enqueue(queue, 5)
    assert queue.dequeue_many(2).tolist() == [1, 2]
    assert not waiting.done
    assert queue.dequeue_many(3).tolist() == [3, 4, 5]


def test_expired_enqueue_many_and_close():
    queue = fifo(2)
    with pytest.raises(DeadlineExceededError):
        queue.enqueue_many(([1.0, 2.0, 3.0],), timeout=0)
    assert queue.size() == 2
    waiting = enqueue(queue, 4)
    with pytest.raises(DeadlineExceededError):
        queue.close(timeout=0)
    assert not queue.is_closed()
    assert queue.dequeue_many(2).tolist() == [1, 2]
    assert waiting.done
    queue.enqueue(5.0)
    queue.close()
    assert queue.dequeue_up_to(9).tolist() == [4, 5]


def test_an_interrupted_caller_takes_nothing(monkeypatch):
    queue = fifo(4)

    class Interrupted:
        """A lock whose second acquire is hit by a signal."""

        def __init__(self):
            self.calls = 0

        def acquire(self, **_):
            self.calls += 1
            if self.calls == 2:
                if self.completes:
                    queue.enqueue_many(([1.0, 2.0],))
                raise KeyboardInterrupt

        def release(self):
            pass

    for Interrupted.completes in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Lock", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                queue.dequeue_many(2)
    assert queue.dequeue_many(2, timeout=0).tolist() == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.dequeue()
    assert queue.dequeue_many(2, timeout=0).tolist() == [1, 2]


def told(on_done):
    attempt = Dequeue()
    attempt.on_done = on_done
    return attempt


def test_a_failing_callback_hurts_nobody(caplog):
    queue = fifo()

    def fail():
        raise RuntimeError("callback")

    queue.state_machine.submit(told(fail))
    after = dequeue(queue)
    queue.enqueue_many(([1.0, 2.0],))
    assert after.values == 2
    assert "callback" in caplog.text


def test_a_callback_may_use_the_queue():
    queue = fifo(1)
    got = []

    def again():
        got.append(attempts[-1].row[0])
        if len(got) < 100:
            attempts.append(told(again))
            queue.state_machine.submit(attempts[-1])

    attempts = [told(again)]
    queue.state_machine.submit(attempts[0])
    queue.enqueue_many(np.arange(100, dtype=F32))
    assert got == list(range(100))


# Errors as values.


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_survive_pickle_and_copy(name):
    kind = getattr(errors, name)
    error = kind("what happened")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert twin.message == str(twin) == "what happened"
        assert twin.code == error.code == error.code.upper()
    assert issubclass(kind, errors.OpError)


def test_codes_tell_the_classes_apart():
    kinds = [getattr(errors, name) for name in errors.__all__ if name != "OpError"]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert issubclass(InvalidArgumentError, ValueError)
