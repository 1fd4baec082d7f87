"""Locks that live on a task: who has them, who waits, and what becomes of them."""

import threading

import pytest
from calls import LIMIT, in_thread, together, until

import elsewhere
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from strategies.queues.queue_types import FIFOQueue
from strategies.queues.remote import shared_queue
from strategies.rpc import MutexLock


@pytest.fixture
def services():
    with elsewhere.two_tasks() as services:
        yield services


@pytest.mark.parametrize("place", [0, 1])
def test_one_thread_of_all_tasks_at_a_time_has_it(services, place):
    inside, most, counts = [], [], [0]

    def work(service):
        mutex = MutexLock(service, "counter", task=place)
        for _ in range(20):
            with mutex:
                inside.append(1)
                before = counts[0]
                most.append(len(inside))
                counts[0] = before + 1
                inside.pop()
        assert not mutex.is_held

    together(work, [*services] * 2)
    assert counts == [80]
    assert set(most) == {1}


@pytest.mark.parametrize("holder", [0, 1])
def test_a_limit_names_the_lock_and_leaves_the_line(services, holder):
    ours, theirs = (MutexLock(services[n], "l", task=0) for n in (holder, 1 - holder))
    with ours:
        message = rf"acquire: not finished .* \(lock: l\); task {holder} has it$"
        with pytest.raises(DeadlineExceededError, match=message):
            theirs.acquire(timeout=0.05)
        assert not theirs.is_held
    with theirs:
        pass
    ours.acquire(timeout=LIMIT)
    ours.release()


def test_those_that_wait_get_it_in_their_order(services):
    order, taken = [], []

    def take(n):
        with MutexLock(services[1], "l", task=0):
            order.append(n)

    with MutexLock(services[0], "l", task=0):
        for n in range(4):
            before = len(services.channels[0].handled)
            taken.append(in_thread(take, n))
            # It opens the lock, stands in the line, and waits to come to the front.
            until(lambda r=before: len(services.channels[0].handled) >= r + 3)
    for one in taken:
        one.result(LIMIT)
    assert order == [0, 1, 2, 3]


def test_a_task_that_leaves_has_it_no_longer():
    with elsewhere.two_tasks() as services:
        theirs = MutexLock(services[1], "l", task=0)
        theirs.acquire()
        ours = MutexLock(services[0], "l", task=0)
        got = threading.Event()
        taken = in_thread(lambda: [ours.acquire(LIMIT), got.set(), ours.release()])
        assert not got.is_set()
        elsewhere.leave(services[1])
        assert got.wait(LIMIT)
        taken.result(LIMIT)


def test_a_lock_that_was_lost_says_so(services):
    mutex = MutexLock(services[1], "l", task=0)
    mutex.acquire()
    services[1].reset(task=0)
    MutexLock(services[1], "l", task=0)  # the answer comes behind that to what was lost
    with pytest.raises(CancelledError, match="the lock is there no more"):
        mutex.release()
    assert not mutex.is_held


def test_wrong_use(services):
    mutex = MutexLock(services[1], "l", task=0)
    with pytest.raises(FailedPreconditionError, match=r"this thread does not hold it \(lock: l\)"):
        mutex.release()
    with mutex, pytest.raises(FailedPreconditionError, match="acquire: this thread has it"):
        mutex.acquire()
    shared_queue(FIFOQueue, 1, int, [()], service=services[0], shared_name="q", task=0)
    with pytest.raises(InvalidArgumentError, match="expected FIFOQueue, got MutexLock"):
        MutexLock(services[1], "q", task=0)
    with mutex, pytest.raises(KeyError), MutexLock(services[0], "another", task=0):
        raise KeyError
