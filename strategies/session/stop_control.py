"""Stop control: ranks agree on when to save, stop and exit.

::

    own requests, a signal, the time left  ->  one exchange  ->  save, leave, no more steps
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies.core.process_group import ProcessGroup
from strategies.elastic import event_log
from strategies.elastic.preemption import Preemption
from strategies.session.session_state import SessionState

__all__ = ["StopControl"]

_log = logging.getLogger(__name__)

# Number of mean step and save times to reserve before the end of the grace period.
_SPARE_STEPS, _SPARE_SAVES = 6, 2


class _StepVotes(NamedTuple):
    """Requests of one rank at the end of a step, or their logical or over the ranks.

    Attributes:
        stop: the training is over.
        save: a checkpoint is due.
        asked: the batch system has asked the job to stop.
        leave: there is no time for another step.
        failed: a hook has raised an error.
    """

    stop: bool = False
    save: bool = False
    asked: bool = False
    leave: bool = False
    failed: bool = False


class StopControl:
    """The requests of this rank, and the decisions of all ranks in step.

    Args:
        preemption: open receiver of stop signals.

    Attributes:
        stopping: whether there is no further step.
        asked: whether the batch system has asked any rank to stop.
        steps: number of steps since the session was opened.
        seconds_of_save: time that the last checkpoint took.
        is_open: whether the session was opened.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.stopping = self.asked = self.is_open = False
        self._stop_wanted = self._save_wanted = False
        self._preemption = preemption
        self._began = self.seconds_of_save = 0.0
        self.steps = 0

    def meet(self, ranks: ProcessGroup) -> None:
        """Decide together with these ranks from now on; *collective*."""
        if not self.is_open:
            self.is_open, self._began = True, time.monotonic()
        self._ranks = ranks
        # Planned once: the exchange runs in every step.
        self._agreed = _reduce_votes(ranks.comm)

    def close(self) -> None:
        """Allow no further step."""
        self.stopping = True

    def request_stop(self) -> None:
        """Request that this step is the last."""
        self._stop_wanted = True

    def request_save(self) -> None:
        """Request a checkpoint after this step."""
        self._save_wanted = True

    def settle(
        self,
        kept: SessionState,
        save: Callable[[], None],
        failure: Exception | None = None,
    ) -> None:
        """Agree on the actions after a step, and run them; *collective*.

        Args:
            kept: the state after the step, which is committed before leaving.
            save: writes a checkpoint.
            failure: error of a hook on this rank.

        Raises:
            MismatchError: a rank has not reached the end of the step.
            Exception: the failure, on all ranks.
        """
        step = kept.step
        # Read once: a signal may arrive between two uses.
        asked = self._preemption.asked
        own = _StepVotes(
            self._stop_wanted,
            self._save_wanted,
            asked,
            asked and self._out_of_time(),
            failure is not None,
        )
        try:
            wanted = self._agreed(own)
        except cc.MismatchError as mismatch:
            # The other rank is in `raise_together` with an error; this call receives that error.
            self._ranks.agree("run", failure or mismatch)
            raise
        if wanted.failed:
            # Raises: on this rank its own error, or a copy of another rank's.
            self._ranks.agree("run", failure)
        if not any(wanted):
            return
        # The actions below serve the requests of all ranks.
        self._stop_wanted = self._save_wanted = False
        first = wanted.asked and not self.asked
        if first:
            self._preemption.poll()  # remember it here: the rank with the signal may die
            event_log.write("asked", step=step)
        # Without a grace period the session leaves at the first exchange that carries the signal.
        leave = wanted.leave or (first and self._preemption.grace_seconds is None)
        self.asked = wanted.asked
        self.stopping |= wanted.stop or leave
        if leave:
            # Commit before saving: if a rank dies during the save, this step is not lost.
            kept.commit()
        # With a grace period, saved now and again on leaving.
        if (wanted.save or first or leave) and kept.needs_save(is_last=leave):
            save()
        if leave and not wanted.stop:
            # A training that is over anyway ends without status 85, which would requeue the job.
            _log.info("asked to stop: leaving after step %d", step)
            event_log.write("left", step=step)
            self._preemption.acknowledge()

    def _out_of_time(self) -> bool:
        """Return whether too little of the grace period is left for another step."""
        grace, asked_at = self._preemption.grace_seconds, self._preemption.asked_at
        if grace is None or asked_at is None:
            return False
        now = time.monotonic()
        # Includes saves and hooks, which take time before the next step as well.
        mean = (now - self._began) / max(1, self.steps)
        spare = _SPARE_STEPS * mean + _SPARE_SAVES * self.seconds_of_save
        return now > asked_at + grace - spare


def _reduce_votes(comm: cc.Communicator | None) -> Callable[[_StepVotes], _StepVotes]:
    """Return a function that reduces the votes of all ranks by logical or; *collective*.

    Cost per call: a planned all-reduce of 40 bytes, about 1 us on one node when all ranks have
        arrived; nothing for one rank. A step exchanges nothing else.
    """
    if comm is None or comm.size == 1:
        return lambda votes: votes
    # No other call of these ranks has five elements, so a rank in another call raises.
    buffer = np.zeros(len(_StepVotes._fields), np.int64)
    allreduce: Any = comm.plan_allreduce(buffer, op=cc.MAX)

    def reduced(votes: _StepVotes) -> _StepVotes:
        # The plan is bound to this memory.
        buffer[:] = votes
        allreduce()
        return _StepVotes._make(buffer.astype(bool).tolist())

    return reduced
