"""Any sequence of operations on any queue, against a slow model that anybody can check."""

import threading
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_queues import Pending

import pairwise
from strategies.errors import CancelledError, DeadlineExceededError, OutOfRangeError
from strategies.queues.queue_types import (
    FIFOQueue,
    PaddingFIFOQueue,
    PriorityQueue,
    RandomShuffleQueue,
)
from strategies.queues.state_machine import Close, Dequeue, Enqueue

LIMIT = 20.0
CAPACITY = 4
KINDS = ["fifo", "shuffle", "keeping", "padding", "priority"]


def priority(value):
    return value % 3  # many are equal


def make(kind, capacity=CAPACITY):
    """A queue whose elements tell a number in several ways."""
    if kind == "padding":
        return PaddingFIFOQueue(capacity, "int64", [(None,)])
    if kind == "priority":
        return PriorityQueue(capacity, "int64", [()])
    if kind == "fifo":
        return FIFOQueue(capacity, "int64", [()])
    return RandomShuffleQueue(capacity, 2 if kind == "keeping" else 0, "int64", [()])


def element(kind, value):
    if kind == "padding":
        return (np.full(value % 3 + 1, value),)
    return (priority(value), value) if kind == "priority" else (value,)


def columns(kind, values):
    if kind == "padding":
        return (np.repeat(np.array(values)[:, None], len(values) % 3 + 1, axis=1),)
    column = np.array(values, np.int64)
    return (column % 3, column) if kind == "priority" else (column,)


def numbers_of(kind, queue, result, single):
    """The numbers that an operation returned; elements must be whole."""
    if kind == "priority":
        priorities, values = result
        assert np.array_equal(priorities, np.asarray(values) % 3)
    else:
        values = result
    rows = np.asarray(values)[None] if single else values
    if kind == "padding":
        assert all(set(row.tolist()) <= {row[0], 0} for row in rows)
        return [int(row[0]) for row in rows]
    return [int(value) for value in rows]


class Model:
    """The rules of a queue, one row at a time, on lists of numbers in the order of arrival."""

    def __init__(self, kind):
        self.kind = kind
        self.keep = 2 if kind == "keeping" else 0
        self.rows, self.ins, self.outs, self.closed = [], [], [], False

    def run(self):
        """One side goes as far as it gets, then the other, until neither gets further."""
        sides = [self.step_in, self.step_out]
        while any(self.drive(side) for side in sides):
            pass

    @staticmethod
    def drive(side):
        moved = False
        while side():
            moved = True
        return moved

    def step_in(self):
        if not self.ins:
            return False
        one = self.ins[0]
        if one["kind"] == "close":
            self.closed = True
        elif len(self.rows) < CAPACITY:
            self.rows.append(one["left"].pop(0))
            if one["left"]:
                return True
        else:
            return False
        self.finish(self.ins, one)
        return True

    def step_out(self):
        if not self.outs:
            return False
        one = self.outs[0]
        if self.closed and not one["begun_closed"]:
            one["begun_closed"] = True
            enough = len(self.rows) + len(one["got"]) >= (1 if one["up_to"] else one["count"])
            if not enough:
                self.give_back(one)
                one["error"] = OutOfRangeError
                self.finish(self.outs, one)
                return True
        if len(self.rows) > (0 if self.closed else self.keep):
            first = min(self.rows, key=priority) if self.kind == "priority" else self.rows[0]
            self.rows.remove(first)
            one["got"].append(first)
        elif not self.closed:
            return False
        if len(one["got"]) == one["count"] or (self.closed and one["up_to"] and not self.rows):
            self.finish(self.outs, one)
        return True

    def give_back(self, one):
        self.rows = one["got"] + self.rows
        one["got"] = []

    @staticmethod
    def finish(line, one):
        line.remove(one)
        one["done"] = True


class QueueMachine(RuleBasedStateMachine):
    kind = "fifo"

    def __init__(self):
        super().__init__()
        self.queue = make(self.kind)
        self.model = Model(self.kind)
        self.pairs = []
        self.next_value = 1

    def add(self, attempt, expected, line):
        expected.update(done=False, error=None)
        self.pairs.append((Pending(self.queue, attempt), expected))
        closing = self.model.closed or any(one["kind"] == "close" for one in self.model.ins)
        if expected["kind"] in ("in", "close") and closing:
            expected.update(done=True, error=CancelledError)
        else:
            line.append(expected)
        self.model.run()

    def taken(self, attempt):
        if attempt.count is None:
            return numbers_of(
                self.kind, self.queue, self.queue.components.result(attempt.row), True
            )
        joined = self.queue.components.join(attempt.pieces or ())
        return numbers_of(self.kind, self.queue, self.queue.components.result(joined), False)

    @rule(count=st.integers(1, 6), single=st.booleans())
    def enqueue_rows(self, count, single):
        values = list(range(self.next_value, self.next_value + (1 if single else count)))
        self.next_value += len(values)
        if single:
            attempt = Enqueue(self.queue.components.row(element(self.kind, values[0])))
        else:
            attempt = Enqueue(*self.queue.components.columns(columns(self.kind, values)))
        self.add(attempt, {"kind": "in", "left": list(values), "values": values}, self.model.ins)

    @rule(count=st.integers(1, 6), up_to=st.booleans(), single=st.booleans())
    def dequeue_rows(self, count, up_to, single):
        if single:
            attempt, count, up_to = Dequeue(), 1, False
        else:
            attempt = Dequeue(count, up_to=up_to)
        expected = {"kind": "out", "count": count, "up_to": up_to, "got": [], "begun_closed": False}
        self.add(attempt, expected, self.model.outs)

    @precondition(lambda self: self.next_value > 8)
    @rule()
    def close(self):
        self.add(Close(), {"kind": "close"}, self.model.ins)

    @precondition(lambda self: self.next_value > 12)
    @rule()
    def close_cancelling(self):
        self.queue.close(cancel_pending_enqueues=True)
        self.model.closed = True
        for one in self.model.ins:
            one.update(done=True, error=CancelledError)
        self.model.ins.clear()
        self.model.run()

    @precondition(lambda self: self.next_value > 12)
    @rule()
    def cancel_pending(self):
        self.queue.cancel_pending()
        for one in [*self.model.ins, *self.model.outs]:
            one.update(done=True, error=CancelledError)
            if one["kind"] == "out":
                self.model.give_back(one)
        self.model.ins.clear()
        self.model.outs.clear()

    @rule(which=st.integers(0, 10))
    def expire(self, which):
        waiting = [pair for pair in self.pairs if not pair[1]["done"]]
        if not waiting:
            return
        pending, expected = waiting[which % len(waiting)]
        self.queue.state_machine.withdraw(pending.attempt, DeadlineExceededError("late"))
        line = self.model.outs if expected["kind"] == "out" else self.model.ins
        if expected["kind"] == "out":
            self.model.give_back(expected)
        expected["error"] = DeadlineExceededError
        self.model.finish(line, expected)
        self.model.run()

    @invariant()
    def same_state(self):
        assert self.queue.size() == len(self.model.rows)
        assert self.queue.is_closed() == self.model.closed
        for pending, expected in self.pairs:
            assert pending.done == expected["done"]
            assert type(pending.attempt.error) is (expected["error"] or type(None))
            if expected["kind"] == "out" and expected["done"] and not expected["error"]:
                got = self.taken(pending.attempt)
                assert len(got) == len(expected["got"])
                if self.kind in ("fifo", "padding", "priority"):
                    assert got == expected["got"]

    def teardown(self):
        """Every row that went in comes out exactly once."""
        self.queue.close(cancel_pending_enqueues=True)
        last = Dequeue(self.queue.size())
        self.queue.state_machine.submit(last)
        rows_in, rows_out = [], self.taken(last)
        for pending, expected in self.pairs:
            attempt = pending.attempt
            assert pending.done
            if expected["kind"] == "in":
                single = attempt.count is None
                entered = int(attempt.error is None) if single else attempt.entered
                rows_in += expected["values"][:entered]
            elif expected["kind"] == "out" and attempt.error is None:
                rows_out += self.taken(attempt)
        assert Counter(rows_in) == Counter(rows_out)


_settings = settings(
    max_examples=100 if pairwise.full else 50, stateful_step_count=40, derandomize=True
)


def _case(name):
    machine = type(f"{name.title()}Machine", (QueueMachine,), {"kind": name})
    machine.TestCase.settings = _settings
    return machine.TestCase


TestFifo, TestShuffle, TestKeeping, TestPadding, TestPriority = map(_case, KINDS)


# The same operations from several threads: no order is known, but nothing may be lost or doubled.

_step = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 9)),
    st.tuples(st.just("put_one"), st.just(1)),
    st.tuples(st.just("take"), st.integers(0, 9)),
    st.tuples(st.just("take_up_to"), st.integers(1, 9)),
    st.tuples(st.just("take_one"), st.just(1)),
)
_end = st.sampled_from(["close", "cancelling close", "cancel, close"])


class Worker:
    """One thread's operations and what became of them."""

    def __init__(self, kind, queue, steps, timeout, first):
        self.kind, self.queue, self.steps, self.timeout = kind, queue, steps, timeout
        self.next_value = first
        self.surely_in, self.perhaps_in, self.out = [], [], []
        self.error = None

    def run(self):
        try:
            for step in self.steps:
                with suppress(OutOfRangeError, CancelledError, DeadlineExceededError):
                    self.do(*step)
        except BaseException as error:
            self.error = error

    def do(self, operation, count):
        if operation.startswith("put"):
            values = list(range(self.next_value, self.next_value + count))
            self.next_value += count
            self.perhaps_in = self.perhaps_in + values
            if operation == "put_one":
                self.queue.enqueue(element(self.kind, values[0]), timeout=self.timeout)
            elif values:
                self.queue.enqueue_many(columns(self.kind, values), timeout=self.timeout)
            self.surely_in += values
            return
        if operation == "take_one":
            got, single = self.queue.dequeue(timeout=self.timeout), True
        else:
            take = {"take": self.queue.dequeue_many, "take_up_to": self.queue.dequeue_up_to}
            got, single = take[operation](count, timeout=self.timeout), False
        self.out.append(numbers_of(self.kind, self.queue, got, single))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, derandomize=True)
@given(
    programs=st.lists(st.lists(_step, max_size=25), min_size=1, max_size=6),
    timeouts=st.lists(st.sampled_from([None, 0, 0.001, 0.01]), min_size=6, max_size=6),
    capacity=st.sampled_from([3, 5, 20, -1]),
    end=_end,
)
def test_threads_lose_nothing(kind, programs, timeouts, capacity, end):
    queue = make(kind, capacity)
    workers = [
        Worker(kind, queue, steps, timeout, 1 + 1000 * index)
        for index, (steps, timeout) in enumerate(zip(programs, timeouts, strict=False))
    ]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    if end == "cancel, close":
        queue.cancel_pending()
    if end == "close":
        # Until nothing changes any more, or everybody has ended: a plain close may have to wait.
        try:
            queue.close(timeout=0.02)
        except (DeadlineExceededError, CancelledError):
            queue.close(cancel_pending_enqueues=True)
    else:
        queue.close(cancel_pending_enqueues=True)
    deadline = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(deadline - time.monotonic())
        assert not thread.is_alive()
    assert [worker.error for worker in workers] == [None] * len(workers)
    out = Counter(value for worker in workers for batch in worker.out for value in batch)
    while queue.size():
        out.update(numbers_of(kind, queue, queue.dequeue_up_to(7), False))
    assert max(out.values(), default=1) == 1
    assert set(out) >= {value for worker in workers for value in worker.surely_in}
    assert set(out) <= {value for worker in workers for value in worker.perhaps_in}
    if kind in ("fifo", "padding"):  # what one thread put in comes to one taker in order
        for worker in workers:
            for sender in range(len(workers)):
                own = [v for batch in worker.out for v in batch if v // 1000 == sender]
                assert own == sorted(own)
