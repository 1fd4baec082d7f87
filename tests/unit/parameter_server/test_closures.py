"""The queue of a coordinator's calls, without workers."""

import threading
from collections import Counter

import pytest
from calls import LIMIT, in_thread

from strategies.errors import CancelledError, DeadlineExceededError
from strategies.parameter_server.closures import Closure, ClosureQueue


def closure():
    return Closure(lambda worker: worker)


def queue_of(count, **options):
    queue = ClosureQueue(**options)
    closures = [closure() for _ in range(count)]
    for each in closures:
        queue.put(each)
    return queue, closures


def test_calls_are_taken_in_order_and_end_with_their_values():
    queue, (a, b) = queue_of(2)
    assert not queue.done()
    assert queue.get() is a
    assert queue.get() is b
    assert not a.result.ready
    queue.finish(a, 10)
    assert not queue.done()
    queue.finish(b, 20)
    queue.wait(LIMIT)
    assert queue.done()
    assert (a.result.fetch(), b.result.fetch()) == (10, 20)


def test_nothing_to_do_is_done():
    queue = ClosureQueue()
    assert queue.done()
    queue.wait(0)
    assert queue.get(timeout=0) is None


def test_what_a_lost_worker_had_comes_first_again_and_is_made_at_least_once():
    queue, (a, b) = queue_of(2)
    taken = queue.get()
    queue.put_back(taken)
    assert queue.get() is a
    queue.finish(a, 1)
    queue.finish(queue.get(), 2)
    queue.wait(LIMIT)
    assert (a.result.fetch(), b.result.fetch()) == (1, 2)


def test_waiting_ends_when_a_call_that_was_put_back_is_made():
    queue, (a,) = queue_of(1)
    queue.get()
    waiting = in_thread(queue.wait, LIMIT)
    queue.put_back(a)
    with pytest.raises(DeadlineExceededError, match=r"join: not all calls .* within 0.01 s"):
        queue.wait(0.01)
    queue.finish(queue.get(), 1)
    waiting.result(LIMIT)


@pytest.mark.parametrize("raiser", ["put", "wait", "done"])
def test_the_first_error_cancels_what_is_queued_and_is_raised_once(raiser):
    queue, (a, b, c) = queue_of(3)
    queue.get()
    queue.get()
    queue.fail(a, KeyError("first"))
    with pytest.raises(CancelledError, match="an earlier call failed: KeyError"):
        c.result.fetch(0)
    assert not queue.done()  # b is in flight: the error waits for it
    queue.fail(b, ValueError("second"))
    late = closure()
    call = {"put": lambda: queue.put(late), "wait": queue.wait, "done": queue.done}[raiser]
    with pytest.raises(KeyError, match="first"):
        call()
    # All is as if new.
    assert queue.done()
    queue.put(late)
    assert queue.get() is late
    queue.finish(late, "fine")
    queue.wait(LIMIT)
    with pytest.raises(KeyError):
        a.result.fetch()
    with pytest.raises(ValueError, match="second"):
        b.result.fetch()
    assert late.result.fetch() == "fine"


def test_the_error_is_raised_only_when_calls_in_flight_have_ended():
    queue, (a, b) = queue_of(2)
    queue.get()
    queue.get()
    queue.fail(a, KeyError("first"))
    with pytest.raises(DeadlineExceededError):
        queue.wait(0.01)
    waiting = in_thread(queue.wait, LIMIT)
    queue.finish(b, 5)
    with pytest.raises(KeyError):
        waiting.result(LIMIT)
    assert b.result.fetch() == 5


def test_after_an_error_what_comes_back_from_a_lost_worker_is_cancelled():
    queue, (a, b) = queue_of(2)
    queue.get()
    queue.get()
    queue.fail(a, KeyError("first"))
    queue.put_back(b)
    with pytest.raises(CancelledError):
        b.result.fetch(0)
    with pytest.raises(KeyError):
        queue.wait(LIMIT)


def test_a_full_queue_lets_put_wait():
    queue, (a, _) = queue_of(2, capacity=2)
    late = closure()
    with pytest.raises(DeadlineExceededError, match="schedule: the queue of calls is full"):
        queue.put(late, timeout=0.01)
    waiting = in_thread(queue.put, late)
    queue.get()
    waiting.result(LIMIT)
    queue.finish(a, None)


def test_an_error_wakes_a_put_that_waits():
    queue, (a,) = queue_of(1, capacity=1)
    queue.get()
    queue.put(closure())
    waiting = in_thread(queue.put, closure())
    queue.fail(a, KeyError("first"))
    with pytest.raises(KeyError):
        waiting.result(LIMIT)


def test_close_cancels_what_is_queued():
    queue, (a, b) = queue_of(2)
    queue.get()
    queue.close("the coordinator is closed")
    assert queue.get() is None
    with pytest.raises(CancelledError, match="the coordinator is closed"):
        b.result.fetch(0)
    with pytest.raises(CancelledError, match="schedule: the coordinator is closed"):
        queue.put(closure())
    queue.put_back(a)
    with pytest.raises(CancelledError):
        a.result.fetch(0)


def test_close_wakes_who_waits_for_a_call():
    queue = ClosureQueue()
    idle = in_thread(queue.get)
    queue.close("the coordinator is closed")
    assert idle.result(LIMIT) is None


def test_a_value_that_is_not_there_in_time():
    with pytest.raises(DeadlineExceededError, match=r"fetch: .* within 0.01 s"):
        closure().result.fetch(timeout=0.01)


def test_many_workers_make_each_call_once_or_again_after_a_loss():
    queue, closures = queue_of(200)
    began, made = Counter(), Counter()
    lock = threading.Lock()

    def work(worker):
        while (taken := queue.get()) is not None:
            with lock:
                began[taken] += 1
            if worker == 0 and began[taken] == 1:
                queue.put_back(taken)  # this one is lost again and again
                continue
            with lock:
                made[taken] += 1
            queue.finish(taken, worker)

    works = [in_thread(work, n) for n in range(4)]
    queue.wait(LIMIT)
    queue.close("the end")
    for one in works:
        one.result(LIMIT)
    assert set(made) == set(closures)
    assert set(made.values()) == {1}
