"""State of a session: checkpoints by all ranks or the chief, and in-memory commits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import collectives as cc
from strategies import errors
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.saver import Saver
from strategies.checkpoint.storage import Location
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import integer
from strategies.elastic import event_log
from strategies.elastic.elastic_state import State
from strategies.elastic.surviving_ranks import retry_on_survivors

__all__ = ["SessionState"]

_log = logging.getLogger(__name__)


class SessionState:
    """The objects of a saver and an in-memory state, and their replacements since the last save.

    Args:
        saver: saver of all ranks; if its manager has no ranks, the chief's is used. None saves
            nothing.
        state: state that ranks resume from after a death, or None.
        comm: the ranks; by default the ranks of the saver's checkpoints, or of the state.
        in_step: whether the ranks train in step.
        commit_steps: number of steps between two commits.
        restore: whether `begin` restores the newest checkpoint.
        metric: name of the value that rates a checkpoint, or None.
        recover: see `TrainingSession`.

    Raises:
        TypeError: `saver` is not a Saver.
        ValueError: ranks that are not in step share a manager; or the state belongs to other ranks
            or has no `step`.

    Attributes:
        everyone: the ranks of the session, which synchronize at the start and the end.
        step: number of steps done.
        ranks: the ranks that synchronize in every step: `everyone`, or this rank alone.
        saved_step: step of the last checkpoint; -1 if the current state is not in a file yet.
    """

    def __init__(
        self,
        saver: Saver | None,
        state: State | None,
        comm: cc.Communicator | None,
        *,
        in_step: bool,
        commit_steps: int,
        restore: bool,
        metric: str | None,
        recover: Callable[[Exception], Saver | None] | None,
    ) -> None:
        if saver is not None and not hasattr(saver, "checkpoints"):
            raise TypeError(f"TrainingSession: expected a Saver or None, got {saver!r}")
        # Saving together is collective, and these ranks reach their steps at different times.
        if saver is not None and saver.checkpoints.comm is not None and not in_step:
            raise ValueError(
                "TrainingSession: ranks that are not in step cannot save together, expected a "
                "CheckpointManager without ranks, got one with a communicator"
            )
        self._state, self.in_step, self._recover = state, in_step, recover
        self._commit_steps = integer("TrainingSession", "commit_steps", commit_steps)
        self._restores, self._metric = restore, metric
        self.step, self.saved_step = 0, -1
        self._committed_step = 0
        self._meet(saver, comm)

    def _meet(self, saver: Saver | None, comm: cc.Communicator | None) -> None:
        state = self._state
        if comm is None and saver is not None:
            comm = saver.checkpoints.comm
        if state is not None:
            comm = state.comm if comm is None else comm
            if comm is not state.comm or not self.in_step or "step" not in state:
                raise ValueError(
                    "TrainingSession: expected a state of the ranks that train in step that "
                    "contains step, such as State(comm, step=0, model=model), and a "
                    "CheckpointManager(directory, state.comm), got other ranks or no step"
                )
        self._unsaved: dict[str, Any] = {}
        self._uncommitted: dict[str, Any] = {}
        self._on_its_way = -1  # step of the checkpoint in the background
        self._saver = saver
        self._together = saver is not None and saver.checkpoints.comm is not None
        self.everyone = ProcessGroup(comm)
        self.ranks = self.everyone if self.in_step else ProcessGroup()

    def __getitem__(self, name: str) -> Any:
        """Return an object, as last passed to `update` or restored."""
        # Newest first: objects that `update` has replaced since the last save or commit.
        for things in (self._unsaved, self._uncommitted):
            if name in things:
                return things[name]
        if self._saver is not None and (self._state is None or name in self._saver):
            return self._saver[name]
        if self._state is None:
            raise KeyError(name)
        return self._state[name]

    def update(self, things: Mapping[str, Any]) -> None:
        """Replace objects by new ones."""
        state, saver = self._state, self._saver
        if state is None:
            self._unsaved |= things
            return
        # A name may belong to the state, to the saver or to both; each keeps it until its own next
        # copy.
        committed = {name: thing for name, thing in things.items() if name in state}
        self._uncommitted |= committed
        self._unsaved |= {
            name: thing
            for name, thing in things.items()
            if name not in committed or (saver is not None and name in saver)
        }

    def arrays(self) -> Iterator[Any]:
        """Yield the arrays of all objects, without copies."""
        keeper = self._saver or self._state
        if keeper is not None:
            yield from keeper.arrays()

    def begin(self) -> bool:
        """Restore the last commit if there is one, or else a checkpoint; *collective*.

        Returns:
            Whether there is a commit or checkpoint.
        """
        state = self._state
        # A commit of step 0 was made before any step, so no checkpoint is older.
        if state is not None and state.number >= 0 and state["step"] > 0:
            self._take_from_state()
            step, is_in_file = int(state["step"]), False
            if self._saver is not None:
                # An earlier session may have saved this step; ranks admitted since do not know it.
                own = state.in_files.get(str(self._saver.checkpoints.directory), -1)
                is_in_file = state.comm.allreduce(own, op=cc.MAX) == step
            self._back_at(step, is_in_file=is_in_file)
            return True
        found = self._restore() if self._restores else None
        if state is not None and (found is not None or state.number < 0):
            if self._saver is not None and found is not None:
                # The saver may have replaced objects, which the state must then commit.
                self._uncommitted |= {name: self._saver[name] for name in self._common()}
            # A death before the next commit returns to this step.
            self._commit(found or 0)
        if found is not None:
            self._back_at(found, from_file=True)
        return found is not None

    def go_back(self, error: Exception) -> None:
        """Return to the last commit, or without a state to the newest checkpoint; *collective*.

        Args:
            error: error of the step that has failed.

        Raises:
            FailedPreconditionError: an object is a pipeline, which cannot return.
            Exception: the error, because there is no checkpoint.
        """
        _log.warning("step %d has failed, going back: %s", self.step, error)
        event_log.write("retried", step=self.step, error=f"{type(error).__name__}: {error}")
        saver = None if self._recover is None else self._recover(error)
        if saver is not None:
            # The ranks may have changed, so all agreements need the new communicator.
            self._meet(saver, saver.checkpoints.comm)
        # Replacements of the failed step must not outlive it.
        self._discard()
        if self._state is not None:
            self._state.restore()
            self._take_from_state()
            self._back_at(int(self._state["step"]))
        elif (found := self._restore()) is not None:
            self._back_at(found, from_file=True)
        else:
            # No checkpoint exists yet, so the error is final.
            raise error

    def _back_at(self, step: int, *, from_file: bool = False, is_in_file: bool = False) -> None:
        # After a checkpoint the state was committed as well; see `begin`.
        self.step = self._committed_step = step
        self.saved_step = step if from_file or is_in_file else -1
        event_log.write("restored", step=step, file=from_file)

    def commit(self) -> None:
        """Commit the steps since the last commit, if there are any; *collective*."""
        if self._state is not None and self.step != self._committed_step:
            self._commit(self.step)

    def commit_if_due(self) -> None:
        """Commit if there were `commit_steps` steps since the last commit; *collective*."""
        if self.step - self._committed_step >= self._commit_steps:
            self.commit()

    def _commit(self, step: int) -> None:
        assert self._state is not None
        self._state.commit(**{**self._uncommitted, "step": step})
        # Only after the commit: if it fails, the next one needs them again.
        self._uncommitted.clear()
        self._committed_step = step

    def needs_save(self, *, is_last: bool) -> bool:
        """Return whether a checkpoint after this step would be new."""
        # If not in step, other ranks may have changed the variables since this rank saved. The
        # last checkpoint is then written at the end, when all have stopped.
        return self.step != self.saved_step if self.in_step else not is_last

    def save(self, values: Mapping[str, Any], after_save: Callable[[Location], None]) -> float:
        """Write a checkpoint, *collective* among `ranks`; return the seconds that it took.

        Args:
            values: values of the last step.
            after_save: called on the chief with the directory.
        """
        began, step = time.monotonic(), self.step
        metric = None if self._metric is None else values.get(self._metric)
        saver, new, path = self._saver, self._unsaved, None
        if saver is not None:
            path = self.ranks.raise_together(
                "save", lambda: saver.save(step, metric=metric, **new) if self._writes else None
            )
            self._unsaved.clear()
            self._on_its_way = step
            if not saver.checkpoints.in_background:
                # A checkpoint in the background counts only when it is complete, in `wait`.
                self._note_file()
        written = path if self.everyone.rank == 0 else None
        # Only the chief calls hooks here, so its error must reach the other ranks.
        self.ranks.run_then_agree(
            "save: hooks", lambda: None if written is None else after_save(written)
        )
        self.saved_step = step
        # Includes the hooks: the grace period of a preemption must suffice for both.
        seconds = time.monotonic() - began
        if path is not None:
            event_log.write("saved", step=step, seconds=round(seconds, 6))
        return seconds

    def wait(self) -> None:
        """Wait for the checkpoint in the background."""
        if self._saver is not None and self._writes:
            self._saver.checkpoints.wait()
            self._note_file()

    def _note_file(self) -> None:
        """Record the complete checkpoint in the state."""
        if self._state is not None and self._saver is not None:
            self._state.in_files[str(self._saver.checkpoints.directory)] = self._on_its_way

    def _common(self) -> list[str]:
        """Return the names that saver and state share."""
        saver, state = self._saver, self._state
        if saver is None or state is None:
            return []
        return [name for name in state if name in saver]

    def _take_from_state(self) -> None:
        """Pass the state's objects to the saver, because restoring may have replaced them."""
        assert self._state is not None
        self._unsaved |= {name: self._state[name] for name in self._common()}

    def _discard(self) -> None:
        for name, thing in self._unsaved.items():
            # Its threads have read ahead, and rows in its buffers would be lost.
            if kinds.protocol_of(thing) is kinds.KINDS["pipeline"]:
                raise errors.FailedPreconditionError(
                    f"recover: a pipeline cannot return to an earlier batch, start the program "
                    f"again to resume from the last checkpoint (name: {name})"
                )
        self._unsaved.clear()
        self._uncommitted.clear()

    def _restore(self) -> int | None:
        """Restore the newest checkpoint, *collective*; return its step, or None without one."""
        saver = self._saver
        if saver is None or self._together:
            return None if saver is None else saver.restore()
        step = self.everyone.run_then_agree(
            "restore", lambda: saver.restore() if self._writes else None
        )
        comm = self.everyone.comm
        # Only the chief has read the file; the other ranks learn its step.
        return step if comm is None else comm.broadcast_object(step)

    @property
    def _writes(self) -> bool:
        return self._together or self.everyone.rank == 0

    def wait_for_survivors(self, point: str) -> None:
        """Wait until all ranks are at a point; out of step, only until the surviving ranks are.

        If the chief has died, the first surviving rank is the chief from then on.
        """
        comm = self.everyone.comm
        # In step, the surviving ranks have lost a part of the batch, so they raise.
        if self.in_step or comm is None:
            self.everyone.agree(point)
            return
        self.everyone.comm = retry_on_survivors(
            comm, lambda ranks: ProcessGroup(ranks).agree(point)
        )
        if lost := comm.size - self.everyone.size:
            _log.warning("%d of %d ranks have died; the session ends without them", lost, comm.size)
