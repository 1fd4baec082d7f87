"""`run_elastic`: resumes from the last commit when ranks die.

    rank 0              rank 1          rank 2                              rank 3 (spare)
    commit 7            commit 7        commit 7                            sleeps
    step 8              dies            step 8 ...                          sleeps
    PeerFailure                         PeerFailure                         sleeps
    shrink                              shrink         all that live        shrink
    resume from 7                       resume from 7  of training ranks    receives commit 7

Errors of the program itself are never retried: they would repeat and fail one rank after the other.
A rank with such an error revokes the calls of the other ranks, and all ranks raise it.
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
    """Call `train(state)`, and after deaths again on the surviving ranks, from the last commit.

    It needs a job that outlives its ranks: Open MPI >= 5 with `mpirun --with-ft ulfm`. Otherwise
    the launcher ends the job when a rank dies; started again, it resumes from its last checkpoint.
    A rank that does not respond is not dead: other ranks raise `CollectiveTimeout`, and the job
    ends.

    *Collective* over the ranks of `state.comm`. `train` resumes from its own commits; the first
    commit is the initial state. `state.comm` changes after a death, so make everything that depends
    on a communicator (strategies, `DistributedOptimizer`, plans) in `train`.

    With `max_ranks`, further ranks are *spare* and wait almost without using the processor. When a
    training rank dies, a spare rank takes its place: it receives the commit with the generators and
    rows of the dead rank. `state.comm` then has the same size and order as before. Ranks that stay
    spare receive the final state and return together with the training ranks.

    Args:
        train: training function; resumes from the contents of `state`.
        state: the objects to commit and restore.
        min_ranks: minimum number of training ranks.
        max_ranks: maximum number of training ranks; None for all.
        on_reset: called when `state.comm` has changed and the state is restored.

    Returns:
        The result of `train`; None on a rank that stayed spare. All surviving ranks return
        together.

    Raises:
        UnavailableError: fewer ranks survive than `min_ranks`, or only spare ones; on all of them.
        LaunchError: there are more ranks than `max_ranks`, but a dead rank ends the job.
        SystemExit: `train` exits on all training ranks; also raised on spare ranks.
        RuntimeError: there are spare ranks, and one rank alone has called `sys.exit(1)`; on all.
        Exception: an error of `train` without a death, on all ranks; or an error of `State.resume`.

    Cost: with spare ranks, all-gathers of the generators at each commit, and a commit at the end.

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
    # The function that the next round starts with; after a failure it is `place`.
    prepare: Callable[[], None] = members.begin
    result = None
    known: cc.Communicator | None = state.comm  # used by `train`; None on a spare rank
    failed_at = None  # time of the failure that is not recovered yet
    while True:
        try:
            prepare()
            # Compared with the communicator of the last round, so the first round does not call
            # `on_reset`.
            comm, known = known, state.comm if members.trains else None
            if known is not comm and known is not None and on_reset is not None:
                on_reset()
            # Only now, because `on_reset` may close objects that still use the old communicator.
            members.release()
            failed_at = None  # recovered: the next failure begins another outage
            if members.trains and not members.is_through:
                result = members.train(train)
            if members.meet():
                break
            prepare = members.place  # gives all ranks, also spare ones, the final state
        except TooFewRanksError:
            raise  # on all ranks, because all compare the same numbers
        except Exception as error:
            # Keep the first time: a death during recovery prolongs the same outage.
            failed_at = failed_at or time.monotonic()
            members.next_attempt(error)
            prepare = partial(members.place, failed_at)
    event_log.write("end")
    # After all ranks have the final state, which some may have received from this rank.
    members.leave()
    return cast(T, result)
