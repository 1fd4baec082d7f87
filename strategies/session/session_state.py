"""State of a session: checkpoints by all ranks or the chief, and in-memory commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import collectives as cc
from strategies import errors
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.saver import Saver
from strategies.checkpoint.storage import Location
from strategies.core.process_group import ProcessGroup
from strategies.elastic.elastic_state import State

__all__ = ["SessionState"]


class SessionState:
    """The objects of a saver and an in-memory state, and their replacements since the last save.

    Args:
        saver: saver of all ranks; if its manager has no ranks, the chief's is used. None saves
            nothing.
        state: state that ranks resume from after a death, or None.
        everyone: the ranks of the session.
        in_step: the ranks that save at the same time: `everyone`, or this rank alone.

    Attributes:
        from_file: whether the last restore was from a checkpoint.
        is_in_file: whether a checkpoint of this step exists.
    """

    def __init__(
        self,
        saver: Saver | None,
        state: State | None,
        everyone: ProcessGroup,
        in_step: ProcessGroup,
    ) -> None:
        self._saver, self._state = saver, state
        self._everyone, self._in_step = everyone, in_step
        self._together = saver is not None and saver.checkpoints.comm is not None
        self.from_file = self.is_in_file = False
        self._on_its_way = -1  # step of the checkpoint in the background
        self._unsaved: dict[str, Any] = {}
        self._uncommitted: dict[str, Any] = {}

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

    def begin(self, restore: bool) -> int | None:
        """Restore the last commit if there is one, or else a checkpoint; *collective*.

        Args:
            restore: whether to restore the newest checkpoint without a commit.

        Returns:
            The number of steps done; None without a commit or checkpoint.
        """
        state = self._state
        self.from_file = self.is_in_file = False
        # A commit of step 0 was made before any step, so no checkpoint is older.
        if state is not None and state.number >= 0 and state["step"] > 0:
            self._take_from_state()
            if self._saver is not None:
                # An earlier session may have saved this step; ranks admitted since do not know it.
                own = state.in_files.get(str(self._saver.checkpoints.directory), -1)
                self.is_in_file = state.comm.allreduce(own, op=cc.MAX) == state["step"]
            return int(state["step"])
        step = self._restore() if restore else None
        if state is not None and (step is not None or state.number < 0):
            if self._saver is not None and step is not None:
                # The saver may have replaced objects, which the state must then commit.
                self._uncommitted |= {name: self._saver[name] for name in self._common()}
            # A death before the next commit returns to this step.
            self.commit(0 if step is None else step)
        return step

    def go_back(self) -> int | None:
        """Return to the last commit, or without a state to the newest checkpoint; *collective*.

        Returns:
            Its step; None without a checkpoint.

        Raises:
            FailedPreconditionError: an object is a pipeline, which cannot return.
        """
        # Replacements of the failed step must not outlive it.
        self._discard()
        if self._state is None:
            return self._restore()
        self.from_file = self.is_in_file = False
        self._state.restore()
        self._take_from_state()
        return int(self._state["step"])

    def commit(self, step: int) -> None:
        """Commit the objects in memory, *collective*."""
        assert self._state is not None
        self._state.commit(**{**self._uncommitted, "step": step})
        # Only after the commit: if it fails, the next one needs them again.
        self._uncommitted.clear()

    def save(self, step: int, metric: float | None) -> Location | None:
        """Write a checkpoint, *collective* among `in_step`.

        Returns:
            The directory; None if another rank writes, or nothing is saved.
        """
        saver = self._saver
        if saver is None:
            return None
        new = self._unsaved
        path = self._in_step.raise_together(
            "save", lambda: saver.save(step, metric=metric, **new) if self._writes else None
        )
        self._unsaved.clear()
        self._on_its_way = step
        if not saver.checkpoints.in_background:
            # A checkpoint in the background counts only when it is complete, in `wait`.
            self._note_file()
        return path

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
        self.from_file = self.is_in_file = True
        if saver is None or self._together:
            return None if saver is None else saver.restore()
        step = self._everyone.run_then_agree(
            "restore", lambda: saver.restore() if self._writes else None
        )
        comm = self._everyone.comm
        # Only the chief has read the file; the other ranks learn its step.
        return step if comm is None else comm.broadcast_object(step)

    @property
    def _writes(self) -> bool:
        return self._together or self._everyone.rank == 0
