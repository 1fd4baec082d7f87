"""Asynchronous operations among ranks: as the blocking ones, in the order of issue."""

import threading

import numpy as np
import pytest

import collectives as cc

LIMIT = 20.0

OPERATIONS = {
    "allreduce": lambda c, x: (x, {"op": cc.SUM}),
    "reduce": lambda c, x: (x, {"op": cc.MAX, "root": c.size - 1}),
    "reduce_scatter": lambda c, x: (x, {"op": cc.SUM}),
    "broadcast": lambda c, x: (x, {"root": c.size - 1}),
    "gather": lambda c, x: (x[: c.rank + 1], {}),
    "allgather": lambda c, x: (x[: c.rank + 1], {}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_result_is_that_of_the_blocking_operation(comm, name):
    x = np.arange(10.0).reshape(5, 2) + 100 * comm.rank
    args, kwargs = OPERATIONS[name](comm, x)
    request = getattr(comm, f"{name}_async")(args, **kwargs)
    expected = getattr(comm, name)(args, **kwargs)
    np.testing.assert_array_equal(request.wait(LIMIT), expected)


def test_out_is_filled_and_returned(comm):
    x = np.full(3, comm.rank + 1.0)
    request = comm.allreduce_async(x, op=cc.SUM, out=x)
    assert request.wait(LIMIT) is x
    assert x.tolist() == [comm.size * (comm.size + 1) / 2] * 3


def test_many_requests_at_once_each_get_their_own_result_in_the_order_of_issue(comm):
    requests = [comm.allreduce_async([float(i)], op=cc.SUM) for i in range(100)]
    for i in reversed(range(100)):
        assert requests[i].wait(LIMIT) == i * comm.size
        assert all(request.done() for request in requests[:i])


def test_blocking_operations_may_come_between_in_another_order_on_each_rank(comm):
    comm.barrier_async().wait(LIMIT)
    if comm.rank % 2:
        total = comm.allreduce(1, op=cc.SUM)
        request = comm.allreduce_async(10, op=cc.SUM)
    else:
        request = comm.allreduce_async(10, op=cc.SUM)
        total = comm.allreduce(1, op=cc.SUM)
    assert total == comm.size
    assert request.wait(LIMIT) == 10 * comm.size


def test_a_request_waits_for_the_slowest_rank_and_may_be_waited_for_again(comm):
    comm.barrier_async().wait(LIMIT)
    if comm.rank == 0 and comm.size > 1:
        request = comm.allreduce_async(1, op=cc.SUM)
        with pytest.raises(cc.CollectiveTimeout, match="allreduce_async at .* is not complete"):
            request.wait(0.05)
        assert not request.done()
        comm.barrier()
    else:
        comm.barrier()
        request = comm.allreduce_async(1, op=cc.SUM)
    assert request.wait(LIMIT) == comm.size


def test_wrong_use_is_raised_by_the_wait_on_all_ranks_and_later_requests_go_on(comm):
    wrong = comm.allreduce_async(["text" if comm.rank == 0 else 1.0], op=cc.SUM)
    right = comm.allreduce_async(1, op=cc.SUM)
    kind = TypeError if comm.rank == 0 else cc.MismatchError
    with pytest.raises(kind, match="this dtype cannot be sent"):
        wrong.wait(LIMIT)
    assert right.wait(LIMIT) == comm.size
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_after_a_rank_stayed_away_the_later_requests_fail_and_the_rest_goes_on(comm):
    comm.barrier_async().wait(LIMIT)
    if comm.rank == 0 and comm.size > 1:
        first = comm.barrier_async(timeout=0.2)
        second = comm.barrier_async()
        with pytest.raises(cc.CollectiveTimeout, match="barrier: no answer within 0.2 s"):
            first.wait(LIMIT)
        words = "barrier_async at .* not carried out, since barrier_async at .* failed: Collec"
        with pytest.raises(cc.CollectiveError, match=words):
            second.wait(LIMIT)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


class Held:
    """An array that a request can read only when a gate is open."""

    def __init__(self, gate):
        self.gate = gate

    def __array__(self, dtype=None, copy=None):
        assert self.gate.wait(LIMIT)
        return np.ones(2, dtype)


def test_a_callback_may_close_the_communicator(comm):
    part = comm.split(0)
    gate, closed, told = threading.Event(), threading.Event(), []

    def close(request):
        told.append(request.wait(0).tolist())
        part.close()
        told.append(later.wait(0))
        closed.set()

    request = part.allreduce_async(Held(gate), op=cc.SUM)
    request.add_done_callback(close)
    later = part.allreduce_async(1, op=cc.SUM)
    gate.set()
    assert closed.wait(LIMIT)
    assert told == [[comm.size] * 2, comm.size]
    with pytest.raises(cc.CollectiveError, match="not usable any more, since it was closed"):
        part.barrier()
    part.close()
    assert comm.allreduce(1, op=cc.SUM) == comm.size
