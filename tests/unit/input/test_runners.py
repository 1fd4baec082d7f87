"""QueueRunner and start_queue_runners."""

import sys
import threading
from collections import Counter

import numpy as np
import pytest

from launcher import run
from strategies.errors import CancelledError, InvalidArgumentError, OutOfRangeError
from strategies.input.coordinator import Coordinator
from strategies.input.producers import string_input_producer
from strategies.input.runners import QueueRunner, start_queue_runners
from strategies.queues.queue_types import FIFOQueue

LIMIT = 20.0


def counting(queue, times):
    """An enqueue op that ends after some times."""
    left = iter(range(times))

    def enqueue():
        for value in left:
            queue.enqueue(value, timeout=LIMIT)
            return
        raise OutOfRangeError("no more")

    return enqueue


def joined(threads):
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_one_and_two_ops():
    queue = FIFOQueue(-1, "int64", [()], name="counts")
    runner = QueueRunner(queue, [counting(queue, 3), counting(queue, 30)])
    threads = runner.create_threads()
    assert sorted(thread.name for thread in threads) == [
        "QueueRunnerThread-counts-0",
        "QueueRunnerThread-counts-1",
    ]
    assert not any(thread.daemon for thread in threads)
    for thread in threads:
        thread.start()
    joined(threads)
    assert queue.is_closed()  # by the last of them
    assert Counter(queue.dequeue_many(33).tolist()) == Counter([*range(3), *range(30)])
    assert runner.exceptions_raised == []


def test_from_queue_to_queue():
    source, target = FIFOQueue(10, "int64", [()]), FIFOQueue(1, "int64", [()])
    source.enqueue_many(np.arange(3))
    source.close()
    runner = QueueRunner(target, [lambda: target.enqueue(source.dequeue())])
    coord = Coordinator()
    threads = start_queue_runners([runner], coord)
    assert all(thread.daemon for thread in threads)
    assert [target.dequeue(timeout=LIMIT) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfRangeError):
        target.dequeue(timeout=LIMIT)
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)


def test_exceptions_are_kept_and_free_the_consumer(monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    queue = FIFOQueue(5, "int64", [()])

    def fail():
        raise RuntimeError("broken source")

    runner = QueueRunner(queue, [fail])
    joined(runner.create_threads(start=True))
    assert [str(error) for error in runner.exceptions_raised] == ["broken source"]
    assert [str(args.exc_value) for args in reported] == ["broken source"]
    with pytest.raises(OutOfRangeError):
        queue.dequeue(timeout=LIMIT)


def test_an_exception_stops_the_coordinator_and_cancels_the_queue():
    queue = FIFOQueue(1, "int64", [()])
    entered = threading.Event()

    def fail():
        assert entered.wait(LIMIT)
        raise RuntimeError("broken source")

    def fill():
        queue.enqueue(1)
        entered.set()

    coord = Coordinator()
    runner = QueueRunner(queue, [fill, fail])  # the first soon waits for room
    start_queue_runners([runner], coord)
    with pytest.raises(RuntimeError, match="broken source"):
        coord.join(stop_grace_period_secs=LIMIT)
    with pytest.raises(CancelledError):
        queue.enqueue(1)
    assert runner.exceptions_raised == []


def test_a_stopped_coordinator_is_respected():
    queue = FIFOQueue(5, "int64", [()])
    coord = Coordinator()
    coord.request_stop()
    calls = []
    threads = QueueRunner(queue, [lambda: calls.append(1)]).create_threads(coord, start=True)
    coord.join(stop_grace_period_secs=LIMIT)
    joined(threads)
    assert calls == []
    assert queue.is_closed()


def test_running_threads_are_not_started_again(caplog):
    queue = FIFOQueue(1, "int64", [()])
    runner = QueueRunner(queue, [lambda: queue.enqueue(1)])
    coord = Coordinator()
    threads = runner.create_threads(coord, start=True)
    assert len(threads) == 2
    assert runner.create_threads(coord, start=True) == []
    assert "running already" in caplog.text
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)
    again = Coordinator()
    again.request_stop()
    assert len(runner.create_threads(again, start=True)) == 2
    again.join(stop_grace_period_secs=LIMIT)


def test_other_close_and_cancel_ops():
    queue = FIFOQueue(5, "int64", [()])
    calls = []
    options = {
        "close_op": lambda: calls.append("close"),
        "cancel_op": lambda: calls.append("cancel"),
        "queue_closed_exception_types": (InvalidArgumentError, CancelledError),
    }

    def end():
        raise CancelledError("my end")

    coord = Coordinator()
    runner = QueueRunner(queue, [end], **options)
    threads = runner.create_threads(coord, start=True)
    threads[0].join(LIMIT)
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)
    assert calls == ["close", "cancel"]


@pytest.mark.parametrize("runners", [1, 3])
def test_join_returns_after_the_last_file(runners):
    """As in a program that only loads data, where nothing requests the stop."""
    coord = Coordinator()
    made = [string_input_producer(list("abc"), num_epochs=1) for _ in range(runners)]
    threads = start_queue_runners([producer.runner for producer in made], coord)
    joining = threading.Thread(target=coord.join, args=(threads,), daemon=True)
    joining.start()
    joined([joining])
    assert [sorted(producer.queue.dequeue_many(3)) for producer in made] == [list("abc")] * runners


# Waits without an end; the warning of each wait ends it.
STALLED = """
import logging, time
from strategies.errors import OutOfRangeError
from strategies.input import Coordinator, batch, start_queue_runners, string_input_producer

class Ends(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        self.end()

ends = Ends()
logging.getLogger().addHandler(ends)
names = string_input_producer(["a"], name="by_hand").queue
ends.end = names.close
try:
    names.dequeue()
except OutOfRangeError:
    pass
names = string_input_producer(["a"], name="of_batches").queue
ends.end = names.close
with batch(names.dequeue, 1) as batches:
    assert list(batches) == []
coord = Coordinator()
names, runner = string_input_producer(list("abc"), capacity=1, name="without_trainer")
ends.end = coord.request_stop
threads = start_queue_runners([runner], coord)
while not names.size():
    time.sleep(0.01)
coord.join(threads)
"""


def test_waits_without_an_end_name_queue_and_runner():
    result = run([sys.executable, "-c", STALLED], timeout=60, UNISONO_STALL_WARNING="0.1").checked()
    by_hand, of_batches, without_trainer = result.stdout.splitlines()
    for line, name in (by_hand, "by_hand"), (of_batches, "of_batches"):
        assert "dequeue has waited 0.1 s: the queue's QueueRunner was not started" in line
        assert f"queue: {name}" in line
    assert "join: QueueRunner has put nothing into 'without_trainer' for 0.1 s" in without_trainer
    assert "nothing is taken out of the full queue" in without_trainer
    assert "QueueRunnerThread-without_trainer-0" in without_trainer


def test_runner_arguments():
    queue = FIFOQueue(5, "int64")
    for arguments in ((None, [print]), (queue, [])):
        with pytest.raises(ValueError, match="queue and at least one"):
            QueueRunner(*arguments)
    for types in ((), OutOfRangeError, (ValueError,), [OutOfRangeError]):
        with pytest.raises(TypeError, match="OpError"):
            QueueRunner(queue, [print], queue_closed_exception_types=types)
