"""Checkpoints of a group of ranks that hold the same state: one writes, all learn the outcome."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies import errors
from strategies.training import checkpoint, durable, manifest, shards
from strategies.training.background import Background
from strategies.training.retention import Best, Rules

__all__ = ["CheckpointManager"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints of state that is the same on all ranks: rank 0 writes and reads for everybody.

    Only rank 0 needs the file system; the others get what it read. An error on rank 0 is raised
    on every rank. The manager holds the directory's lock from its first `save` until `close`, so
    that a second job is stopped by a clear error instead of mixing its checkpoints in.

    With `background`, `save` returns as soon as rank 0 has copied the arrays; a thread writes them.
    At most one checkpoint is on its way: the next call of any method waits for it, and raises its
    error on all ranks.

    Args:
        directory: the directory of checkpoints, as rank 0 sees it.
        comm: the ranks, or None for this process alone.
        keep: how many checkpoints stay, see `save`.
        keep_every_n_hours: of older ones the first stays, too, and then one every so many hours.
        best: which metric is the best, "min" or "max"; that checkpoint stays, too.
        background: whether to write in the background. The copies stay in memory for the next save.

    Raises:
        ValueError: hours that are not above 0, or a word that is neither.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        comm: cc.Communicator | None = None,
        *,
        keep: int = 5,
        keep_every_n_hours: float | None = None,
        best: Best | None = None,
        background: bool = False,
    ) -> None:
        self._directory = Path(directory)
        self._comm = comm
        self._rules = Rules(keep, keep_every_n_hours, best)
        self._background = Background() if background else None
        self._copies: dict[str, npt.NDArray[Any]] = {}
        self._lock: durable.DirectoryLock | None = None

    @property
    def comm(self) -> cc.Communicator | None:
        """The ranks; None for this process alone."""
        return self._comm

    def save(
        self,
        tensors: Mapping[str, npt.ArrayLike],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> Path:
        """Write a checkpoint, as the function `save` does.

        Collective: all ranks; what ranks other than 0 pass is not looked at.

        Args:
            tensors: as the function `save` takes them.
            step: likewise.
            metadata: likewise.
            metric: how good the model is, for `best`. What is not finite counts as None.

        Returns:
            The directory of the checkpoint, on every rank.

        Raises:
            OpError: as the function `save`, the same on every rank. In the background it may be
                that of the save before; then nothing has been saved now.
        """

        def write() -> Path:
            size = 1 if self._comm is None else self._comm.size
            draft = checkpoint.prepare(
                tensors,
                step=step,
                metadata=metadata,
                rules=self._rules,
                metric=metric,
                world_size=size,
            )
            if self._lock is None:
                self._lock = durable.DirectoryLock(self._directory)
            if self._background is None:
                return checkpoint.write(draft, self._directory)
            return self._write_behind(self._background, draft, self._lock)

        return self._on_rank_0("save", write)

    def restore_or_none(
        self, path: str | os.PathLike[str] | None = None
    ) -> checkpoint.Checkpoint | None:
        """Read the newest complete checkpoint; None where there is none.

        Collective: all ranks.

        Args:
            path: of another checkpoint, such as that of `best()`, as rank 0 sees it.

        Returns:
            The same checkpoint on every rank, bit-equal arrays in memory of its own.

        Raises:
            OpError: as the function `restore`, the same on every rank.
        Cost: one broadcast of the names and one per tensor.
        """
        kept: dict[str, npt.NDArray[Any]] = {}

        def read() -> tuple[checkpoint.Checkpoint, list[tuple[str, str, tuple[int, ...]]]] | None:
            place = checkpoint.latest(self._directory) if path is None else Path(path)
            if place is None:
                return None
            found = checkpoint.restore(place)
            kept.update(found.tensors)
            specs = [(name, array.dtype.name, array.shape) for name, array in kept.items()]
            return checkpoint.Checkpoint(found.step, {}, found.metadata, found.path), specs

        header = self._on_rank_0("restore", read)
        if header is None:
            return None
        found, specs = header
        tensors = {name: self._spread(kept.get(name), dtype, shape) for name, dtype, shape in specs}
        return checkpoint.Checkpoint(found.step, tensors, found.metadata, found.path)

    def latest(self) -> Path | None:
        """Find the newest complete checkpoint, as the function `latest`. Collective: all ranks."""
        return self._on_rank_0("latest", lambda: checkpoint.latest(self._directory))

    def best(self) -> Path | None:
        """Find the checkpoint with the best metric, None without any. Collective: all ranks.

        Raises:
            ValueError: the manager was not told what is best.
        """
        best = self._rules.best
        if best is None:
            raise ValueError("best: the manager was made without best, expected 'min' or 'max'")
        return self._on_rank_0("best", lambda: checkpoint.best(self._directory, best))

    def wait(self) -> None:
        """Wait until the checkpoint in the background is there. Collective: all ranks.

        Raises:
            OpError: what `save` would have raised; on every rank.
        """
        self._on_rank_0("save", lambda: None)

    def close(self) -> None:
        """Release the directory for other writers; not collective; harmless when called again.

        Raises:
            OpError: of a checkpoint in the background, on rank 0 alone. After `wait` there is none.
        """
        lock, self._lock = self._lock, None
        try:
            if self._background is not None:
                self._background.finish()
        finally:
            self._copies.clear()
            if lock is not None:
                lock.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if kind is None and self._background is not None:
                self.wait()
        finally:
            try:
                self.close()
            except Exception as error:
                if kind is None:
                    raise
                # What ends the block says more, and the other ranks do not wait for this.
                _log.error("save: the last checkpoint is not there: %s", error)

    def _write_behind(
        self, background: Background, draft: checkpoint.Draft, lock: durable.DirectoryLock
    ) -> Path:
        """Copy the arrays, and have the copies written; the path where they will be."""
        old, copies = self._copies, {}
        for name, array in draft.arrays.items():
            copy = old.pop(name, None)
            if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
                copy = _empty_like(array, name)
            copy[...] = array
            copies[name] = copy
        self._copies = copies
        copied = dataclasses.replace(draft, arrays=copies)

        def write(held: durable.DirectoryLock = lock) -> None:  # also if nobody else holds it
            checkpoint.write(copied, self._directory)

        background.start(write)
        return self._directory / checkpoint.name_of(draft.step)

    def _finish(self) -> None:
        if self._background is not None:
            self._background.finish()

    def _on_rank_0(self, what: str, work: Callable[[], _T]) -> _T:
        """Do `work` on rank 0, after what is in the background; result or error on every rank."""
        comm = self._comm
        if comm is None or comm.size == 1:
            self._finish()
            return work()
        outcome: tuple[str, Any] = ("", None)
        failure: BaseException | None = None
        if comm.rank == 0:
            try:
                self._finish()
                outcome = ("", work())
            except BaseException as error:  # an interrupt, too: the others wait for the outcome
                failure = error
                outcome = (type(error).__name__, str(error))
        try:
            kind, result = comm.broadcast_object(outcome, root=0)
        except cc.CollectiveError as unheard:
            if failure is None:
                raise
            raise failure from unheard
        if failure is not None:
            raise failure
        if not kind:
            return result  # type: ignore[no-any-return]
        error_type = getattr(errors, kind, None)
        if isinstance(error_type, type) and issubclass(error_type, errors.OpError):
            raise error_type(result)
        raise errors.AbortedError(f"{what}: rank 0 stopped with {kind}: {result}")

    def _spread(
        self, array: npt.NDArray[Any] | None, dtype: str, shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """Give every rank rank 0's array; sent as bytes, whatever its dtype."""
        comm = self._comm
        mine = np.empty(shape, manifest.DTYPES[dtype]) if array is None else array
        if comm is None or comm.size == 1 or not mine.nbytes:
            return mine
        received = comm.broadcast(shards.as_bytes(mine), root=0)
        if comm.rank == 0:
            return mine
        return np.asarray(received).view(mine.dtype).reshape(shape)


def _empty_like(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    try:
        return np.empty_like(array)
    except MemoryError as error:
        raise errors.ResourceExhaustedError(
            f"save: out of memory for a copy, expected {array.nbytes} bytes free (tensor: {name}). "
            "Save without background"
        ) from error
