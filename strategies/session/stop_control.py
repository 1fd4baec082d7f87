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

__all__ = ["StepActions", "StopControl"]

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


class StepActions(NamedTuple):
    """Actions after a step.

    Attributes:
        save: write a checkpoint.
        leave: exit because the batch system asked; no further step.
        stop: the training is over, for any reason.
    """

    save: bool = False
    leave: bool = False
    stop: bool = False


# One object for the usual case, because this runs in every step.
_NOTHING = StepActions()


class StopControl:
    """The requests of this rank, and the decisions of all ranks in step.

    Args:
        preemption: open receiver of stop signals.

    Attributes:
        stopping: whether there is no further step.
        asked: whether the batch system has asked any rank to stop.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.stopping = self.asked = False
        self._stop_wanted = self._save_wanted = False
        self._preemption = preemption
        self._began = self._seconds_of_save = 0.0
        self._steps = 0

    def begin(self) -> None:
        """Start to measure the time of the steps."""
        self._began = time.monotonic()

    def meet(self, ranks: ProcessGroup) -> None:
        """Decide together with these ranks from now on; *collective*."""
        self._ranks = ranks
        # Planned once: the exchange runs in every step.
        self._agreed = _reduce_votes(ranks.comm)

    def request_stop(self) -> None:
        """Request that this step is the last."""
        self._stop_wanted = True

    def request_save(self) -> None:
        """Request a checkpoint after this step."""
        self._save_wanted = True

    def saved(self, seconds: float) -> None:
        """Record how long a checkpoint took."""
        self._seconds_of_save = seconds

    def resolve(self, step: int, steps: int, failure: Exception | None = None) -> StepActions:
        """Agree on the actions after a step, *collective*.

        Args:
            step: number of the step.
            steps: number of steps since `begin`.
            failure: error of a hook on this rank.

        Raises:
            MismatchError: a rank has not reached the end of the step.
            Exception: the failure, on all ranks.
        """
        self._steps = steps
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
            return _NOTHING
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
        # With a grace period, saved now and again on leaving.
        return StepActions(wanted.save or first or leave, leave, wanted.stop)

    def finished(self, step: int) -> None:
        """Log and acknowledge the stop that the batch system asked for."""
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
        mean = (now - self._began) / max(1, self._steps)
        spare = _SPARE_STEPS * mean + _SPARE_SAVES * self._seconds_of_save
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
