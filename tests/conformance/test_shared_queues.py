"""The same behaviour of a queue here and of a queue on another rank; and what ranks share."""

import contextlib
import threading
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from calls import LIMIT, in_thread

from strategies.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    OutOfRangeError,
)
from strategies.queues.queue_types import FIFOQueue, PriorityQueue, RandomShuffleQueue
from strategies.queues.remote import shared_queue
from strategies.queues.shared_files import shared_files, shared_range
from strategies.rpc.registry import container
from strategies.rpc.service import Service

F32 = np.float32

behaviours = []


def behaviour(function):
    """A property of queues, wherever they are; gets a function that makes one."""
    behaviours.append(function)
    return function


@pytest.mark.parametrize("place", ["here", "on another rank"])
@pytest.mark.parametrize("check", behaviours, ids=lambda check: check.__name__)
def test_behaviour(comm, place, check):
    if place == "here":
        check(lambda kind, *args, **options: kind(*args, **options, name="q"))
        return
    with Service(comm) as service:

        def make(kind, *args, **options):
            service.reset(["test"])
            return shared_queue(
                kind, *args, **options, service=service, shared_name="q", container="test"
            )

        if comm.rank == comm.size - 1:
            check(make)


@behaviour
def rows_leave_in_order_of_arrival(make):
    queue = make(FIFOQueue, 100, F32, [()])
    queue.enqueue(0)
    queue.enqueue_many([np.arange(1, 50, dtype=F32)])
    assert queue.size() == 50
    assert queue.dequeue() == 0
    np.testing.assert_array_equal(queue.dequeue_many(9), np.arange(1, 10))
    np.testing.assert_array_equal(queue.dequeue_up_to(40), np.arange(10, 50))
    assert queue.size() == 0


@behaviour
def values_keep_type_dtype_shape_and_content(make):
    queue = make(FIFOQueue, 4, [F32, str, bytes, np.int64, bool], [(2, 3), (), (), (0,), ()])
    image = np.arange(6, dtype=F32).reshape(2, 3)
    queue.enqueue((image, "ä \ud800 \0", b"\xff\0", np.empty(0, np.int64), True))
    got = queue.dequeue()
    np.testing.assert_array_equal(got[0], image)
    assert got[1:3] == ("ä \ud800 \0", b"\xff\0")
    assert (got[3].shape, got[3].dtype) == ((0,), np.int64)
    assert (type(got[4]), got[4]) == (np.bool_, True)
    queue.enqueue_many(
        ([image, image + 1], ["a", "bc"], [b"", b"1"], np.empty((2, 0), np.int64), [True, False])
    )
    many = queue.dequeue_many(2)
    np.testing.assert_array_equal(many[0], [image, image + 1])
    assert [part.tolist() for part in many[1:]] == [
        ["a", "bc"],
        [b"", b"1"],
        [[], []],
        [True, False],
    ]
    assert [part.dtype for part in many] == [F32, object, object, np.int64, bool]


@behaviour
def elements_belong_to_the_taker(make):
    queue = make(FIFOQueue, 4, F32, [(3,)])
    mine = np.zeros(3, F32)
    queue.enqueue((mine,))
    mine[:] = 7
    taken = queue.dequeue()
    np.testing.assert_array_equal(taken, 0)
    taken[:] = 1  # writable
    queue.enqueue_many((np.ones((2, 3), F32),))
    queue.dequeue_many(2)[:] = 2


@behaviour
def all_numeric_dtypes_travel(make):
    for dtype in ("int8", "uint64", "float16", "complex64", ml_dtypes.bfloat16):
        queue = make(FIFOQueue, 4, dtype, [()])
        values = np.arange(3).astype(dtype)
        queue.enqueue_many((values,))
        got = queue.dequeue_many(3)
        assert got.dtype == values.dtype
        np.testing.assert_array_equal(got, values)
        queue.enqueue(values[1])
        assert type(queue.dequeue()) is type(values[1])


@behaviour
def large_arrays_arrive_whole(make):
    queue = make(FIFOQueue, 4, np.int32, [(700, 1000)])
    arrays = np.arange(2 * 700_000, dtype=np.int32).reshape(2, 700, 1000)
    for array in arrays:
        queue.enqueue((array,))
    queue.enqueue_many((arrays[:, :, ::-1],))  # not contiguous
    np.testing.assert_array_equal(queue.dequeue(), arrays[0])
    got = queue.dequeue_many(3)
    np.testing.assert_array_equal(got, [arrays[1], *arrays[:, :, ::-1]])


@behaviour
def shapes_may_be_unknown(make):
    queue = make(FIFOQueue, 10, [F32, str])
    sent = [(np.ones((2, n), F32), np.array(["x"] * n, object)) for n in range(3)]
    for pair in sent:
        queue.enqueue(pair)
    for numbers, texts in sent:
        got = queue.dequeue()
        np.testing.assert_array_equal(got[0], numbers)
        assert got[1].tolist() == texts.tolist()
    queue.enqueue((1.5, "single"))
    number, text = queue.dequeue()
    assert (type(number), number, text) == (F32, 1.5, "single")
    with pytest.raises(InvalidArgumentError, match="specified shapes"):
        queue.dequeue_many(0)


@behaviour
def a_full_queue_makes_enqueues_wait(make):
    queue = make(FIFOQueue, 2, F32, [()])
    blocked = in_thread(queue.enqueue_many, (np.arange(6, dtype=F32),))
    np.testing.assert_array_equal(queue.dequeue_many(6, timeout=LIMIT), np.arange(6))
    blocked.result(LIMIT)


@behaviour
def an_empty_queue_makes_dequeues_wait(make):
    queue = make(FIFOQueue, 2, F32, [()])
    waiting = [in_thread(queue.dequeue) for _ in range(3)]
    queue.enqueue_many((np.arange(3, dtype=F32),))
    assert {one.result(LIMIT) for one in waiting} == {0, 1, 2}


@behaviour
def a_deadline_puts_back_what_was_taken(make):
    queue = make(FIFOQueue, 10, F32, [()])
    queue.enqueue_many((np.arange(3, dtype=F32),))
    with pytest.raises(DeadlineExceededError, match="dequeue_many: not finished after 0.05 s"):
        queue.dequeue_many(4, timeout=0.05)
    assert queue.size() == 3
    np.testing.assert_array_equal(queue.dequeue_many(3, timeout=0), [0, 1, 2])
    full = make(FIFOQueue, 1, F32, [()])
    with pytest.raises(DeadlineExceededError):
        full.enqueue_many((np.arange(3, dtype=F32),), timeout=0.05)
    assert full.dequeue(timeout=0) == 0
    assert full.size() == 0


@behaviour
def a_closed_queue_gives_what_is_left(make):
    queue = make(FIFOQueue, 10, F32, [()])
    queue.enqueue_many((np.arange(4, dtype=F32),))
    assert not queue.is_closed()
    queue.close()
    assert queue.is_closed()
    with pytest.raises(OutOfRangeError, match=r"requested 5, current size 4"):
        queue.dequeue_many(5)
    np.testing.assert_array_equal(queue.dequeue_up_to(3), [0, 1, 2])
    assert queue.dequeue() == 3
    for call in (queue.dequeue, lambda: queue.dequeue_up_to(1)):
        with pytest.raises(OutOfRangeError):
            call()
    for call in (lambda: queue.enqueue(1), queue.close):
        with pytest.raises(CancelledError, match="closed"):
            call()
    queue.close(cancel_pending_enqueues=True)
    queue.enqueue_many((np.empty(0, F32),))
    assert queue.dequeue_many(0).shape == (0,)


@behaviour
def closing_ends_those_who_wait(make):
    queue = make(FIFOQueue, 1, F32, [()])
    waiting = in_thread(queue.dequeue_many, 3)
    queue.close()
    with pytest.raises(OutOfRangeError):
        waiting.result(LIMIT)
    full = make(FIFOQueue, 1, F32, [()])
    full.enqueue(0)
    blocked = in_thread(full.enqueue_many, (np.arange(1, 9, dtype=F32),))
    full.close(cancel_pending_enqueues=True)
    with pytest.raises(CancelledError):
        blocked.result(LIMIT)
    assert full.dequeue() == 0


@behaviour
def the_same_mistakes_give_the_same_errors(make):
    queue = make(FIFOQueue, 4, [F32, np.int32], [(2,), ()])
    local = FIFOQueue(4, [F32, np.int32], [(2,), ()], name="q")
    for call in (
        lambda q: q.enqueue(1),
        lambda q: q.enqueue(([1, 2, 3], 1)),
        lambda q: q.enqueue((np.zeros(2), 1)),
        lambda q: q.enqueue_many((np.zeros((2, 2), F32), [1])),
        lambda q: q.enqueue({"a": 1}),
        lambda q: q.dequeue_many(-1),
        lambda q: q.dequeue(timeout=-1),
        lambda q: q.dequeue(timeout=0.01),
        lambda q: (q.close(), q.enqueue(([1, 2], 1))),
        lambda q: q.dequeue(),
    ):
        found = []
        for tried in (queue, local):
            with pytest.raises((OpError, ValueError)) as caught:
                call(tried)
            found.append((type(caught.value), str(caught.value)))
        assert found[0] == found[1]


@behaviour
def an_interrupted_dequeue_loses_nothing(make):
    queue = make(FIFOQueue, 4, F32, [()])

    class Interrupt(BaseException):
        pass

    def interrupted(attempt, on_done):
        queue.state_machine.__class__.when_done(queue.state_machine, attempt, on_done)
        raise Interrupt

    for count in (None, 2):
        queue.enqueue(1)
        queue.state_machine.when_done = interrupted
        with pytest.raises(Interrupt):
            queue.dequeue_many(count) if count else _dequeue_late(queue)
        del queue.state_machine.when_done
        assert queue.dequeue(timeout=LIMIT) == 1
        assert queue.size() == 0


def _dequeue_late(queue):
    """As `dequeue`, but always get as far as waiting."""
    from strategies.queues.state_machine import Dequeue
    from strategies.rpc.operation import finish

    attempt = Dequeue()
    queue.state_machine.submit(attempt)
    finish(queue.state_machine, attempt, "dequeue", LIMIT)


@behaviour
def cancelling_ends_all_that_waits_and_leaves_the_queue_open(make):
    queue = make(FIFOQueue, 4, F32, [()])
    started = threading.Event()

    def wait():
        started.set()
        return queue.dequeue_many(2)

    queue.enqueue(1)
    waiting = in_thread(wait)
    started.wait(LIMIT)
    while not waiting.done():
        queue.cancel_pending()
    with pytest.raises(CancelledError):
        waiting.result(LIMIT)
    assert queue.dequeue(timeout=LIMIT) == 1


@behaviour
def many_threads_lose_and_double_nothing(make):
    queue = make(FIFOQueue, 7, np.int64, [()])
    puts = [in_thread(queue.enqueue_many, (np.arange(at, at + 25),)) for at in range(0, 100, 25)]
    takes = [in_thread(queue.dequeue_many, 20) for _ in range(5)]
    got = [value for take in takes for value in take.result(LIMIT).tolist()]
    assert sorted(got) == list(range(100))
    for put in puts:
        put.result(LIMIT)


# What ranks share.


def until_the_end(queue):
    while True:
        try:
            yield queue.dequeue(timeout=LIMIT)
        except OutOfRangeError:
            return


def test_every_item_of_every_rank_reaches_exactly_one_rank(comm):
    with Service(comm) as service:
        queue = shared_queue(
            FIFOQueue, 5, np.int64, [()], service=service, shared_name="work",
            task=comm.size - 1,
        )  # fmt: skip
        mine = np.arange(20) + 100 * comm.rank
        put = in_thread(queue.enqueue_many, (mine,))
        got = queue.dequeue_many(20, timeout=LIMIT).tolist()
        put.result(LIMIT)
        everything = sum(comm.allgather_object(got), [])
        assert Counter(everything) == Counter(
            100 * rank + i for rank in range(comm.size) for i in range(20)
        )
        assert queue.size() == 0


def test_a_rank_wakes_another_that_waits(comm):
    with Service(comm) as service:
        ring = [
            shared_queue(FIFOQueue, 2, np.int64, [()], service=service,
                         shared_name="ring", task=task)
            for task in range(comm.size)
        ]  # fmt: skip
        if comm.rank == 0:
            ring[0].enqueue(0)
        for turn in range(3):
            hops = ring[comm.rank].dequeue(timeout=LIMIT)
            assert hops == turn * comm.size + comm.rank
            ring[(comm.rank + 1) % comm.size].enqueue(hops + 1)


DIFFERENCES = {
    "capacity": (FIFOQueue, (9, F32, [()]), {}),
    "dtypes": (FIFOQueue, (8, "int32", [()]), {}),
    "shapes": (FIFOQueue, (8, F32, [(1,)]), {}),
    "names": (FIFOQueue, (8, F32, [()]), {"names": ["a"]}),
    "kind": (PriorityQueue, (8, F32, [()]), {}),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_second_constructor_must_agree(comm, what):
    with Service(comm) as service:

        def open_(kind, *args, **options):
            return shared_queue(kind, *args, **options, service=service, shared_name="one")

        queue = open_(FIFOQueue, 8, F32, [()])
        kind, args, options = DIFFERENCES[what]
        with pytest.raises(InvalidArgumentError, match=what) as caught:
            open_(kind, *args, **options)
        assert "'one' on task 0" in str(caught.value)
        assert open_(FIFOQueue, capacity=8, dtypes=["float32"], shapes=([],)).capacity == 8
        comm.barrier()
        queue.enqueue(comm.rank)


def test_seeds_must_agree_where_they_are_given(comm):
    with Service(comm) as service:

        def open_(name, keep, seed):
            return shared_queue(RandomShuffleQueue, 8, keep, F32, [()], seed=seed,
                                service=service, shared_name=name)  # fmt: skip

        open_("seeded", 2, 1)
        open_("seeded", 2, None)
        with pytest.raises(InvalidArgumentError, match="another seed, expected 1, got 2"):
            open_("seeded", 2, 2)
        with pytest.raises(InvalidArgumentError, match="another min_after_dequeue"):
            open_("seeded", 3, 1)


def test_names_in_other_containers_and_on_other_tasks_are_others(comm):
    with Service(comm) as service:

        def open_(**where):
            return shared_queue(FIFOQueue, 99, np.int64, [()], service=service,
                                shared_name="n", **where)  # fmt: skip

        with container("exp"):
            scoped = open_()
            with container("inner"):
                inner = open_()
        queues = [open_(), scoped, inner, open_(container="exp"), open_(task=comm.size - 1)]
        comm.barrier()
        for number, queue in enumerate(queues):
            queue.enqueue(number)
        comm.barrier()
        sizes = [queue.size() for queue in queues]
        doubled = 2 * comm.size if comm.size == 1 else comm.size
        assert sizes == [doubled, 2 * comm.size, comm.size, 2 * comm.size, doubled]


def test_a_reset_ends_those_who_wait_and_makes_names_new(comm):
    with Service(comm) as service:

        def open_(name):
            return shared_queue(FIFOQueue, 9, np.int64, [()], service=service,
                                shared_name="n", container=name)  # fmt: skip

        old, other = open_("exp"), open_("other")
        comm.barrier()
        waiting = in_thread(old.dequeue)
        other.enqueue(1)
        comm.barrier()
        if comm.rank == comm.size - 1:
            while not waiting.done():  # whether or not it was in line already
                service.reset(["exp"])
        if comm.rank != 0:
            kinds = (CancelledError, NotFoundError)
            with pytest.raises(kinds):
                waiting.result(LIMIT)
            with pytest.raises(NotFoundError, match="container was reset"):
                old.size()
        comm.barrier()
        if comm.rank == 0:
            while not waiting.done():
                old.cancel_pending()
        new = open_("exp")
        comm.barrier()
        if comm.rank != 0:
            with pytest.raises(AbortedError, match="open it again"):
                old.size()
        new.enqueue(1)
        comm.barrier()
        assert new.size() == other.size() == comm.size


def test_ranks_take_files_from_one_line(comm):
    with Service(comm) as service:
        names = [f"f{i}" for i in range(7)]
        options = {"service": service, "shared_name": "files", "capacity": 3}
        files = shared_files(names, **options, num_epochs=3, seed=1)
        with pytest.raises(InvalidArgumentError, match="other num_epochs, expected 3, got 4"):
            shared_files(names, **options, num_epochs=4, seed=1)
        taken = list(until_the_end(files))
        everything = Counter(sum(comm.allgather_object(taken), []))
        assert everything == Counter(dict.fromkeys(names, 3))


def test_epochs_of_a_shared_line_are_shuffled_and_not_mixed(comm):
    with Service(comm) as service:
        names = [f"f{i}" for i in range(30)]
        files = shared_files(names, service=service, shared_name="files", num_epochs=None, seed=1)
        if comm.rank == comm.size - 1:
            epochs = [[files.dequeue() for _ in names] for _ in range(3)]
            assert all(sorted(epoch) == sorted(names) for epoch in epochs)
            assert epochs[0] != epochs[1] != names
        for wrong in ({"files": []}, {"files": "f1"}, {"files": ["f1"], "num_epochs": 0}):
            with pytest.raises(ValueError, match="shared_files"):
                shared_files(**wrong, service=service, shared_name="wrong")


def test_a_line_of_files_holds_many_epochs(comm):
    with Service(comm) as service:
        options = {"service": service, "num_epochs": None}
        many = shared_files(["f"], shared_name="many", capacity=5000, **options)
        assert many.size() == 5000
        for capacity in (0, -1):
            why = f"shared_files: bad capacity, expected at least 1, got {capacity}"
            with pytest.raises(ValueError, match=why):
                shared_files(["f"], shared_name="endless", capacity=capacity, **options)
        options["num_epochs"] = 5000
        with pytest.raises(ValueError, match="shared_range: bad capacity, expected at least 1"):
            shared_range(1, shared_name="none", capacity=0, **options)
        all_of_them = shared_files(["f"], shared_name="all", capacity=-1, **options)
        assert (all_of_them.size(), all_of_them.is_closed()) == (5000, True)


def test_wrong_use_is_refused_before_any_message(comm):
    with Service(comm) as service:

        def open_(kind=FIFOQueue, capacity=1, dtypes=F32, **options):
            return shared_queue(kind, capacity, dtypes, [()], service=service, **options)

        for task in (-1, comm.size):
            with pytest.raises(ValueError, match=f"no such task, expected 0 .. {comm.size - 1}"):
                open_(shared_name="a", task=task)
        with pytest.raises(ValueError, match="needs a name"):
            open_(shared_name="")
        with pytest.raises(TypeError, match="expected one of FIFOQueue"):
            open_(dict, shared_name="a")
        with pytest.raises(TypeError, match="dtype must be numeric"):
            open_(dtypes=object, shared_name="a")
        with pytest.raises(TypeError, match="colour"):
            open_(shared_name="a", colour="red")
    with pytest.raises(CancelledError, match="the service is closed"):
        open_(shared_name="a", task=0)
    service.close()


def test_threads_end_and_waiting_calls_are_cancelled_when_the_service_closes(comm):
    before = {t for t in threading.enumerate() if t.name == "service"}
    with Service(comm) as service:
        queue = shared_queue(FIFOQueue, 1, F32, [()], service=service, shared_name="q")
        comm.barrier()
        waiting = in_thread(queue.dequeue) if comm.rank else None
    if comm.rank:
        with pytest.raises(CancelledError, match="the service is closed"):
            waiting.result(LIMIT)
    comm.barrier()
    assert {t for t in threading.enumerate() if t.name == "service"} <= before


def test_a_device_string_places_a_queue_on_a_task(comm):
    last = comm.size - 1
    with Service(comm) as service:

        def open_queue(name, task):
            return shared_queue(
                FIFOQueue, 9, np.int64, [()], service=service, shared_name=name, task=task
            )

        tasks = [f"/job:worker/task:{last}/cpu:0", f"/task:{last}", last]
        queues = [open_queue("q", task) for task in tasks]
        queues[comm.rank % 3].enqueue(comm.rank)
        comm.barrier()
        assert {int(queue.size()) for queue in queues} == {comm.size}
        comm.barrier()
        for task in ("/job:ps/task:0", "/gpu:0", f"/task:{comm.size}"):
            with pytest.raises(ValueError, match="cannot assign a device for FIFOQueue 'p'"):
                open_queue("p", task)


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_number_of_an_epoch_goes_to_one_rank(comm, shuffle):
    with Service(comm) as service:
        options = {"service": service, "num_epochs": 2, "shuffle": shuffle, "seed": 1}
        numbers = shared_range(1000, shared_name="rows", capacity=7, **options)
        taken = []
        with contextlib.suppress(OutOfRangeError):
            while True:
                taken.append(numbers.dequeue())
        everything = np.concatenate(comm.allgather_object(np.array(taken, np.int64)))
        np.testing.assert_array_equal(np.sort(everything), np.repeat(np.arange(1000), 2))
        alone = shared_range(1000, shared_name=f"rows of {comm.rank}", capacity=7, **options)
        first = alone.dequeue_many(1000)
        assert first.dtype == np.int64
        assert (first.tolist() == list(range(1000))) != shuffle
        assert sorted(first) == list(range(1000))  # epochs are not mixed
        with pytest.raises(InvalidArgumentError, match="other limit, expected 1000, got 999"):
            shared_range(999, shared_name="rows", capacity=7, **options)
        with pytest.raises(InvalidArgumentError, match="one of file names and numbers"):
            shared_files(["f"], shared_name="rows", capacity=7, **options)
        with pytest.raises(ValueError, match="shared_range: bad limit"):
            shared_range(0, shared_name="none", **options)
        comm.barrier()
