"""`run_elastic`: resumes from the last commit when ranks die.

    rank 0              rank 1          rank 2                              rank 3 (spare)
    commit 7            commit 7        commit 7                            sleeps
    step 8              dies            step 8 ...                          sleeps
    PeerFailure                         PeerFailure                         sleeps
    shrink                              shrink         all that live        shrink
    go on from 7                        go on from 7   of as many ranks     is given commit 7

An error of the program itself is never tried again: it would come again, and take one rank after
the other. The rank that has it takes the others out of their calls, and all raise it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

import collectives as cc
from strategies.core.validation import integer
from strategies.elastic import event_log
from strategies.elastic.elastic_group import ElasticGroup, TooFewRanksError
from strategies.elastic.elastic_state import State

__all__ = ["run_elastic"]

T = TypeVar("T")


def run_elastic(
    train: Callable[[State], T],
    state: State,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    on_reset: Callable[[], object] | None = None,
) -> T:
    """Call `train(state)`; when ranks have died, again, by those that live, from the last commit.

    In a job that outlives its ranks: Open MPI >= 5 under `mpirun --with-ft ulfm`. In any other the
    launcher ends the job when a rank dies: it is started again, and goes on from its last
    checkpoint. A rank that stands still is not dead: the others get a `CollectiveTimeout`, and the
    job ends.

    *Collective* over the ranks of `state.comm`. Commits of `train` are what is gone on from, at
    first the state as it is. What is made of a communicator (strategies, `DistributedOptimizer`,
    plans) is made in `train` of `state.comm`, which is another one then.

    With `max_ranks` the ranks above it are *spare*. They wait, nearly without a processor; when one
    that trains has died, the next one is given what was committed, with the generators and the rows
    of the dead rank, and trains in its place: `state.comm` has as many ranks as before, in the same
    order. Ranks that were spare to the end are given the state of then, and return with the others.

    Args:
        train: what to do; begins where `state` is.
        state: what it goes on from.
        min_ranks: how few may go on.
        max_ranks: how many train; all if None.
        on_reset: called when `state.comm` has become another one, and the state is that of the
            commit again.

    Returns:
        What `train` has returned; None on a rank that was spare to the end. All ranks that live
        return together.

    Raises:
        UnavailableError: fewer ranks live than `min_ranks`, or spare ones alone; on all of them.
        LaunchError: there are more ranks than `max_ranks` where a dead rank ends the job.
        SystemExit: `train` leaves the program on all ranks that train; on spare ones, too.
        RuntimeError: beside spare ranks, a rank has left by `sys.exit(1)` alone; on all.
        Exception: an error of `train` that no death has caused, on all ranks; and what `resume` of
            the state raises.

    Cost: where there are spare ranks, all-gathers of the generators at each commit, and a commit at
        the end.

    Example:
        >>> import numpy as np
        >>> weights = np.zeros(3)
        >>> def train(state):
        ...     for step in range(state["step"], 5):
        ...         gradient = state.comm.allreduce(np.ones(3))
        ...         weights[:] -= 0.1 * gradient
        ...         state.commit(step=step + 1)
        ...     return state["step"]
        >>> run_elastic(train, State(weights=weights, step=0))
        5
    """
    integer("run_elastic", "min_ranks", min_ranks)
    most = state.comm.size
    if max_ranks is not None:
        most = integer("run_elastic", "max_ranks", max_ranks, least=min_ranks)
    members = ElasticGroup(state, min_ranks, most)
    prepare: Callable[[], None] = members.begin
    result = None
    known: cc.Communicator | None = state.comm  # that `train` works with; None on a spare rank
    failed_at = None  # when the failure became known that is not overcome yet
    while True:
        try:
            prepare()
            comm, known = known, state.comm if members.trains else None
            if known is not comm and known is not None and on_reset is not None:
                on_reset()
            members.release()
            failed_at = None
            if members.trains and not members.is_through:
                result = members.train(train)
            if members.meet():
                break
            prepare = members.place  # all of them
        except TooFewRanksError:
            raise
        except Exception as error:
            failed_at = failed_at or time.monotonic()
            members.next_attempt(error)
            prepare = partial(members.place, failed_at)
    event_log.write("end")
    members.leave()
    return cast(T, result)
