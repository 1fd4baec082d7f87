"""Services of two tasks that are threads: silence, late answers, and things of any kind."""

import logging
import threading
import time

import numpy as np
import pytest
from calls import LIMIT, until

import elsewhere
from collectives import extend
from collectives.channel.channel import ReceivedMessage
from strategies.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from strategies.queues.queue_types import FIFOQueue
from strategies.queues.remote import shared_queue
from strategies.rpc import message as protocol
from strategies.rpc.client import PendingRequests
from strategies.rpc.message import Kind
from strategies.rpc.message_loop import MessageLoop
from strategies.rpc.registry import Address, ResourceType, register_type
from tapped import silence


@pytest.fixture
def services():
    with elsewhere.two_tasks() as services:
        yield services


def queue_on_0(service, name="q", **options):
    return shared_queue(FIFOQueue, 10, np.int64, [()], service=service, shared_name=name, **options)


def test_a_silent_task_is_given_up_and_what_it_does_later_is_undone():
    with elsewhere.two_tasks(timeout=3) as services:
        queue = queue_on_0(services[1])
        queue.enqueue_many((np.arange(5),))
        with silence(services.channels[0]):
            began = time.monotonic()
            with pytest.raises(UnavailableError, match="task 0 has given no sign of life for 3 s"):
                queue.dequeue_many(3)
            assert time.monotonic() - began > 2.9
        until(lambda: queue.size() == 5)
        assert queue.dequeue_many(5).tolist() == [0, 1, 2, 3, 4]


def test_waiting_for_a_task_that_lives_has_no_end():
    with elsewhere.two_tasks(timeout=3) as services:
        queue = queue_on_0(services[1])
        threading.Timer(4, queue_on_0(services[0]).enqueue, (7,)).start()
        assert queue.dequeue() == 7


def test_a_decision_that_does_not_come_is_an_error_and_loses_nothing(services, monkeypatch):
    monkeypatch.setattr("strategies.rpc.client.DECISION", 0.1)
    queue = queue_on_0(services[1])
    queue.enqueue(1)
    told = "its task does not say whether it succeeded"
    with silence(services.channels[0]), pytest.raises(UnavailableError, match=told):
        queue.dequeue(timeout=0)
    until(lambda: queue.size() == 1)
    assert queue.dequeue() == 1


def test_an_answer_that_comes_with_the_interrupt_goes_back(services):
    queue = queue_on_0(services[1])
    queue.enqueue_many((np.arange(2),))
    for count in (None, 2):
        attempt = elsewhere.Dequeue(count)
        queue.state_machine.submit(attempt)
        until(lambda attempt=attempt: attempt.done)
        queue.state_machine.abandon(attempt)
        assert not attempt.row
        assert attempt.pieces is None
        assert queue.size() == 2
    assert queue.dequeue_many(2).tolist() == [0, 1]


def test_an_answer_that_comes_after_the_interrupt_goes_back(services, monkeypatch):
    here, there = queue_on_0(services[0]), queue_on_0(services[1])
    attempt = elsewhere.Dequeue()
    there.state_machine.submit(attempt)
    until(lambda: here.state_machine.waiting()[1])
    # As if the answer had been taken from the line, but not handed over yet.
    monkeypatch.setattr(services[1], "disown", lambda number: False)
    there.state_machine.abandon(attempt)
    here.enqueue(1)
    until(lambda: attempt.done and here.size() == 1)
    assert not attempt.row


def test_rows_are_held_until_they_are_known_to_have_arrived(services):
    here, there = queue_on_0(services[0]), queue_on_0(services[1])
    here.enqueue_many((np.arange(6),))
    channel = services.channels[1]
    assert there.dequeue_many(2).tolist() == [0, 1]  # and says that they have arrived
    channel.lost = Kind.RECEIVED
    assert there.dequeue() == 2
    assert there.dequeue_many(2).tolist() == [3, 4]
    until(lambda: len(channel.withheld) == 2)
    assert here.size() == 1
    elsewhere.leave(services[1])
    until(lambda: here.size() == 4)
    assert sorted(here.dequeue_many(4)) == [2, 3, 4, 5]


def test_one_that_gives_up_is_reported_and_its_attempts_end(services):
    here, there = queue_on_0(services[0]), queue_on_0(services[1])
    there.state_machine.submit(elsewhere.Dequeue())
    until(lambda: len(here.state_machine.waiting()[1]) == 1)
    elsewhere.leave(services[1])
    until(lambda: not here.state_machine.waiting()[1])
    here.enqueue(1)
    assert here.size() == 1
    with pytest.raises(CancelledError, match="the service was given up"):
        there.size()
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"task 1 has left \(RuntimeError: of a test\)"):
            shared_queue(FIFOQueue, 1, "int8", [()], service=services[0], shared_name="x", task=1)


def test_what_a_dead_task_has_asked_for_last_takes_nothing(services):
    here, there = queue_on_0(services[0]), queue_on_0(services[1])
    here.enqueue(1)
    channel = services.channels[0]
    channel.killed = {1}
    assert services[0].departures([1], LIMIT) == {1: "task 1 died"}
    before = len(channel.handled)
    attempt = elsewhere.Dequeue()
    there.state_machine.submit(attempt)
    elsewhere.leave(services[1])
    # The dequeue, that nobody wants it any more, the farewell.
    until(lambda: len(channel.handled) >= before + 3)
    assert here.size() == 1
    assert attempt.error is not None


class Busy:
    """Three tasks, of which the first one always has a message, and the last one is dead."""

    rank, size, idle, dead = 0, 3, True, frozenset({2})

    def poll(self):
        header = bytearray(protocol.encode(Kind.PONG)[0])
        return ReceivedMessage(1, [np.frombuffer(header, np.uint8)])

    def send(self, task, frames):
        pass

    def wait(self, timeout):
        pass

    def wake(self):
        pass

    def close(self, all_together):
        pass


def test_a_death_is_noticed_while_messages_come_without_a_pause(monkeypatch):
    monkeypatch.setattr(extend, "open_channel", lambda comm: comm)
    exchange = MessageLoop(Busy(), LIMIT, lambda work, target: None)
    try:
        assert exchange.departures([2], LIMIT) == {2: "task 2 died"}
    finally:
        exchange.abandon("of a test")


def test_a_thread_that_fails_is_an_error_for_all_who_wait(services):
    queue = queue_on_0(services[1])
    waiting = elsewhere.Dequeue()
    queue.state_machine.submit(waiting)
    services.channels[0].send(1, [b"no message", b"of any kind"])
    until(lambda: waiting.done)
    assert type(waiting.error) is CancelledError
    assert "thread has failed" in str(waiting.error)
    with pytest.raises(InternalError, match="its thread has failed"):
        services[1].close()


def test_things_of_any_kind_can_be_served(services):
    stored = []

    def keep(thing, work):
        stored.extend(work.values)
        work.reply([sum(work.values)], times=work.arguments["times"])

    def fail(thing, work):
        raise KeyError("of a test")

    kind = register_type(
        ResourceType(
            "things of a test", lambda description, name: [], lambda thing, description: None,
            {"keep": keep, "fail": fail}, lambda thing: None,
        )
    )  # fmt: skip
    place, thing = services[1].open(kind, {}, name="thing")
    assert thing is None
    assert place.serial > 0
    answer = services[1].request(place, "keep", {"times": 2}, [np.ones(3), 2.0])
    np.testing.assert_array_equal(answer.values[0], [3, 3, 3])
    assert answer.metadata["times"] == 2
    with pytest.raises(InternalError, match="KeyError: 'of a test'"):
        services[1].request(place, "fail")
    with pytest.raises(UnimplementedError, match="expected one of fail keep, got 'nothing'"):
        services[1].request(place, "nothing")
    unknown = ResourceType("unknown", kind.make, kind.difference, {}, kind.discard)
    with pytest.raises(NotFoundError, match="no such kind of object"):
        services[1].open(unknown, {}, name="other")


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        ([1.0], "x" * (1 << 24), "names and descriptions are too long"),
        ([np.empty(1 << 16, np.uint8)] * 70_000, "", "at most 65536 frames"),
    ],
    ids=["cannot be written", "cannot be sent"],
)
def test_an_answer_that_cannot_be_sent_is_an_error(services, values, names, message):
    kind = register_type(
        ResourceType(
            "too large for a test", lambda description, name: [], lambda thing, description: None,
            {"large": lambda thing, work: work.reply([*map(np.asarray, values)], names=names),
             "small": lambda thing, work: work.reply()}, lambda thing: None,
        )
    )  # fmt: skip
    place, _ = services[1].open(kind, {}, name="thing")
    with pytest.raises(InvalidArgumentError, match=message):
        services[1].request(place, "large")
    services[1].request(place, "small")


def test_rows_whose_answer_cannot_be_sent_go_back_once(services, monkeypatch, caplog):
    here, there = queue_on_0(services[0]), queue_on_0(services[1])
    there.enqueue_many((np.arange(3),))
    channel = services.channels[0]
    send = channel.send

    def broken(task, frames):
        monkeypatch.setattr(channel, "send", send)
        raise OSError("broken for a test")

    monkeypatch.setattr(channel, "send", broken)
    with pytest.raises(InternalError, match="broken for a test"):
        there.dequeue_many(2)
    assert there.dequeue_many(3).tolist() == [0, 1, 2]
    with caplog.at_level(logging.WARNING):
        elsewhere.leave(services[1])
        services[0].departures([1], LIMIT)
        until(lambda: "responses dropped" in caplog.text)
    assert "; responses dropped: 0" in caplog.text
    assert here.size() == 0


@pytest.mark.parametrize(
    "end",
    [lambda r: r.close("the end"), lambda r: r.peer_lost(1, UnavailableError("died"))],
    ids=["close", "gone"],
)
def test_nobody_waits_for_answers_when_nothing_can_be_sent(end):
    def broken(task, frames):
        if frames[0][1] == Kind.DISOWN:
            raise OSError("broken for a test")

    requests, answers = PendingRequests(broken, 2, LIMIT), []
    for _ in range(2):
        requests.start(Address(1, "", "thing"), "ask", {}, (), answers.append)
    with pytest.raises(OSError, match="broken for a test"):
        end(requests)
    assert [type(answer.error) for answer in answers] == [type(answers[0].error)] * 2
    assert isinstance(answers[0].error, (CancelledError, UnavailableError))


def test_calls_where_answers_arrive_are_refused_and_not_a_deadlock(services):
    queue = queue_on_0(services[1])
    caught = []

    def on_done():
        try:
            queue.size()
        except RuntimeError as error:
            caught.append(str(error))

    attempt = elsewhere.Dequeue()
    attempt.on_done = on_done
    queue.state_machine.submit(attempt)
    queue.enqueue(1)
    until(lambda: caught)
    assert "which must not wait" in caught[0]


def test_memory_of_messages_is_released(services):
    import gc
    import weakref

    queue = shared_queue(FIFOQueue, 4, np.int64, service=services[1], shared_name="large")
    here = shared_queue(FIFOQueue, 4, np.int64, service=services[0], shared_name="large")
    gc.disable()
    try:
        queue.enqueue((np.arange(100_000),))
        got = here.dequeue()
        gone = weakref.ref(got)
        assert got[-1] == 99_999
        del got
        until(lambda: gone() is None)
    finally:
        gc.enable()


def test_memory_of_requests_that_said_how_to_end_them_is_released(services):
    import gc
    import weakref

    seen = []

    def answer(thing, work):
        work.wait(lambda error: work.fail(error), lambda: work.values)
        seen.append(weakref.ref(work))
        work.reply()

    kind = register_type(
        ResourceType(
            "waiting of a test", lambda description, name: [], lambda thing, description: None,
            {"ask": answer}, lambda thing: None,
        )
    )  # fmt: skip
    place, _ = services[1].open(kind, {}, name="thing")
    gc.disable()
    try:
        services[1].request(place, "ask", {}, [np.arange(100_000)])
        until(lambda: seen[0]() is None)
    finally:
        gc.enable()


def test_wrong_timeouts():
    from strategies.rpc.service import Service

    with pytest.raises(ValueError, match="timeout must be seconds > 0"):
        Service(None, timeout=0)
