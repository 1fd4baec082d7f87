"""Elastic group: training ranks and spare ranks, until all are done.

::

    everyone   0  1  2  3  4        all that live
    state.comm 0  1  2  3           those that train, by their places; rank 4 waits

When some have died, those that live meet as a smaller `everyone`, spare ones too: in `shrink`. All
of them then say what they have, and each finds out by itself who trains
(`assignment.assign_roles`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import collectives as cc
from collectives import extend
from strategies import errors
from strategies.core.agreement import raise_everywhere
from strategies.elastic import event_log, preemption
from strategies.elastic.assignment import RankReport, assign_roles
from strategies.elastic.commit_buffers import DoubleBuffer
from strategies.elastic.elastic_state import State
from strategies.elastic.surviving_ranks import retry_on_survivors, shrink

__all__ = ["ElasticGroup", "TooFewRanksError"]

_log = logging.getLogger(__name__)

# Seconds that a rank which has left by `sys.exit(1)` waits for others to do the same: they do so
# after the same step, or not at all.
_FOLLOW_WITHIN = 1.0

T = TypeVar("T")


class TooFewRanksError(errors.UnavailableError):
    """Fewer ranks live than the program wants."""


class ElasticGroup:
    """All ranks that live, of which some train; its methods are *collective* over all.

    Args:
        state: of all ranks.
        fewest: how few may go on.
        most: how many train.

    Attributes:
        everyone: all that live.
        trains: whether this rank does.
        is_through: whether training has ended, and this rank knows that.
    """

    def __init__(self, state: State, fewest: int, most: int) -> None:
        self.everyone = state.comm
        self.trains, self.is_through = True, False
        self._state, self._fewest, self._most = state, fewest, most
        self._training = state.comm.size  # how many ranks
        self._freed: cc.Communicator | None = None  # soon: that of those that have trained
        self._has_begun = False  # all had the first commit, so that some may have trained
        self._leaving: SystemExit | None = None
        self._status: int | None = None

    @property
    def has_spares(self) -> bool:
        """Whether there are ranks that do not train."""
        return self._training < self.everyone.size

    def begin(self, failed_at: float | None = None) -> None:
        """Commit what there is, and let those train that may.

        Args:
            failed_at: when a death became known that has kept them from beginning before.

        Raises:
            LaunchError: a dead rank ends the job, so that spare ones are of no use; on all.
            UnavailableError: there are too few; on all.
        """
        state, comm = self._state, self.everyone
        state.for_others = comm.size > self._most
        if state.for_others and not cc.is_fault_tolerant():
            raise extend.collective_error(
                comm,
                cc.LaunchError(
                    f"run_elastic: spare ranks are of no use where a dead rank ends the job, "
                    f"expected Open MPI >= 5 started by `mpirun --with-ft ulfm`, or no more ranks "
                    f"than max_ranks, {self._most}, got {comm.size}"
                ),
            )
        self._check(comm.size)
        if state.for_others or state.number < 0:
            state.commit()
        if state.for_others or failed_at is not None:
            self._place(comm.allgather_object(self._report()), failed_at)
        self._has_begun = True

    def place(self, failed_at: float | None = None) -> None:
        """Find out who trains, and give them the state of the last commit; all when through.

        Args:
            failed_at: when the failure became known after which they go on.

        Raises:
            UnavailableError: there are too few; on all.
        """
        reports = self.everyone.allgather_object(self._report())
        if any(report.has_begun for report in reports):
            self._place(reports, failed_at)
            return
        # Nobody has trained: all things are as they were, and a commit that the program has made
        # before has not what spare ranks need.
        self._state.copies.rollback(max(report.number for report in reports))
        self._state.share_inputs()  # also the rows of dead ranks
        self.begin(failed_at)

    def _place(self, reports: Sequence[RankReport], failed_at: float | None) -> None:
        state, comm = self._state, self.everyone
        self._has_begun = True
        self.is_through = any(report.is_through for report in reports)
        self._status = next((r.status for r in reports if r.status is not None), None)
        if any(report.has_stopped for report in reports):
            preemption.accept_all()
        found = assign_roles(reports, comm.size if self.is_through else self._most)
        if found is None:
            raise extend.collective_error(
                comm,
                errors.UnavailableError(
                    f"run_elastic: no rank that lives has a commit, expected one to go on from, "
                    f"got {comm.size} without"
                ),
            )
        if not self.is_through:
            self._check(len(found.ranks))
        self._training = len(found.ranks)
        in_order = found.ranks == list(range(comm.size))
        part = comm if in_order else comm.group(found.ranks)
        self.trains = part is not None
        state.for_others = self.has_spares
        if part is None:
            state.copies = DoubleBuffer()
            event_log.write("spare")
            return
        if state.comm is not self.everyone:
            self._freed = state.comm
        state.resume(part, {found.ranks.index(rank): at for rank, at in found.admitted.items()})
        if self.is_through:
            return
        if comm.rank in found.admitted:
            event_log.write("admitted", place=part.rank, size=part.size, commit=state.number)
        elif failed_at is not None:
            seconds = round(time.monotonic() - failed_at, 6)
            event_log.write("recovered", size=part.size, commit=state.number, seconds=seconds)
        if failed_at is not None and part.rank == 0:
            _log.warning("goes on with %d ranks from commit %d", part.size, state.number)

    def release(self) -> None:
        """Close the group of those that have trained, of which nothing is needed any more."""
        freed, self._freed = self._freed, None
        if freed is not None:
            freed.close()

    def train(self, function: Callable[[State], T]) -> T | None:
        """Train; only where this rank does, together with those that do."""
        self._leaving = None
        try:
            result = function(self._state)
        except SystemExit as leaving:
            if not self.has_spares:
                raise
            self._leaving = leaving  # with the spare ranks
            return None
        if self.has_spares:
            self._state.commit()  # what they are given
        return result

    def meet(self) -> bool:
        """Wait until all that train are through; tell whether all ranks have the state of then.

        Raises:
            PeerFailure: ranks have died, or have left their training for that.
            RuntimeError: this rank has left by `sys.exit(1)` alone.
        """
        if self.trains:
            if not self._all_have_come():
                raise cc.PeerFailure("run_elastic: a rank died before all had returned")
            self.is_through = True
        if not self.has_spares:
            return True
        if not self.everyone.agree(True, timeout=None if self.is_through else math.inf):
            raise cc.PeerFailure("run_elastic: a rank died while this one was spare")
        self.is_through = True
        return False

    def leave(self) -> None:
        """Leave the program where those that have trained do."""
        if self._leaving is not None:
            raise self._leaving
        if self._status is not None:
            cc.exit_all(self._status)

    def next_attempt(self, error: Exception) -> None:
        """Go on without the dead, if it was a death; else raise the error on all."""
        # Who is silent would not come to a meeting either.
        if not cc.is_fault_tolerant() or isinstance(error, cc.CollectiveTimeout):
            raise error
        state = self._state
        own = None if self._is_of_a_death(error) else error
        what = f"{type(error).__name__}: {error}"
        event_log.write("failure" if own is None else "error", error=what)
        if own is not None or state.comm is not self.everyone:
            state.comm.revoke(f"train failed: {what}")
        if state.comm is not self.everyone:
            state.comm.close()
        failed = False

        def exchange(comm: cc.Communicator) -> None:
            nonlocal failed
            failed = bool(comm.allreduce(int(own is not None), op=cc.MAX))

        comm = retry_on_survivors(shrink(self.everyone), exchange)
        if failed:
            raise_everywhere(own, comm, "train")
        state.comm = self.everyone = comm

    def _all_have_come(self) -> bool:
        """Wait for those that train, to have returned or left; False where one has died."""
        comm, leaving = self._state.comm, self._leaving
        # `sys.exit` raises a class of its own. A rank in `cc.exit_all`, which all ranks call, or
        # in `raise SystemExit` is waited for like a rank that returns.
        fails = leaving is not None and type(leaving) is not SystemExit
        if leaving is None or not fails or leaving.code in (None, 0):
            return comm.agree(True)
        try:
            return comm.agree(True, timeout=_FOLLOW_WITHIN)
        except cc.CollectiveTimeout:
            here = extend.describe_ranks(comm, comm.rank)
            raise RuntimeError(
                f"run_elastic: {here} has left by sys.exit({leaving.code!r}) while "
                f"others train, expected all of them to leave"
            ) from leaving

    def _report(self) -> RankReport:
        state = self._state
        return RankReport(
            state.number,
            state.copies.places(),
            self.is_through,
            self._status if self._leaving is None else _status(self._leaving.code),
            preemption.is_accepted(),
            self._has_begun,
        )

    def _check(self, count: int) -> None:
        if count < self._fewest:
            raise extend.collective_error(
                self.everyone,
                TooFewRanksError(
                    f"run_elastic: too few ranks live, expected at least {self._fewest}, got "
                    f"{count}"
                ),
            )

    def _is_of_a_death(self, error: BaseException | None) -> bool:
        """Tell whether an error is that of a call that a dead rank was needed for."""
        failures = [self._state.comm.failure or "", self.everyone.failure or ""]
        later = isinstance(error, cc.CollectiveError) and not isinstance(error, cc.MismatchError)
        if later and any("PeerFailure" in why for why in failures):
            return True
        while error is not None:
            if isinstance(error, cc.PeerFailure):
                return True
            error = error.__cause__ or error.__context__
        return False


def _status(code: Any) -> int:
    """Return the status with which a program ends that leaves by `SystemExit(code)`."""
    return 0 if code is None else code if isinstance(code, int) else 1
