"""Two threads of a rank in collective operations of one communicator: refused at once."""

import functools
import sys
import threading
import time

import numpy as np
import pytest
from calls import LIMIT, together

import collectives as cc
import inprocess
from collectives.communicator import group_of

# Functions that make the call of the first thread, or its plan, and return a function that repeats
# it; and those that return the call that the second thread makes at the same time.
FIRST = {
    "repeated": lambda comm: lambda: comm.allreduce(np.ones(3), op=cc.SUM),
    "planned": lambda comm: comm.plan_allreduce(np.ones(3), op=cc.MAX),
    "long": lambda comm: lambda: comm.allreduce(np.ones(200_000), op=cc.SUM)[:3],
}
SECOND = {
    "same": lambda comm, first: first,
    "grouped": lambda comm, first: lambda: comm.grouped_allreduce([np.ones(2)], op=cc.SUM),
    "object": lambda comm, first: lambda: comm.broadcast_object(None),
    "close": lambda comm, first: comm.close,
}


def until_in_a_call(comm):
    limit = time.monotonic() + LIMIT
    while group_of(comm).gate is None:
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.mark.several
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_the_second_thread_is_refused_and_the_call_of_the_first_completes(comm, first, second):
    shared, signals = comm.split(0), comm.split(0)
    call = FIRST[first](shared)
    expected = [1 if first == "planned" else comm.size] * 3
    for _ in range(2):
        assert call().tolist() == expected
    if comm.rank > 0:
        signals.barrier()
        assert call().tolist() == expected
        signals.barrier()
        return
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), name="early")
    thread.start()
    until_in_a_call(shared)
    words = r"another thread \(early\) is in .*got a call by thread .*comm\.split\(0\)"
    with pytest.raises(cc.CollectiveError, match=words):
        SECOND[second](shared, call)()
    signals.barrier()
    thread.join(LIMIT)
    assert results[0].tolist() == expected
    with pytest.raises(cc.CollectiveError, match=r"threads early and .* at the same time"):
        call()
    signals.barrier()


class Slow:
    """An object whose pickling lasts until a signal comes, so that a call does."""

    def __init__(self, begun, signal):
        self.begun, self.signal = begun, signal

    def __reduce__(self):
        self.begun.set()
        assert self.signal.wait(LIMIT)
        return (list, ())


@inprocess.on_ranks(1)
def test_threads_of_a_group_of_one_rank_take_turns(comm):
    begun, signal = threading.Event(), threading.Event()
    results = []

    def first():
        results.append(comm.broadcast_object(Slow(begun, signal)))

    def second():
        results.append(comm.allreduce(np.ones(3), op=cc.SUM).tolist())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(LIMIT)
    threads[1].start()
    threads[1].join(0.1)
    assert results == []
    signal.set()
    for thread in threads:
        thread.join(LIMIT)
    assert results[1:] == [[1.0] * 3]


# Functions that make a call of a thread's number, and return a function that repeats it from one
# line for all threads and returns whether the result is right.
OF_ONE_RANK = {
    "planned": lambda comm, x, n: both(comm.plan_allreduce(x, op=cc.SUM), lambda y: (y == n).all()),
    "allreduce": lambda comm, x, n: lambda: (comm.allreduce(x) == n).all(),
    "broadcast": lambda comm, x, n: lambda: (comm.broadcast(x) == n).all(),
    "allgather": lambda comm, x, n: lambda: (comm.allgather(x) == n).all(),
    "reduce_scatter": lambda comm, x, n: lambda: (comm.reduce_scatter(x) == n).all(),
    "object": lambda comm, x, n: lambda: comm.allgather_object(n) == [n],
}


def both(call, is_right):
    return lambda: is_right(call())


@pytest.mark.parametrize("interval", [5e-3, 1e-5])
@pytest.mark.parametrize("kind", ["array", "tensor"])
@inprocess.on_ranks(1)
def test_many_threads_of_a_group_of_one_rank_get_their_own_results(comm, kind, interval):
    make = np.full if kind == "array" else pytest.importorskip("torch").full
    before = sys.getswitchinterval()
    found = []

    def work(group, number):
        x = make((100,), float(number))
        calls = [make(group, x, number) for make in OF_ONE_RANK.values()]
        for _ in range(80):
            found.extend(bool(call()) for call in calls)

    sys.setswitchinterval(interval)
    try:
        for _ in range(6):  # each group learns its calls anew
            group = comm.split(0)
            together(functools.partial(work, group), range(8))
    finally:
        sys.setswitchinterval(before)
    assert found == [True] * len(OF_ONE_RANK) * 8 * 80 * 6


@inprocess.on_ranks(1, timeout=0.3)
def test_a_thread_of_a_group_of_one_rank_does_not_wait_for_another_for_ever(comm):
    begun, signal = threading.Event(), threading.Event()
    thread = threading.Thread(target=comm.broadcast_object, args=(Slow(begun, signal),))
    thread.start()
    assert begun.wait(LIMIT)
    with pytest.raises(cc.CollectiveError, match="another thread"):
        comm.barrier()
    signal.set()
    thread.join(LIMIT)


@inprocess.on_ranks(3)
def test_other_ranks_of_the_node_do_not_wait_for_a_rank_whose_threads_collided(comm):
    shared, signals = comm.split(0), comm.split(0)
    shared.barrier()
    if comm.rank == 0:
        thread = threading.Thread(target=shared.barrier)
        thread.start()
        until_in_a_call(shared)
        with pytest.raises(cc.CollectiveError, match="another thread"):
            shared.barrier()
    signals.barrier()
    if comm.rank == 0:
        thread.join(LIMIT)
    else:
        shared.barrier()
    with pytest.raises(cc.CollectiveError, match=r"at the same time|rank \d has closed"):
        shared.barrier(timeout=LIMIT)


@pytest.mark.several
def test_messages_between_two_ranks_and_requests_work_during_a_call(comm):
    comm.barrier()
    comm.allreduce_async(1.0).wait()
    if comm.rank == 0:
        thread = threading.Thread(target=comm.barrier)
        thread.start()
        until_in_a_call(comm)
        comm.send([1.0], 1)
        request = comm.allreduce_async(1.0, op=cc.SUM)
        comm.send([2.0], 1)
        thread.join(LIMIT)
    else:
        if comm.rank == 1:
            assert comm.recv(0).tolist() == [1.0]
            assert comm.recv(0).tolist() == [2.0]
        request = comm.allreduce_async(1.0, op=cc.SUM)
        comm.barrier()
    assert request.wait(LIMIT) == comm.size
