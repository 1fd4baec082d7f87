"""A variable at its task: when memory is copied, who waits for whom, and what is let go of."""

import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest
from calls import LIMIT, in_thread, together, until

import collectives as cc
import elsewhere
import strategies
from strategies.core.thread_pool import ThreadPool
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from strategies.rpc import Task
from strategies.variables import (
    partition,
    request_handler,
    server_ops,
    shared_partitioned_variable,
    shared_variable,
)
from strategies.variables.array_input import take_ownership
from strategies.variables.stored_variable import StoredVariable
from tapped import silence


@pytest.fixture
def services():
    with elsewhere.two_tasks() as services:
        yield services


def stored(value):
    thing = StoredVariable("v")
    thing.initialize(value)
    return thing


def address(thing):
    return thing.value.__array_interface__["data"][0]


def test_an_update_copies_only_while_somebody_reads():
    thing = stored(np.zeros(1000))
    first = address(thing)
    thing.writable()[:] = 1
    assert address(thing) == first
    reading = thing.view()
    part = reading[5:9].reshape(2, 2)
    del reading
    thing.writable()[:] += 1
    second = address(thing)
    assert second != first
    assert part.tolist() == [[1, 1], [1, 1]]
    assert thing.value[0] == 2
    held = thing.view()
    thing.writable()[:] = 3  # both memories are read
    assert address(thing) not in (first, second)
    del part, held
    held = thing.view()
    thing.writable()[:] = 4
    assert address(thing) == second  # used again
    assert held[0] == 3


def test_what_is_assigned_is_not_copied_before():
    thing = stored(np.zeros(3))
    held = thing.view()
    server_ops.execute("assign", thing, [np.ones(3)], {})
    assert (held.tolist(), thing.value.tolist(), thing.version) == ([0] * 3, [1] * 3, 1)


def test_a_value_set_twice_stays_the_first():
    thing = stored(np.zeros(2))
    assert not thing.initialize(np.ones(2))
    assert thing.value.tolist() == [0, 0]


def test_an_initializer_that_fails_leaves_the_variable_as_it_was():
    thing = StoredVariable("v")
    with pytest.raises(ZeroDivisionError):
        thing.initialize(lambda: 1 / 0, strategies.SGD(1.0), {"shape": [2]})
    assert thing.optimizer is None
    thing.check({"shape": [3]})
    assert thing.initialize(np.zeros(3), None, {"shape": [3]})
    with pytest.raises(InvalidArgumentError, match=r"another shape, expected \[3\], got \[2\]"):
        thing.check({"shape": [2]})


def leave(first, last, shape, dtype):
    raise SystemExit("an initializer that leaves")


def test_an_initializer_that_leaves_fails_for_its_caller_and_ends_no_thread(services):
    options = {"shape": (2,), "dtype": float, "partitioner": partition.fixed_size(1)}
    for name in "ab":
        with pytest.raises((InternalError, SystemExit), match="an initializer that leaves"):
            shared_partitioned_variable(
                leave, service=services[1], shared_name=name, tasks=[0], **options
            )
    assert shared_variable(1.0, service=services[1], shared_name="c").read().value == 1


def test_memory_that_was_made_for_a_variable_is_not_copied_and_that_of_others_is():
    kept = np.ones((4, 2))
    made = []

    def fresh():
        array = np.zeros(3)
        made.append(array.ctypes.data)
        return array

    assert take_ownership(fresh, np.float64).ctypes.data == made[0]
    for make in (lambda: kept, lambda: kept[1:], lambda: kept.T, lambda: kept.tolist()):
        found = take_ownership(make, np.float64)
        np.testing.assert_array_equal(found, make())
        assert not np.shares_memory(found, kept)
        assert found.flags.c_contiguous
        assert found.flags.writeable
    assert take_ownership(fresh, np.float32).dtype == np.float32


def test_long_updates_leave_the_service_free_and_run_side_by_side(services, monkeypatch):
    both, act, free = threading.Barrier(2), server_ops.execute, threading.Event()

    def slow(operation, thing, arrays, options):
        if operation == "assign_add":
            both.wait(LIMIT)  # different variables are changed at the same time
            assert free.wait(LIMIT)
        return act(operation, thing, arrays, options)

    monkeypatch.setattr(request_handler, "execute", slow)
    monkeypatch.setattr(request_handler, "UPDATES", ThreadPool("two", lambda: 2))
    big = np.ones(1 << 18)
    made = [shared_variable(big, service=services[1], shared_name=name) for name in "ab"]
    small = shared_variable(1.0, service=services[1], shared_name="c")
    added = [in_thread(v.assign_add, big) for v in made]
    for _ in range(10):
        small.assign(small.read().value + 1)
    free.set()
    for one in added:
        one.result(LIMIT)
    assert [v.read().value.max() for v in (*made, small)] == [2, 2, 11]


def test_a_short_value_beside_a_slow_initializer_leaves_the_service_free(services, monkeypatch):
    begun, arrived, free = threading.Event(), threading.Event(), threading.Event()
    once = request_handler.initialize_once

    def note(*arguments):
        arrived.set()
        once(*arguments)

    def slow(first, last, shape, dtype):
        begun.set()
        assert free.wait(LIMIT)
        return np.ones(shape, dtype)

    def make(task, value):
        shared_partitioned_variable(
            value, service=services[task], shared_name="v", tasks=[0], shape=(2,), dtype=float,
            partitioner=partition.fixed_size(1),
        )  # fmt: skip

    monkeypatch.setattr(request_handler, "initialize_once", note)
    other = shared_variable(5.0, service=services[1], shared_name="other")
    arrived.clear()
    threads = [threading.Thread(target=make, args=(0, slow))]
    threads[0].start()
    assert begun.wait(LIMIT)  # it holds the lock of the variable
    threads.append(threading.Thread(target=make, args=(1, lambda *_: np.zeros(2))))
    threads[1].start()
    try:
        assert arrived.wait(LIMIT)
        assert other.read(timeout=LIMIT / 4).value == 5
    finally:
        free.set()
    for thread in threads:
        thread.join(LIMIT)
    found = shared_variable(None, service=services[1], shared_name="v/part_0")
    assert found.read().value.tolist() == [1, 1]


def test_a_request_that_waits_for_a_thread_ends_at_its_deadline(services, monkeypatch):
    act, free, begun = server_ops.execute, threading.Event(), threading.Event()

    def slow(operation, thing, arrays, options):
        if operation == "assign_add":
            begun.set()
            assert free.wait(LIMIT)
        return act(operation, thing, arrays, options)

    monkeypatch.setattr(request_handler, "execute", slow)
    monkeypatch.setattr(request_handler, "UPDATES", ThreadPool("one", lambda: 1))
    big = np.ones(1 << 18)
    v = shared_variable(big, service=services[1], shared_name="v")
    threads = [threading.Thread(target=v.assign_add, args=(big,))]
    threads[0].start()
    assert begun.wait(LIMIT)
    with pytest.raises(DeadlineExceededError, match="assign_sub: not done within 0.05 s"):
        v.assign_sub(big, timeout=0.05)
    free.set()
    threads[0].join(LIMIT)
    assert (v.read().value[0], v.read().version) == (2, 1)


def test_a_task_that_does_not_say_whether_it_succeeded(services, monkeypatch):
    monkeypatch.setattr("strategies.rpc.client.DECISION", 0.1)
    v = shared_variable(0.0, service=services[1], shared_name="v")
    text = "does not say whether it succeeded .* on task 0"
    with silence(services.channels[0]), pytest.raises(UnavailableError, match=text):
        v.assign(1.0, timeout=0.05)
    assert v.read(timeout=LIMIT).value in (0, 1)


def test_memory_of_messages_is_let_go_of(services, monkeypatch):
    seen, act = [], server_ops.execute

    def note(operation, thing, arrays, options):
        seen.extend(weakref.ref(array) for array in arrays)
        return act(operation, thing, arrays, options)

    monkeypatch.setattr(request_handler, "execute", note)
    big = np.ones(1 << 18)
    v = shared_variable(big, service=services[1], shared_name="v", optimizer=strategies.SGD(1.0))
    gc.disable()
    try:
        v.apply_gradients(big)
        value = v.read().value
        read = weakref.ref(value)
        del value
        assert seen
        until(lambda: all(reference() is None for reference in (*seen, read)))
    finally:
        gc.enable()


def test_a_fault_is_an_error_for_the_caller_and_not_the_end(services, monkeypatch):
    v = shared_variable(0.0, service=services[1], shared_name="v")
    act = server_ops.execute

    def broken(operation, thing, arrays, options):
        raise KeyError("of a test")

    monkeypatch.setattr(request_handler, "execute", broken)
    with pytest.raises(InternalError, match="KeyError"):
        v.read()
    monkeypatch.setattr(request_handler, "execute", act)
    assert v.read().value == 0


def test_calls_where_answers_arrive_are_refused(services):
    v = shared_variable(0.0, service=services[1], shared_name="v")
    caught = []

    def in_callback(future):
        for call in (v.read, lambda: Task(services[1], 0).run("math:sqrt", 4)):
            try:
                call()
            except RuntimeError as error:
                caught.append(str(error))

    Task(services[1], 0).submit("math:sqrt", 4).add_done_callback(in_callback)
    until(lambda: len(caught) == 2)
    assert all("which must not wait" in text for text in caught)


def test_a_closed_service(services):
    v, w = (shared_variable(0.0, service=s, shared_name="v") for s in services)
    together(lambda service: service.close(), services)
    for variable in (v, w):
        with pytest.raises(CancelledError, match="the service is closed"):
            variable.read()


def test_containers_are_reset_on_some_tasks_or_on_all(services):
    def made(name, task):
        with strategies.rpc.container(name):
            return shared_variable(0.0, service=services[1], shared_name="v", task=task)

    first, second, other = made("one", 0), made("one", 1), made("two", 0)
    strategies.variables.reset_container("one", service=services[1], tasks=[0])
    with pytest.raises(NotFoundError, match="'v' in container 'one' on task 0"):
        first.read()
    assert second.read() == (0, 0)
    again = made("one", 0)
    strategies.variables.reset_container(["one"], service=services[0])
    for variable in (second, again):
        with pytest.raises(NotFoundError):
            variable.assign(1.0)
    assert other.read() == (0, 0)
    elsewhere.leave(services[0])
    here = made("two", 1)
    with pytest.raises(UnavailableError, match="task 0 has left"):
        strategies.variables.reset_container("two", service=services[1])
    with pytest.raises(NotFoundError):
        here.read()


@pytest.mark.parametrize("task", [0, 1])
def test_values_that_are_not_numbers_are_refused(services, task):
    make = partial(strategies.variables.shared_variable, service=services[1], task=task)
    for wrong in (np.array(["a"]), np.array([b"a"]), np.array([None]), ["a"]):
        with pytest.raises(TypeError, match="not an array of numbers"):
            make(wrong, shared_name="w")
    variable = make(np.zeros(2, np.float32), shared_name="v")
    for wrong, kind in ((np.array(["a", "b"]), InvalidArgumentError), ([None, 1], TypeError)):
        with pytest.raises(kind, match="not an array of numbers"):
            variable.assign(wrong)
    variable.assign(np.array([1, 2], ">f4"))
    assert variable.read().value.tolist() == [1, 2]


def test_what_rounding_leaves_over_of_some_rows_does_not_come_to_others(services):
    table = shared_variable(np.zeros((4, 1), np.float32), service=services[1], shared_name="t")
    feedback = cc.BF16.with_feedback()
    for rows in ([0, 1], [2, 3], [2]):  # also not to another number of them
        given = np.full((len(rows), 1), 1 + 2**-9, np.float32)  # rounds to 1
        table.scatter_add(rows, given, compression=feedback)
    assert table.read().value[:, 0].tolist() == [1, 1, 2, 1]


def test_parts_take_values_of_16_bits(services):
    table = strategies.variables.shared_partitioned_variable(
        np.zeros((4, 2), np.float32), partitioner=partition.fixed_size(2), service=services[1],
        shared_name="table", tasks=[0, 1],
    )  # fmt: skip
    exact = 1 + 2**-20
    table.assign(np.full((4, 2), exact, np.float32), compression=cc.FP16)
    table.scatter_add([3], np.full((1, 2), exact, np.float32), compression=cc.FP16)
    assert table.read().value[:, 0].tolist() == [1, 1, 1, 2]
