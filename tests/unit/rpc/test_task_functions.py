"""Functions on tasks: cancelled, late, many, and with errors of all kinds."""

import os
import signal
import threading
from concurrent.futures import CancelledError as NotWanted

import numpy as np
import pytest
from calls import LIMIT, until

import elsewhere
from strategies.core.thread_pool import ThreadPool
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
    UnknownError,
)
from strategies.rpc import Task, functions

gate = threading.Event()
calls = []


def wait_for_gate(number):
    calls.append(number)
    assert gate.wait(LIMIT)
    return number


class OwnError(Exception):
    def __init__(self, first, *, second):
        super().__init__(first)


class NamedAsFunction(Exception):
    pass


# A reply names the class of an error; these give the names of a function and of another class.
NamedAsFunction.__module__, NamedAsFunction.__qualname__ = __name__, "note"


class NamedAsClass(Exception):
    pass


NamedAsClass.__module__, NamedAsClass.__qualname__ = "builtins", "str"


def note(number):
    calls.append(number)
    return ValueError(number)


def fail(kind):
    raise {
        "own": lambda: OwnError("of a test", second=1),
        "range": lambda: OutOfRangeError("no more"),
        "array": lambda: ValueError("wrong", np.arange(2)),
        "object": lambda: ValueError(object),
        "exit": lambda: SystemExit(3),
        "function": lambda: NamedAsFunction(7),
        "class": lambda: NamedAsClass("text"),
    }[kind]()


def twice_on_the_other(service_and_number):
    return service_and_number * 2


def many(count):
    return [np.ones(1 << 16, np.uint8)] * count


@pytest.fixture
def services():
    gate.clear()
    calls.clear()
    with elsewhere.two_tasks() as services:
        yield services
        gate.set()


@pytest.mark.parametrize("timeout", [None, LIMIT])
def test_what_a_handler_raises_is_no_end_of_the_timeout(services, timeout):
    def stop(*_):
        raise TimeoutError("the time of the program is over")

    def send():
        until(lambda: calls == [1])
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, stop)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(TimeoutError, match="the time of the program is over"):
            Task(services[1], 0).run(wait_for_gate, 1, timeout=timeout)
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)


class CountingPool(ThreadPool):
    """A pool that knows how many jobs it has got, and given back."""

    submitted = withdrawn = 0

    def submit(self, job):
        super().submit(job)
        self.submitted += 1

    def withdraw(self, job):
        waited = super().withdraw(job)
        self.withdrawn += waited
        return waited


@pytest.mark.parametrize("number", [0, 1], ids=["elsewhere", "here"])
def test_a_function_that_has_not_begun_is_not_called(services, monkeypatch, number):
    calls_pool = CountingPool("one call", lambda: 1)
    monkeypatch.setattr(functions, "CALLS", calls_pool)
    task = Task(services[1], number)
    running = task.submit(wait_for_gate, 1)
    until(lambda: calls == [1])
    waiting = [task.submit(wait_for_gate, n) for n in (2, 3)]
    assert waiting[0].cancel()
    with pytest.raises(NotWanted):
        waiting[0].result(LIMIT)
    with pytest.raises(DeadlineExceededError, match="not done within 0.05 s"):
        task.run(wait_for_gate, 4, timeout=0.05)
    assert running.cancel()  # runs on, but nobody hears of it
    last = task.submit(wait_for_gate, 5)
    # Messages come in order: with the fifth there, the second and the fourth have been withdrawn.
    until(lambda: calls_pool.submitted == 5)
    assert calls_pool.withdrawn == 2
    gate.set()
    assert waiting[1].result(LIMIT) == 3
    assert last.result(LIMIT) == 5
    assert calls == [1, 3, 5]
    assert not waiting[1].cancel()


def test_functions_run_side_by_side(services):
    futures = [Task(services[1], n % 2).submit(wait_for_gate, n) for n in range(6)]
    until(lambda: len(calls) == 6)
    gate.set()
    assert [future.result(LIMIT) for future in futures] == list(range(6))


def test_errors_keep_their_class_where_that_can_be_made(services):
    task = Task(services[1], 0)
    with pytest.raises(OutOfRangeError, match="no more"):
        task.run(fail, "range")
    with pytest.raises(ValueError, match="wrong") as caught:
        task.run(fail, "array")
    assert caught.value.args[1].tolist() == [0, 1]
    assert isinstance(caught.value.__cause__, functions.RemoteTraceback)
    assert "in fail\n    raise" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="class 'object'"):
        task.run(fail, "object")
    with pytest.raises(UnknownError, match="test_task_functions:OwnError: of a test"):
        task.run(fail, "own")
    with pytest.raises(UnknownError, match="test_task_functions:note: 7"):
        task.run(fail, "function")
    assert calls == [], "the function is not called"
    with pytest.raises(UnknownError, match="builtins:str: text"):
        task.run(fail, "class")
    with pytest.raises(SystemExit):
        task.run(fail, "exit")
    with pytest.raises(NotFoundError, match="no function of this name"):
        task.run("math:no_such")
    assert task.run(twice_on_the_other, 4) == 8


def test_a_result_of_too_many_arrays_is_an_error(services):
    task = Task(services[1], 0)
    with pytest.raises(InvalidArgumentError, match="at most 65536 frames"):
        task.submit(many, 70_000).result(LIMIT)
    assert len(task.run(many, 2)) == 2


def test_a_task_that_leaves_is_an_error_for_those_that_wait(services):
    task = Task(services[1], 0)
    future = task.submit(wait_for_gate, 1)
    until(lambda: calls == [1])
    elsewhere.leave(services[0])
    with pytest.raises(UnavailableError, match="task 0 has left"):
        future.result(LIMIT)
    with pytest.raises(UnavailableError, match="task 0 has left"):
        task.run(wait_for_gate, 2)
    gate.set()


def test_a_service_that_is_closed_cancels_what_waits(services):
    future = Task(services[1], 0).submit(wait_for_gate, 1)
    until(lambda: calls == [1])
    elsewhere.leave(services[1])
    with pytest.raises(CancelledError, match="the service was given up"):
        future.result(LIMIT)
    gate.set()


@pytest.mark.parametrize("wrong", ["f", ":f", "m:", fail.__get__(1), len([]).__add__, None])
def test_functions_need_a_name(services, wrong):
    with pytest.raises(ValueError, match="expected"):
        Task(services[1], 0).submit(wrong)


def test_wrong_tasks(services):
    with pytest.raises(ValueError, match="no such task"):
        Task(services[1], 2)
    assert Task(services[1], "/job:worker/task:0").number == 0


@pytest.mark.parametrize("numbers", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_function_begins_when_those_that_it_depends_on_are_done(services, numbers):
    first = Task(services[1], numbers[0]).submit(wait_for_gate, 1)
    other = Task(services[1], numbers[1]).submit("math:sqrt", 4)
    second = Task(services[1], numbers[1]).submit(wait_for_gate, 2, depends_on=[first, other])
    until(lambda: calls == [1])
    assert other.result(LIMIT) == 2
    assert not second.done()
    assert calls == [1]
    gate.set()
    assert (first.result(LIMIT), second.result(LIMIT)) == (1, 2)
    assert calls == [1, 2]
    done = Task(services[1], numbers[0])
    assert done.run("math:sqrt", 9, timeout=LIMIT, depends_on=[first, second]) == 3


@pytest.mark.parametrize("number", [0, 1])
def test_what_it_depends_on_fails_or_is_cancelled(services, number):
    task = Task(services[1], number)
    failed = task.submit(fail, "range")
    late = task.submit(wait_for_gate, 3, depends_on=[failed])
    with pytest.raises(OutOfRangeError, match="no more"):
        late.result(LIMIT)
    with pytest.raises(OutOfRangeError, match="no more"):  # that of the first
        task.run(wait_for_gate, 4, depends_on=[late], timeout=LIMIT)
    waiting = task.submit(wait_for_gate, 5)
    until(lambda: calls == [5])
    after = task.submit(wait_for_gate, 6, depends_on=[waiting])
    unwanted = task.submit(wait_for_gate, 7, depends_on=[waiting])
    assert unwanted.cancel()
    assert waiting.cancel()
    with pytest.raises(CancelledError, match="this one depends on was cancelled"):
        after.result(LIMIT)
    gate.set()
    assert task.run("math:sqrt", 4, timeout=LIMIT) == 2
    assert calls == [5]
    with pytest.raises(TypeError, match="depends on futures of others, got 3"):
        task.submit(wait_for_gate, 8, depends_on=[3])
