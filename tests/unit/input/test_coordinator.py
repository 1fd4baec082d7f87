"""Coordinator and LooperThread: stopping threads and hearing of their errors."""

import sys
import threading
import traceback

import pytest

from strategies.errors import OutOfRangeError
from strategies.input.coordinator import Coordinator, LooperThread

LIMIT = 20.0


class MyError(Exception):
    pass


def started(target, *args, name=None):
    thread = threading.Thread(target=target, args=args, daemon=True, name=name)
    thread.start()
    return thread


def failing(coord, message, before=None):
    """A thread that raises and reports, after an event."""

    def work():
        if before is not None:
            before.wait(LIMIT)
        with coord.stop_on_exception():
            raise RuntimeError(message)

    return work


def test_stop():
    coord = Coordinator()
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0.001)
    coord.request_stop()
    assert coord.should_stop()
    assert coord.wait_for_stop(0.001)
    coord.clear_stop()
    assert not coord.should_stop()


def test_stop_wakes_a_waiting_thread():
    coord = Coordinator()
    woken = []
    thread = started(lambda: woken.append(coord.wait_for_stop(LIMIT)))
    coord.request_stop()
    coord.join([thread])
    assert woken == [True]
    assert coord.joined


def test_join_waits_until_all_have_ended():
    coord, go = Coordinator(), threading.Event()
    threads = [started(go.wait, LIMIT) for _ in range(3)]
    coord.register_thread(threads[0])
    coord.register_thread(threads[1])
    joined = started(coord.join, threads[1:])
    go.set()
    joined.join(LIMIT)
    assert not any(thread.is_alive() for thread in [joined, *threads])
    coord.join()  # nothing is registered any more


def test_join_without_threads():
    Coordinator().join()
    Coordinator().join([threading.Thread()])  # never started


@pytest.mark.parametrize("grace", [0.0, 0.02])
def test_threads_that_do_not_end(grace):
    coord, go = Coordinator(), threading.Event()
    thread = started(go.wait, LIMIT, name="sleeper")
    coord.register_thread(thread)
    coord.request_stop()
    with pytest.raises(RuntimeError, match="threads still running .*: sleeper"):
        coord.join(stop_grace_period_secs=grace)
    coord.join([thread], stop_grace_period_secs=grace, ignore_live_threads=True)
    go.set()
    thread.join(LIMIT)


def test_the_first_exception_wins_with_its_traceback():
    coord, first_done = Coordinator(), threading.Event()
    first = started(failing(coord, "First"))
    first.join(LIMIT)
    first_done.set()
    threads = [first, started(failing(coord, "Second", first_done))]
    with pytest.raises(RuntimeError, match="First") as caught:
        coord.join(threads)
    assert "in work" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(RuntimeError, match="First"):
        coord.raise_requested_exception()


def test_an_exception_wins_over_running_threads():
    coord, go = Coordinator(), threading.Event()
    coord.request_stop(MyError("First"))
    thread = started(go.wait, LIMIT)
    with pytest.raises(MyError):
        coord.join([thread], stop_grace_period_secs=0)
    go.set()
    thread.join(LIMIT)


@pytest.mark.parametrize("as_info", [False, True])
def test_exceptions_and_exc_info(as_info):
    coord = Coordinator()
    try:
        raise MyError("First")
    except MyError as error:
        coord.request_stop(sys.exc_info() if as_info else error)
    coord.request_stop(ValueError("Second"))
    with pytest.raises(MyError, match="First"):
        coord.join()


def test_an_exception_after_a_clean_request_is_ignored():
    coord = Coordinator()
    coord.request_stop()
    coord.request_stop(MyError("late"))
    coord.join()
    coord.raise_requested_exception()


def test_clean_exceptions_are_a_normal_end():
    coord = Coordinator()
    with coord.stop_on_exception():
        raise OutOfRangeError("no more")
    assert coord.should_stop()
    coord.join()
    mine = Coordinator(clean_stop_exception_types=(MyError,))
    mine.request_stop(MyError("end"))
    mine.join()
    mine.clear_stop()
    mine.request_stop(OutOfRangeError("is an error now"))
    with pytest.raises(OutOfRangeError):
        mine.join()


def test_clear_stop_forgets_the_exception():
    coord = Coordinator()
    coord.request_stop(MyError("First"))
    coord.clear_stop()
    coord.raise_requested_exception()
    coord.join()
    assert coord.joined
    coord.clear_stop()
    assert not coord.joined


@pytest.mark.parametrize("as_info", [False, True])
def test_a_request_after_join_raises_in_the_caller(as_info):
    coord = Coordinator()
    coord.join()
    coord.request_stop(OutOfRangeError("clean"))
    try:
        raise MyError("late")
    except MyError as error:
        late = sys.exc_info() if as_info else error
    with pytest.raises(MyError, match="late"):
        coord.request_stop(late)


def test_looper_calls_until_the_stop():
    coord, calls = Coordinator(), []

    def work(a, b=0):
        calls.append((a, b))
        if len(calls) == 3:
            coord.request_stop()

    for args, kwargs in (((1,), {"b": 2}), ((1, 2), {}), ((), {"a": 1, "b": 2})):
        for interval in (None, 0.001):
            coord.clear_stop()
            calls.clear()
            looper = LooperThread.loop(coord, interval, work, args, kwargs)
            assert looper.daemon
            coord.join()
            assert calls == [(1, 2)] * 3


def test_the_interval_of_a_looper_ends_with_the_stop():
    coord, called = Coordinator(), threading.Event()
    LooperThread.loop(coord, 1000.0, called.set)
    assert called.wait(LIMIT)  # the first call comes at once
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)


def test_looper_reports_exceptions():
    coord = Coordinator()

    def fail():
        raise MyError("in the loop")

    LooperThread.loop(coord, None, fail)
    with pytest.raises(MyError):
        coord.join()


def test_looper_hooks():
    calls = []

    class Mine(LooperThread):
        def start_loop(self):
            calls.append("start")

        def run_loop(self):
            calls.append("run")
            coord.request_stop()

        def stop_loop(self):
            calls.append("stop")

    coord = Coordinator()
    Mine(coord, None).start()
    coord.join()
    assert calls == ["start", "run", "stop"]


def test_looper_arguments():
    with pytest.raises(ValueError, match="Coordinator"):
        LooperThread(None, None)
    for args, kwargs in (((1,), None), ((), {"a": 1})):
        with pytest.raises(ValueError, match="target"):
            LooperThread(Coordinator(), None, None, args, kwargs)
