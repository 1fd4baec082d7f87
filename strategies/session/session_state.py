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
    """The things of a saver and of a state in memory, and those that are new since they were kept.

    Args:
        saver: of all ranks; or, where its manager has no ranks, of which the chief's is used.
            None: nothing is saved.
        state: what ranks go on from when others have died; None for nothing.
        everyone: the ranks of the session.
        in_step: the ranks that save at the same time: these, or this one alone.

    Attributes:
        from_file: whether the things were given back last by a checkpoint.
        is_in_file: whether there is a checkpoint of just this step.
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
        self._on_its_way = -1  # step of a checkpoint that may not be complete
        self._unsaved: dict[str, Any] = {}
        self._uncommitted: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a thing: the one that was given last, or restored since."""
        for things in (self._unsaved, self._uncommitted):
            if name in things:
                return things[name]
        if self._saver is not None and (self._state is None or name in self._saver):
            return self._saver[name]
        if self._state is None:
            raise KeyError(name)
        return self._state[name]

    def update(self, things: Mapping[str, Any]) -> None:
        """Take things that are no longer the same objects."""
        state, saver = self._state, self._saver
        if state is None:
            self._unsaved |= things
            return
        committed = {name: thing for name, thing in things.items() if name in state}
        self._uncommitted |= committed
        self._unsaved |= {
            name: thing
            for name, thing in things.items()
            if name not in committed or (saver is not None and name in saver)
        }

    def arrays(self) -> Iterator[Any]:
        """Give the arrays of all things, as they are."""
        keeper = self._saver or self._state
        if keeper is not None:
            yield from keeper.arrays()

    def begin(self, restore: bool) -> int | None:
        """Find out where to begin, *collective*: after the steps of the last commit, if any.

        Args:
            restore: whether else at the newest checkpoint.

        Returns:
            The number of steps; None where there were none before.
        """
        state = self._state
        self.from_file = self.is_in_file = False
        if state is not None and state.number >= 0 and state["step"] > 0:
            self._take_from_state()
            if self._saver is not None:
                # A session before a death may have saved it; who has come in since does not know.
                own = state.in_files.get(str(self._saver.checkpoints.directory), -1)
                self.is_in_file = state.comm.allreduce(own, op=cc.MAX) == state["step"]
            return int(state["step"])
        step = self._restore() if restore else None
        if state is not None and (step is not None or state.number < 0):
            if self._saver is not None and step is not None:
                self._uncommitted |= {name: self._saver[name] for name in self._common()}
            self.commit(0 if step is None else step)
        return step

    def go_back(self) -> int | None:
        """Go back to the last commit, or else the newest checkpoint, *collective*.

        Returns:
            Its step; None if there is none.

        Raises:
            FailedPreconditionError: a thing is a pipeline, which does not go back.
        """
        self._discard()
        if self._state is None:
            return self._restore()
        self.from_file = self.is_in_file = False
        self._state.restore()
        self._take_from_state()
        return int(self._state["step"])

    def commit(self, step: int) -> None:
        """Commit in memory, *collective*."""
        assert self._state is not None
        self._state.commit(**{**self._uncommitted, "step": step})
        self._uncommitted.clear()

    def save(self, step: int, metric: float | None) -> Location | None:
        """Write a checkpoint, *collective* among the ranks that do so at the same time.

        Returns:
            The directory; None where another rank writes for this one, or nothing is saved.
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
            self._note_file()
        return path

    def wait(self) -> None:
        """Wait for what is on its way in the background."""
        if self._saver is not None and self._writes:
            self._saver.checkpoints.wait()
            self._note_file()

    def _note_file(self) -> None:
        """Let the state know of a checkpoint that is complete."""
        if self._state is not None and self._saver is not None:
            self._state.in_files[str(self._saver.checkpoints.directory)] = self._on_its_way

    def _common(self) -> list[str]:
        """Return the names that both know."""
        saver, state = self._saver, self._state
        if saver is None or state is None:
            return []
        return [name for name in state if name in saver]

    def _take_from_state(self) -> None:
        """Let the saver have what the state has: other objects, where things do not change."""
        assert self._state is not None
        self._unsaved |= {name: self._state[name] for name in self._common()}

    def _discard(self) -> None:
        for name, thing in self._unsaved.items():
            if kinds.protocol_of(thing) is kinds.KINDS["pipeline"]:
                raise errors.FailedPreconditionError(
                    f"recover: a pipeline does not go back, expected to start the program again, "
                    f"which goes on from the last checkpoint (name: {name})"
                )
        self._unsaved.clear()
        self._uncommitted.clear()

    def _restore(self) -> int | None:
        """Restore the newest checkpoint, *collective*; returns its step, None if there is none."""
        saver = self._saver
        self.from_file = self.is_in_file = True
        if saver is None or self._together:
            return None if saver is None else saver.restore()
        step = self._everyone.run_then_agree(
            "restore", lambda: saver.restore() if self._writes else None
        )
        comm = self._everyone.comm
        return step if comm is None else comm.broadcast_object(step)

    @property
    def _writes(self) -> bool:
        return self._together or self._everyone.rank == 0
