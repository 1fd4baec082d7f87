"""What a session saves and restores, whether its ranks do so together or the chief for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategies import errors
from strategies.ranks import Ranks
from strategies.training import things as kinds
from strategies.training.location import Location
from strategies.training.saver import Saver

__all__ = ["Kept"]


class Kept:
    """The things of a saver, and those that are new since the last checkpoint.

    Args:
        saver: of all ranks; or, where its manager has no ranks, of which the chief's is used.
            None: nothing is saved.
        everyone: the ranks of the session.
        in_step: the ranks that save at the same time: these, or this one alone.
    """

    def __init__(self, saver: Saver | None, everyone: Ranks, in_step: Ranks) -> None:
        self._saver, self._everyone, self._in_step = saver, everyone, in_step
        self._together = saver is not None and saver.checkpoints.comm is not None
        self._new: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a thing: the one that was given last, or restored since."""
        if name in self._new:
            return self._new[name]
        if self._saver is None:
            raise KeyError(name)
        return self._saver[name]

    def update(self, things: Mapping[str, Any]) -> None:
        """Take things that are no longer the same objects."""
        self._new |= things

    def arrays(self) -> Iterator[Any]:
        """Give the arrays of all things, as they are."""
        if self._saver is not None:
            yield from self._saver.arrays()

    def discard(self) -> None:
        """Forget them.

        Raises:
            FailedPreconditionError: one is a pipeline, which does not go back.
        """
        for name, thing in self._new.items():
            if kinds.kind_of(thing) is kinds.KINDS["pipeline"]:
                raise errors.FailedPreconditionError(
                    f"recover: a pipeline does not go back, expected to start the program again, "
                    f"which goes on from the last checkpoint (name: {name})"
                )
        self._new.clear()

    def restore(self) -> int | None:
        """Restore the newest checkpoint, *collective*; returns its step, None if there is none."""
        saver = self._saver
        if saver is None or self._together:
            return None if saver is None else saver.restore()
        step = self._everyone.prepared("restore", lambda: saver.restore() if self._writes else None)
        comm = self._everyone.comm
        return step if comm is None else comm.broadcast_object(step)

    def save(self, step: int, metric: float | None) -> Location | None:
        """Write a checkpoint, *collective* among the ranks that do so at the same time.

        Returns:
            The directory; None where another rank writes for this one, or nothing is saved.
        """
        saver = self._saver
        if saver is None:
            return None
        path = self._in_step.together(
            "save", lambda: saver.save(step, metric=metric, **self._new) if self._writes else None
        )
        self._new.clear()
        return path

    def wait(self) -> None:
        """Wait for what is on its way in the background."""
        if self._saver is not None and self._writes:
            self._saver.checkpoints.wait()

    @property
    def _writes(self) -> bool:
        return self._together or self._everyone.rank == 0
