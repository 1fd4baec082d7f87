"""Thread pools: order, limit, idle threads, forked children."""

import os
import threading

from calls import LIMIT, until

from strategies.core.thread_pool import ThreadPool


def named():
    """Return the threads of the pool of a test; threads of other libraries may stay."""
    return [thread for thread in threading.enumerate() if thread.name == "unisono-of a test"]


def test_idle_threads_end_and_later_jobs_start_new_ones():
    pool = ThreadPool("of a test", lambda: 2, idle_seconds=0.05)
    gate, done = threading.Event(), []
    for n in range(6):
        pool.submit(lambda n=n: done.append((gate.wait(LIMIT), n)))
    last = lambda: done.append("never")  # noqa: E731
    pool.submit(last)
    assert len(named()) == 2
    assert pool.withdraw(last)
    assert not pool.withdraw(last)
    gate.set()
    until(lambda: len(done) == 6)
    until(lambda: not named())
    pool.submit(lambda: done.append("again"))
    until(lambda: done[-1] == "again")
    until(lambda: not named())


def test_a_pool_without_limit_starts_a_thread_for_each_waiting_job():
    pool = ThreadPool("of a test", idle_seconds=0.05)
    together = threading.Barrier(5)
    for _ in range(4):
        pool.submit(lambda: together.wait(LIMIT))
    together.wait(LIMIT)  # all four jobs wait at the same time
    until(lambda: not named())


def test_a_forked_child_starts_threads_of_its_own():
    # An idle thread of the parent, on which the child must not rely.
    pool = ThreadPool("of a test", lambda: 1, idle_seconds=1.0)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(LIMIT)
    child = os.fork()
    if child == 0:
        called = threading.Event()
        pool.submit(called.set)
        os._exit(0 if called.wait(LIMIT) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: not named())
