"""Plans that the first call keeps and later ones run, by messages and in shared memory."""

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.communicator import group_of
from collectives.plans.message_calls import MessageCall
from collectives.plans.prepared_calls import NodeCall
from inprocess import on_ranks, world_settings

# Of each, whether it is found again; x is an array of the caller's, changed where it is the result.
CALLS = {
    "allreduce": lambda comm, x: comm.allreduce(x, op=cc.SUM),
    "in place": lambda comm, x: comm.allreduce(x, op=cc.MAX, out=x),
    "16 bits": lambda comm, x: comm.allreduce(x, op=cc.SUM, compression=cc.BF16),
    "ring": lambda comm, x: comm.allreduce(x, op=cc.SUM, algorithm="ring"),
    "reduce": lambda comm, x: comm.reduce(x, comm.size - 1, op=cc.SUM),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, op=cc.SUM),
    "broadcast": lambda comm, x: comm.broadcast(x, comm.size - 1),
    "broadcast in place": lambda comm, x: comm.broadcast(x, 0, out=x),
    "barrier": lambda comm, x: comm.barrier(),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [5, 5000])  # with the comparison, and after it
@pytest.mark.parametrize("name", CALLS)
def test_a_plan_that_is_found_gives_what_its_first_call_gave(name, count, shared):
    def check(comm):
        results = []
        for step in range(3):
            result = CALLS[name](comm, np.arange(count) * (comm.rank + 1.0))
            results.append(None if result is None else result.tobytes())
            if step == 0:
                made = dict(group_of(comm).plans)
        assert group_of(comm).plans == made  # the first call's, and no other
        (plan,) = made.values()
        assert type(plan) is (NodeCall if shared and name != "ring" else MessageCall)
        assert results == [results[0]] * 3

    inprocess.run_ranks(3, check, settings=world_settings(shared))


@on_ranks(3, settings=world_settings(False))
def test_ranks_that_find_a_plan_by_messages_meet_ranks_that_do_not(comm):
    x = np.full(7, comm.rank + 1.0)
    for step in range(4):
        own = np.repeat(x, 2)[::2] if step % 3 == comm.rank else x  # strided: not looked for
        assert comm.allreduce(own, op=cc.SUM).tolist() == [6.0] * 7
    with pytest.raises(cc.MismatchError, match="MAX on rank 1"):
        comm.allreduce(x, op=cc.MAX if comm.rank == 1 else cc.SUM)
    assert comm.allreduce(x, op=cc.SUM).tolist() == [6.0] * 7
