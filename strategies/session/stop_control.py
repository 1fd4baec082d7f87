"""Stop control: ranks agree on when to save, stop and exit.

::

    own wishes, a signal, the time that is left  ->  one exchange  ->  save, leave, no more steps
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

# Of the time that is left after a signal, this many steps and saves are kept for the last ones.
_SPARE_STEPS, _SPARE_SAVES = 6, 2


class _StepVotes(NamedTuple):
    """What one rank wants at the end of a step, or what any rank wants.

    Attributes:
        stop: the training is over.
        save: a checkpoint is due.
        asked: the batch system has asked the job to stop.
        leave: no time is left for another step.
        failed: a hook has raised an error.
    """

    stop: bool = False
    save: bool = False
    asked: bool = False
    leave: bool = False
    failed: bool = False


class StepActions(NamedTuple):
    """What is to be done after a step.

    Attributes:
        save: a checkpoint is to be written.
        leave: the batch system has asked, and there is no further step.
        stop: the training is over, whoever has asked.
    """

    save: bool = False
    leave: bool = False
    stop: bool = False


_NOTHING = StepActions()


class StopControl:
    """What this rank wants, and what all ranks in step have agreed on.

    Args:
        preemption: hears of signals; open.

    Attributes:
        stopping: whether there is no further step to be made.
        asked: whether any rank was asked by the batch system.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.stopping = self.asked = False
        self._stop_wanted = self._save_wanted = False
        self._preemption = preemption
        self._began = self._seconds_of_save = 0.0
        self._steps = 0

    def begin(self) -> None:
        """Count the time of the steps from here."""
        self._began = time.monotonic()

    def meet(self, ranks: ProcessGroup) -> None:
        """Agree with these ranks from now on; *collective*."""
        self._ranks = ranks
        self._agreed = _reduce_votes(ranks.comm)

    def request_stop(self) -> None:
        """Want no step after this one."""
        self._stop_wanted = True

    def request_save(self) -> None:
        """Want a checkpoint after this step."""
        self._save_wanted = True

    def saved(self, seconds: float) -> None:
        """Note how long a checkpoint has taken."""
        self._seconds_of_save = seconds

    def resolve(self, step: int, steps: int, failure: Exception | None = None) -> StepActions:
        """Agree on what is to be done after a step, *collective*.

        Args:
            step: which one.
            steps: how many were made since `begin`.
            failure: what a hook has raised on this rank.

        Raises:
            MismatchError: a rank has not come to the end of the step.
            Exception: the failure, on all ranks.
        """
        self._steps = steps
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
            self._ranks.agree("run", failure or mismatch)
            raise
        if wanted.failed:
            self._ranks.agree("run", failure)
        if not any(wanted):
            return _NOTHING
        self._stop_wanted = self._save_wanted = False
        first = wanted.asked and not self.asked
        if first:
            self._preemption.poll()  # after a death, too, also if it was the rank with the signal
            event_log.write("asked", step=step)
        leave = wanted.leave or (first and self._preemption.grace_seconds is None)
        self.asked = wanted.asked
        self.stopping |= wanted.stop or leave
        return StepActions(wanted.save or first or leave, leave, wanted.stop)

    def finished(self, step: int) -> None:
        """Say that the session stops because it was asked to, with a checkpoint to go on from."""
        _log.info("asked to stop: leaving after step %d", step)
        event_log.write("left", step=step)
        self._preemption.acknowledge()

    def _out_of_time(self) -> bool:
        """Whether the time after a signal ends so soon that no further step should begin."""
        grace, asked_at = self._preemption.grace_seconds, self._preemption.asked_at
        if grace is None or asked_at is None:
            return False
        now = time.monotonic()
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
    # No other exchange of these ranks has five elements, so that a rank in another call raises.
    buffer = np.zeros(len(_StepVotes._fields), np.int64)
    allreduce: Any = comm.plan_allreduce(buffer, op=cc.MAX)

    def reduced(votes: _StepVotes) -> _StepVotes:
        buffer[:] = votes
        allreduce()
        return _StepVotes._make(buffer.astype(bool).tolist())

    return reduced
