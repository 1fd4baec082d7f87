"""Train on when ranks die, with those that live, from the last commit.

    rank 0              rank 1          rank 2
    commit 7            commit 7        commit 7
    step 8              dies            step 8 ...
    PeerFailure                         PeerFailure         within 0.2 s on one node
    shrink                              shrink              a communicator of two
    go on from 7                        go on from 7        inputs dealt to two

An error of the program itself is never tried again: it would come again, and take one rank after
the other. The rank that has it takes the others out of their calls, and all raise it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import collectives as cc
from strategies import errors
from strategies.agreement import raise_everywhere
from strategies.checks import integer
from strategies.training import events
from strategies.training.state import State
from strategies.training.survivors import shrunk

__all__ = ["run_elastic"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class _TooFew(errors.UnavailableError):
    """Fewer ranks live than the program wants."""


def run_elastic(
    train: Callable[[State], T],
    state: State,
    *,
    min_ranks: int = 1,
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

    Args:
        train: what to do; begins where `state` is.
        state: what it goes on from.
        min_ranks: how few may go on.
        on_reset: called after ranks have died, when the state is that of the commit again.

    Returns:
        What `train` has returned; all ranks that live return together.

    Raises:
        UnavailableError: fewer ranks live than `min_ranks`; on all of them.
        Exception: an error of `train` that no death has caused, on all ranks; and what `go_on` of
            the state raises.

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
    began = None  # when the failure became known that is not overcome yet
    while True:
        error: Exception
        try:
            if began is not None or state.number < 0:
                _go_on(state, min_ranks, began)
                if began is not None and on_reset is not None:
                    on_reset()
                began = None
            result = train(state)
            if state.comm.agreed(True):
                events.write("end")
                return result
            error = cc.PeerFailure("run_elastic: a rank died before all had returned")
        except _TooFew:
            raise
        except Exception as caught:
            error = caught
        began = began or time.monotonic()
        _after(error, state)


def _after(error: Exception, state: State) -> None:
    """Make a communicator of those that live, if it was a death; else raise the error on all."""
    # Who is silent would not come to a meeting either.
    if not cc.is_fault_tolerant() or isinstance(error, cc.CollectiveTimeout):
        raise error
    own = None if _is_of_a_death(error, state.comm) else error
    events.write("failure" if own is None else "error", error=f"{type(error).__name__}: {error}")
    if own is not None:
        state.comm.give_up(f"train failed: {type(error).__name__}: {error}")
    comm = shrunk(state.comm)
    if comm.allreduce(int(own is not None), op=cc.MAX):
        raise_everywhere(own, comm, "train")
    state.comm = comm


def _go_on(state: State, min_ranks: int, began: float | None) -> None:
    """Commit what there is, or go back to the last commit."""
    comm = state.comm
    if comm.size < min_ranks:
        raise comm.raised_by_all(
            _TooFew(
                f"run_elastic: too few ranks live, expected at least {min_ranks}, got {comm.size}"
            )
        )
    if began is None:
        state.commit()
        return
    state.go_on(comm)
    seconds = time.monotonic() - began
    events.write("recovered", size=comm.size, commit=state.number, seconds=round(seconds, 6))
    if comm.rank == 0:
        log.warning("goes on with %d ranks from commit %d", comm.size, state.number)


def _is_of_a_death(error: BaseException | None, comm: cc.Communicator) -> bool:
    """Tell whether an error is, or comes from, that of a call that a dead rank was needed for."""
    later = isinstance(error, cc.CollectiveError) and not isinstance(error, cc.MismatchError)
    if later and "PeerFailure" in (comm.unusable or ""):
        return True
    while error is not None:
        if isinstance(error, cc.PeerFailure):
            return True
        error = error.__cause__ or error.__context__
    return False
