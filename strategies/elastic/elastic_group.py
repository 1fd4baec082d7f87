"""Elastic group: training ranks and spare ranks, until training ends.

::

    everyone   0  1  2  3  4        all surviving ranks
    state.comm 0  1  2  3           training ranks by their places; rank 4 waits

After a death, the surviving ranks, also spare ones, form a smaller `everyone` in `shrink`. Then all
ranks exchange reports, and each computes the same assignment from them (`assignment.assign_roles`).
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

# Seconds that a rank in `sys.exit(1)` waits for the other ranks to exit. Ranks that exit together
# do so after the same step.
_FOLLOW_WITHIN = 1.0

T = TypeVar("T")


class TooFewRanksError(errors.UnavailableError):
    """Fewer ranks survive than the program requires."""


class ElasticGroup:
    """All surviving ranks, some of which train; methods are *collective* over all of them.

    Args:
        state: state of all ranks.
        fewest: minimum number of training ranks.
        most: maximum number of training ranks.

    Attributes:
        everyone: communicator of all surviving ranks.
        trains: whether this rank trains.
        is_through: whether this rank knows that training has ended.
    """

    def __init__(self, state: State, fewest: int, most: int) -> None:
        self.everyone = state.comm
        self.trains, self.is_through = True, False
        self._state, self._fewest, self._most = state, fewest, most
        self._training = state.comm.size  # number of training ranks
        self._freed: cc.Communicator | None = None  # former training ranks, closed by `release`
        self._has_begun = False  # whether all had the first commit, so that some may have trained
        self._leaving: SystemExit | None = None
        self._status: int | None = None

    @property
    def has_spares(self) -> bool:
        """Whether there are spare ranks."""
        return self._training < self.everyone.size

    def begin(self, failed_at: float | None = None) -> None:
        """Make the first commit, and choose the training ranks.

        Args:
            failed_at: time of the failure that interrupted an earlier start; None for the first.

        Raises:
            LaunchError: a dead rank ends the job, so that spare ranks have no purpose; on all.
            UnavailableError: too few ranks survive; on all.
        """
        state, comm = self._state, self.everyone
        # Before the commit: it decides whether the commit contains the generators of all ranks.
        state.for_others = comm.size > self._most
        if state.for_others and not cc.is_fault_tolerant():
            raise extend.collective_error(
                comm,
                # All ranks compare the same numbers, so all raise, and one prints the traceback.
                cc.LaunchError(
                    f"run_elastic: spare ranks need a job that survives a dead rank, "
                    f"expected Open MPI >= 5 started by `mpirun --with-ft ulfm`, or no more ranks "
                    f"than max_ranks, {self._most}, got {comm.size}"
                ),
            )
        self._check(comm.size)
        # With spare ranks commit again: an earlier commit lacks the generators of other ranks.
        if state.for_others or state.number < 0:
            state.commit()
        # A first start without spare ranks needs no exchange: every rank keeps its place.
        if state.for_others or failed_at is not None:
            self._place(comm.allgather_object(self._report()), failed_at)
        self._has_begun = True

    def place(self, failed_at: float | None = None) -> None:
        """Choose the training ranks and restore the last commit on them; on all at the end.

        Args:
            failed_at: time of the failure to recover from; None at the end of training.

        Raises:
            UnavailableError: too few ranks survive; on all.
        """
        # The only exchange: from here on every rank computes the same from the same reports.
        reports = self.everyone.allgather_object(self._report())
        if any(report.has_begun for report in reports):
            self._place(reports, failed_at)
            return
        # No rank has trained, so all objects are unchanged. Commit again, because a commit that the
        # program made before `run_elastic` lacks the generators that spare ranks need.
        # All ranks return to one number first, so that they number the next commit alike.
        self._state.copies.rollback(max(report.number for report in reports))
        self._state.share_inputs()  # includes the rows of dead ranks
        self.begin(failed_at)

    def _place(self, reports: Sequence[RankReport], failed_at: float | None) -> None:
        state, comm = self._state, self.everyone
        self._has_begun = True
        # If a rank dies after the end of training, spare ranks learn of that end here.
        self.is_through = any(report.is_through for report in reports)
        self._status = next((r.status for r in reports if r.status is not None), None)
        # A spare rank has no session that could stop, and must exit with the same status.
        if any(report.has_stopped for report in reports):
            preemption.accept_all()
        # At the end all ranks get a place, so that spare ranks receive the final state.
        found = assign_roles(reports, comm.size if self.is_through else self._most)
        if found is None:
            raise extend.collective_error(
                comm,
                errors.UnavailableError(
                    f"run_elastic: no surviving rank has a commit, expected one to resume from, "
                    f"got {comm.size} without"
                ),
            )
        if not self.is_through:
            self._check(len(found.ranks))
        self._training = len(found.ranks)
        # Without a change of order no communicator is made, which would be another collective call.
        in_order = found.ranks == list(range(comm.size))
        part = comm if in_order else comm.group(found.ranks)
        self.trains = part is not None
        state.for_others = self.has_spares
        # `group` returns None on ranks that are not listed, the spare ones.
        if part is None:
            # A spare rank receives the commit when it is admitted; free the memory until then.
            state.copies = DoubleBuffer()
            event_log.write("spare")
            return
        if state.comm is not self.everyone:
            # `release` closes it after `on_reset`, which may still use it.
            self._freed = state.comm
        # Keys are ranks in `part`, which orders its ranks by place.
        state.resume(part, {found.ranks.index(rank): at for rank, at in found.admitted.items()})
        if self.is_through:
            return
        if comm.rank in found.admitted:
            event_log.write("admitted", place=part.rank, size=part.size, commit=state.number)
        elif failed_at is not None:
            seconds = round(time.monotonic() - failed_at, 6)
            event_log.write("recovered", size=part.size, commit=state.number, seconds=seconds)
        if failed_at is not None and part.rank == 0:
            _log.warning("resuming with %d ranks from commit %d", part.size, state.number)

    def release(self) -> None:
        """Close the communicator of the former training ranks, when it is no longer needed."""
        # Forgotten first, so that a failure in `close` is not repeated by the next attempt.
        freed, self._freed = self._freed, None
        if freed is not None:
            freed.close()

    def train(self, function: Callable[[State], T]) -> T | None:
        """Call the training function; only on training ranks."""
        self._leaving = None
        try:
            result = function(self._state)
        except SystemExit as leaving:
            if not self.has_spares:
                raise  # `abort_hook` then handles it like any other exit
            self._leaving = leaving  # raised in `leave`, together with the spare ranks
            return None
        if self.has_spares:
            self._state.commit()  # for the spare ranks
        return result

    def meet(self) -> bool:
        """Wait for the end of training; return whether all ranks have the final state.

        Raises:
            PeerFailure: ranks have died, or have left their training because of it.
            RuntimeError: this rank alone has called `sys.exit(1)`.
        """
        if self.trains:
            if not self._all_have_come():
                raise cc.PeerFailure("run_elastic: a rank died before all had returned")
            self.is_through = True
        if not self.has_spares:
            return True
        # A spare rank waits here for the whole training, so it has no timeout.
        if not self.everyone.agree(True, timeout=None if self.is_through else math.inf):
            raise cc.PeerFailure("run_elastic: a rank died while this one was spare")
        self.is_through = True
        return False

    def leave(self) -> None:
        """Exit if the training function did."""
        if self._leaving is not None:
            # The exception itself, not only its status: `abort_hook` distinguishes `sys.exit` from
            # `exit_all` by its class.
            raise self._leaving
        if self._status is not None:
            cc.exit_all(self._status)

    def next_attempt(self, error: Exception) -> None:
        """Continue on the surviving ranks if the error is a death; else raise it on all."""
        # A rank that does not respond would not take part in `shrink` either.
        if not cc.is_fault_tolerant() or isinstance(error, cc.CollectiveTimeout):
            raise error
        state = self._state
        # Decided before the revoke, which sets the `failure` of the communicator.
        own = None if self._is_of_a_death(error) else error
        what = f"{type(error).__name__}: {error}"
        event_log.write("failure" if own is None else "error", error=what)
        # Revoke, so that ranks in calls on this communicator fail and also arrive in `shrink`.
        if own is not None or state.comm is not self.everyone:
            state.comm.revoke(f"train failed: {what}")
        if state.comm is not self.everyone:
            state.comm.close()
        before = self.everyone
        reports: list[tuple[int, bool]] = []

        def exchange(comm: cc.Communicator) -> None:
            reports[:] = comm.allgather_object((before.rank, own is not None))

        # An error of the program on any rank ends the job, so the survivors exchange it first.
        # Another rank may die during the exchange, so it is repeated until all survivors have
        # completed it.
        comm = retry_on_survivors(shrink(before), exchange)
        if any(failed for _, failed in reports):
            raise_everywhere(own, comm, "train")
        if comm.rank == 0 and (dead := set(range(before.size)) - {rank for rank, _ in reports}):
            _log.warning(
                "%s died: %d of %d survive",
                extend.describe_ranks(before, *sorted(dead)),
                comm.size,
                before.size,
            )
        # The places are unknown until the next `_place`, so all survivors share one communicator.
        state.comm = self.everyone = comm

    def _all_have_come(self) -> bool:
        """Wait until the training ranks have returned or exited; return False if one has died."""
        comm, leaving = self._state.comm, self._leaving
        # `sys.exit` raises a subclass of SystemExit (`abort_hook`). A rank in `cc.exit_all`,
        # which all ranks call, or in `raise SystemExit` is waited for like one that returns.
        fails = leaving is not None and type(leaving) is not SystemExit
        if leaving is None or not fails or leaving.code in (None, 0):
            return comm.agree(True)
        try:
            # A short limit, because the other ranks may never return: a failed exit must not wait
            # for their training.
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
            # Spare ranks repeat the status that they have learned from the last reports.
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
        """Return whether an error was caused by the death of a rank."""
        failures = [self._state.comm.failure or "", self.everyone.failure or ""]
        # After a death, later calls on the communicator fail with other errors. A `MismatchError`
        # is an error of the program even then.
        later = isinstance(error, cc.CollectiveError) and not isinstance(error, cc.MismatchError)
        if later and any("PeerFailure" in why for why in failures):
            return True
        while error is not None:
            if isinstance(error, cc.PeerFailure):
                return True
            # A framework may wrap the failure in an error of its own.
            error = error.__cause__ or error.__context__
        return False


def _status(code: Any) -> int:
    """Return the exit status of `SystemExit(code)`."""
    return 0 if code is None else code if isinstance(code, int) else 1
