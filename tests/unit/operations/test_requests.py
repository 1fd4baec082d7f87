"""Requests and the thread that carries them out, over a stand-in for a communicator."""

import gc
import math
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
from calls import LIMIT, in_thread

import inprocess
from collectives import CollectiveError, CollectiveTimeout, MismatchError
from collectives.operations import nonblocking as carrying_out
from collectives.operations.nonblocking import RequestThread, nonblocking_twin
from collectives.transport.transport import Deadline
from launcher import run


class Private:
    """What requests are carried out on: notes what happens to it."""

    def __init__(self):
        self.closed = 0
        self.unusable = None

    def mark_failed(self, operation, error):
        self.unusable = f"{operation}: {error}"

    def close(self):
        self.closed += 1


class Owner:
    """Something with one blocking operation and its twin."""

    def __init__(self):
        self.private = Private()
        self.duplicates = 0
        self.progress = RequestThread(self._duplicate)

    def state_of(self, make):
        return self.progress

    def _duplicate(self):
        self.duplicates += 1
        return self.private

    def work(self, function, *, then=lambda result: result):
        """Call two functions, one on the result of the other."""
        return then(function())

    work_async = nonblocking_twin(work)


@pytest.fixture
def owner():
    owner = Owner()
    yield owner
    owner.progress.close()


@pytest.fixture
def gate():
    """An event that lets an operation go on; set at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def names(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_request_returns_what_the_operation_returned(owner):
    request = owner.work_async(lambda: 21, then=lambda x: 2 * x)
    assert request.wait(LIMIT) == 42
    assert request.done()
    assert request.wait() == 42


def test_requests_are_carried_out_one_after_the_other_in_the_order_of_issue(owner):
    order = []
    requests = [owner.work_async(lambda i=i: order.append(i) or i) for i in range(1000)]
    assert requests[-1].wait(LIMIT) == 999
    assert order == list(range(1000))
    assert all(request.done() for request in requests)
    assert [request.wait() for request in requests] == order


def test_nothing_is_started_before_the_first_request():
    owner = Owner()
    before = threading.active_count()
    assert (owner.duplicates, threading.active_count()) == (0, before)
    owner.progress.close()
    assert owner.private.closed == 0


def test_the_private_communicator_is_made_once_by_the_calling_thread_and_closed_once(owner):
    makers = []
    owner.progress = RequestThread(
        lambda: makers.append(threading.current_thread()) or owner.private
    )
    for _ in range(3):
        owner.work_async(lambda: 1).wait(LIMIT)
    owner.progress.close()
    owner.progress.close()
    assert makers == [threading.current_thread()]
    assert owner.private.closed == 1


def test_the_thread_ends_with_close_and_sleeps_while_idle(owner):
    thread = owner.work_async(threading.current_thread).wait(LIMIT)
    clock = time.pthread_getcpuclockid(thread.ident)
    used = time.clock_gettime(clock)
    thread.join(0.5)
    assert time.clock_gettime(clock) - used < 0.05
    owner.progress.close()
    assert not thread.is_alive()


def test_an_error_is_raised_by_every_wait_with_the_operations_lines(owner):
    def breaks():
        raise ValueError("the operation's own")

    request = owner.work_async(breaks)
    for _ in range(2):
        with pytest.raises(ValueError, match="the operation's own") as caught:
            request.wait(LIMIT)
        lines = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert lines.count("breaks") == 1
        assert lines.count("wait") == 1


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError("x"), MismatchError("x")])
def test_requests_go_on_after_an_error_that_leaves_the_ranks_in_step(owner, error):
    def breaks():
        raise error

    first, second = owner.work_async(breaks), owner.work_async(lambda: 5)
    with pytest.raises(type(error)):
        first.wait(LIMIT)
    assert second.wait(LIMIT) == 5


def test_after_a_failure_the_later_ones_fail_at_once_and_name_the_first(owner, gate):
    done = []

    def breaks():
        gate.wait(LIMIT)
        owner.private.mark_failed("work", error := CollectiveTimeout("rank 3 is silent"))
        raise error

    first = owner.work_async(breaks)
    line = sys._getframe().f_lineno - 1
    later = [owner.work_async(lambda: done.append(1)) for _ in range(3)]
    gate.set()
    with pytest.raises(CollectiveTimeout, match="rank 3 is silent"):
        first.wait(LIMIT)
    later.append(owner.work_async(lambda: done.append(1)))
    for request in later:
        words = r"work_async at test_requests.py:\d+: not carried out, since work_async at "
        words += rf"test_requests.py:{line} failed: CollectiveTimeout: rank 3 is silent"
        with pytest.raises(CollectiveError, match=words):
            request.wait(LIMIT)
    assert not done


def test_an_error_of_what_the_arrays_wait_for_ends_the_requests(owner, monkeypatch):
    def broken(values):
        def ordered():
            raise RuntimeError("the device is gone")

        return ordered

    monkeypatch.setattr(carrying_out.streams, "capture_streams", broken)
    first, second = owner.work_async(lambda: 1), owner.work_async(lambda: 2)
    with pytest.raises(RuntimeError, match="the device is gone"):
        first.wait(LIMIT)
    with pytest.raises(CollectiveError, match="not carried out, since work_async"):
        second.wait(LIMIT)


def test_a_wait_may_be_without_end(owner):
    assert owner.work_async(lambda: 5).wait(math.inf) == 5


def test_a_wait_that_is_over_leaves_the_request_under_way(owner, gate):
    request = owner.work_async(lambda: gate.wait(LIMIT))
    with pytest.raises(CollectiveTimeout, match=r"wait: work_async at test_requests.py:\d+ is not"):
        request.wait(0.05)
    assert not request.done()
    gate.set()
    assert request.wait(LIMIT) is True


def test_several_threads_may_wait_for_one_request(owner, gate):
    request = owner.work_async(lambda: gate.wait(LIMIT) and 7)
    waits = [in_thread(request.wait, LIMIT) for _ in "1234"]
    gate.set()
    assert [wait.result(LIMIT) for wait in waits] == [7] * 4


@pytest.mark.parametrize("timeout", [None, LIMIT])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_signal_interrupts_a_wait_and_the_request_goes_on(owner, gate, error, timeout):
    def stop(*_):
        raise error("the program's own")

    request = owner.work_async(lambda: gate.wait(LIMIT))
    before = signal.signal(signal.SIGINT, stop)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted():
        timer.start()
        request.wait(timeout)

    try:
        with pytest.raises(error, match="the program's own"):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    gate.set()
    assert request.wait(LIMIT) is True


def test_repr_says_where_it_was_issued_and_how_far_it_is(owner, gate):
    first, second = owner.work_async(lambda: gate.wait(LIMIT)), owner.work_async(lambda: 1 // 0)
    line = sys._getframe().f_lineno - 1
    assert repr(second) == f"<Request work_async at test_requests.py:{line}: not begun>"
    gate.set()
    first.wait(LIMIT)
    assert repr(first).endswith(": done>")
    with pytest.raises(ZeroDivisionError):
        second.wait(LIMIT)
    assert "failed: ZeroDivisionError: integer division" in repr(second)


def test_a_request_that_nobody_waits_for_is_named_once_when_it_is_dropped(owner, gate, caplog):
    owner.work_async(lambda: gate.wait(LIMIT))
    line = sys._getframe().f_lineno - 1
    gc.collect()
    (told,) = names(caplog)
    assert told.startswith(f"work_async at test_requests.py:{line} was never waited for (")
    gate.set()
    owner.progress.close()
    assert len(names(caplog)) == 1


def test_a_failure_that_nobody_waits_for_is_in_the_warning(owner, caplog):
    def breaks():
        owner.private.mark_failed("work", ZeroDivisionError())
        return 1 // 0

    request = owner.work_async(breaks)
    with pytest.raises(CollectiveError, match="not carried out"):  # the next one, after it
        owner.work_async(lambda: 1).wait(LIMIT)
    del request
    gc.collect()
    assert any("failed: ZeroDivisionError" in told for told in names(caplog))


def test_a_request_that_was_waited_for_is_not_named(owner, caplog):
    owner.work_async(lambda: 1).wait(LIMIT)
    gc.collect()
    assert not names(caplog)


def test_callbacks_are_called_in_order_with_the_request_when_it_is_done(owner, gate):
    told = []
    request = owner.work_async(lambda: gate.wait(LIMIT) and 5)
    for name in "ab":
        request.add_done_callback(lambda r, name=name: told.append((name, r is request, r.wait(0))))
    assert told == []
    gate.set()
    owner.work_async(lambda: None).wait(LIMIT)  # comes after the callbacks
    assert told == [("a", True, 5), ("b", True, 5)]
    request.add_done_callback(lambda r: told.append(threading.current_thread().name))
    assert told[2:] == ["MainThread"]


def test_what_a_callback_raises_is_logged_and_harms_nobody(owner, caplog):
    request = owner.work_async(lambda: 5)
    request.wait(LIMIT)
    seen = []
    request.add_done_callback(lambda r: 1 / 0)
    request.add_done_callback(seen.append)
    assert seen == [request]
    assert "ZeroDivisionError" in caplog.text
    assert owner.work_async(lambda: 6).wait(LIMIT) == 6


def test_a_callback_has_to_look_at_an_error_and_keeps_the_request_until_then(owner, gate, caplog):
    told = []

    def fail(kind):
        assert gate.wait(LIMIT)
        raise kind("oh")

    for look in (True, False):
        request = owner.work_async(lambda: fail(ValueError))
        request.add_done_callback(lambda r, look=look: told.append(r.exception() if look else r))
        del request
    owner.work_async(lambda: 5).add_done_callback(lambda r: told.append(5))
    gc.collect()
    gate.set()
    owner.work_async(lambda: None).wait(LIMIT)
    assert [type(one) for one in told[::2]] == [ValueError, int]
    told.clear()
    gc.collect()
    warnings = [r.getMessage() for r in caplog.records if "was never waited for" in r.getMessage()]
    assert len(warnings) == 1
    assert "failed: ValueError: oh" in warnings[0]


def test_exception_tells_how_it_ended(owner, gate):
    request = owner.work_async(lambda: gate.wait(LIMIT))
    assert request.exception() is None
    assert not request.done()
    gate.set()
    assert request.wait(LIMIT) is True
    assert request.exception() is None
    failed = owner.work_async(lambda: 1 / 0)
    while not failed.done():
        time.sleep(0.001)
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert failed.envelope is None


def test_closing_waits_for_what_is_under_way(owner):
    began = threading.Event()
    request = owner.work_async(lambda: began.set() or time.sleep(0.2) or 3)
    owner.progress.close()
    assert request.done()
    assert request.wait() == 3


def test_closing_names_what_does_not_end_in_one_warning(owner, gate, caplog, monkeypatch):
    monkeypatch.setattr(carrying_out, "EXIT_SECONDS", 0.1)
    held = [owner.work_async(lambda: gate.wait(LIMIT)) for _ in range(12)]
    owner.progress.close()
    (told,) = names(caplog)
    assert told.startswith("12 requests not done when their communicator was closed: work_")
    assert told.count("work_async at test_requests.py:") == 8
    assert told.endswith(", and 4 more")
    for request in held:
        with pytest.raises(CollectiveError, match="was closed before it was done"):
            request.wait()
    owner.progress.close()
    assert owner.private.closed == 0  # the operation still uses it
    del held, request
    gc.collect()
    assert len(names(caplog)) == 1


def test_closing_stops_an_operation_that_waits_for_another_rank(owner, caplog, monkeypatch):
    monkeypatch.setattr(carrying_out, "EXIT_SECONDS", 0.05)

    ranks = inprocess.ThreadTransport(inprocess.ThreadGroup(2, "eager"), 0)

    threads = []

    def waits():
        threads.append(threading.current_thread())
        deadline = Deadline("barrier", 60.0)
        while True:
            deadline.check(ranks, [])
            time.sleep(0.001)

    request = owner.work_async(waits)
    owner.progress.close()
    assert not threads[0].is_alive()
    with pytest.raises(CollectiveError, match="was closed before it was done"):
        request.wait()
    assert len(names(caplog)) == 1
    Deadline("barrier", 60.0).check(ranks, [])  # other threads go on


@pytest.mark.parametrize("later", [0, 3])
def test_closing_in_a_callback_waits_for_the_later_requests_and_not_for_itself(
    owner, gate, caplog, later
):
    told, closed = [], threading.Event()

    def close(_):
        owner.progress.close()
        told.append(owner.private.closed)
        closed.set()

    first = owner.work_async(lambda: gate.wait(LIMIT) and threading.current_thread())
    first.add_done_callback(close)
    requests = [owner.work_async(lambda i=i: told.append(-i) or i) for i in range(later)]
    gate.set()
    assert closed.wait(LIMIT)
    assert told == [*(-i for i in range(later)), 1]
    assert [request.wait(0) for request in requests] == list(range(later))
    first.wait(0).join(LIMIT)
    assert not first.wait(0).is_alive()
    with pytest.raises(CollectiveError, match="the communicator was closed"):
        owner.work_async(lambda: 1)
    assert not names(caplog)


def test_closing_in_a_callback_while_another_thread_closes_closes_once(owner, gate, caplog):
    closed = threading.Event()
    first = owner.work_async(lambda: gate.wait(LIMIT))
    first.add_done_callback(lambda _: owner.progress.close())
    first.add_done_callback(lambda _: (owner.progress.close(), closed.set()))
    later = owner.work_async(lambda: 5)
    closing = threading.Thread(target=owner.progress.close)
    closing.start()
    gate.set()
    assert closed.wait(LIMIT)
    closing.join(LIMIT)
    assert later.wait(0) == 5
    assert owner.private.closed == 1
    assert not names(caplog)


def test_closing_in_a_callback_after_another_close_gave_up(owner, gate, caplog, monkeypatch):
    monkeypatch.setattr(carrying_out, "EXIT_SECONDS", 0.05)
    ready, begun, closed = threading.Event(), threading.Event(), threading.Event()

    def close(_):
        begun.set()
        gate.wait(LIMIT)
        owner.progress.close()
        closed.set()

    request = owner.work_async(lambda: ready.wait(LIMIT) and 5)
    request.add_done_callback(close)
    later = owner.work_async(lambda: 1)
    ready.set()
    assert begun.wait(LIMIT)
    owner.progress.close()
    gate.set()
    assert closed.wait(LIMIT)
    assert request.wait(0) == 5
    with pytest.raises(CollectiveError, match="was closed before it was done"):
        later.wait(0)
    assert owner.private.closed == 0
    (told,) = names(caplog)
    assert told.startswith("1 request not done when their communicator was closed: work_")


def test_no_request_after_close(owner):
    owner.progress.close()
    with pytest.raises(CollectiveError, match="work_async at .*: the communicator was closed"):
        owner.work_async(lambda: 1)


def test_memory_of_a_request_is_released_when_it_is_dropped(owner):
    arrays = [np.zeros(8), np.zeros(8)]
    left = [weakref.ref(array) for array in arrays]
    request = owner.work_async(lambda given=arrays: given[1])
    assert request.wait(LIMIT) is arrays[1]
    del arrays, request
    owner.work_async(lambda: 1).wait(LIMIT)  # the thread has put the first one away
    assert [ref() for ref in left] == [None, None]


def test_a_forked_child_starts_and_waits_for_nothing(owner, gate):
    request = owner.work_async(lambda: gate.wait(LIMIT))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for action in (lambda: owner.work_async(lambda: 1), lambda: request.wait()):
                with pytest.raises(CollectiveError, match="child"):
                    action()
            owner.progress.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    request.wait(LIMIT)


HANGS_AT_EXIT = """
    import threading, time
    from collectives.core import background_threads
    from collectives.operations import nonblocking as progress
    background_threads.EXIT_SECONDS = 0.2
    class Owner:
        def __init__(self):
            self.progress = progress.RequestThread(lambda: self)
        def state_of(self, make):
            return self.progress
        def close(self):
            pass
        def work(self, function):
            return function()
        work_async = progress.nonblocking_twin(work)
    owner = Owner()
    held = owner.work_async(threading.Event().wait)
    {last}
"""


@pytest.mark.parametrize("last", ["pass", "held.done()", "raise SystemExit(0)"])
def test_a_program_ends_while_a_request_hangs_and_names_it(last):
    result = run(
        [sys.executable, "-c", textwrap.dedent(HANGS_AT_EXIT.format(last=last))], timeout=30
    ).checked()
    assert result.stderr.count("1 request not done") == 1, result.stderr
    assert "work_async at <string>:17" in result.stderr


def test_a_finished_request_that_nobody_waited_for_is_named_at_exit():
    text = HANGS_AT_EXIT.format(last="held = owner.work_async(lambda: 1)")
    text = text.replace("threading.Event().wait", "int")
    result = run([sys.executable, "-c", textwrap.dedent(text)], timeout=30).checked()
    assert result.stderr.count("work_async at <string>:17 was never waited for (") == 1
    assert result.stderr.count("work_async at <string>:18 was never waited for (") == 1
