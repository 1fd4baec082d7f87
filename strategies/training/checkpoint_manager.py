"""Checkpoints of a group of ranks that hold the same state: one writes, all learn the outcome."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies import errors
from strategies.training import checkpoint, durable, manifest, shards

__all__ = ["CheckpointManager"]

_T = TypeVar("_T")


class CheckpointManager:
    """Checkpoints of state that is the same on all ranks: rank 0 writes and reads for everybody.

    Only rank 0 needs the file system; the others get what it read. An error on rank 0 is raised
    on every rank. The manager holds the directory's lock from its first `save` until `close`, so
    that a second job is stopped by a clear error instead of mixing its checkpoints in.

    Args:
        directory: the directory of checkpoints, as rank 0 sees it.
        comm: the ranks, or None for this process alone.
        keep: how many checkpoints stay, see `save`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        comm: cc.Communicator | None = None,
        *,
        keep: int = 5,
    ) -> None:
        self._directory = Path(directory)
        self._comm = comm
        self._keep = keep
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
    ) -> Path:
        """Write a checkpoint, as the function `save` does.

        Collective: all ranks; what ranks other than 0 pass is not looked at.

        Returns:
            The directory of the checkpoint, on every rank.

        Raises:
            OpError: as the function `save`, the same on every rank.
        """

        def write() -> Path:
            size = 1 if self._comm is None else self._comm.size
            draft = checkpoint.prepare(
                tensors, step=step, metadata=metadata, keep=self._keep, world_size=size
            )
            if self._lock is None:
                self._lock = durable.DirectoryLock(self._directory)
            return checkpoint.write(draft, self._directory)

        return self._on_rank_0("save", write)

    def restore_or_none(self) -> checkpoint.Checkpoint | None:
        """Read the newest complete checkpoint; None where there is none.

        Collective: all ranks.

        Returns:
            The same checkpoint on every rank, bit-equal arrays in memory of its own.

        Raises:
            OpError: as the function `restore`, the same on every rank.
        Cost: one broadcast of the names and one per tensor.
        """
        kept: dict[str, npt.NDArray[Any]] = {}

        def read() -> tuple[checkpoint.Checkpoint, list[tuple[str, str, tuple[int, ...]]]] | None:
            path = checkpoint.latest(self._directory)
            if path is None:
                return None
            found = checkpoint.restore(path)
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

    def close(self) -> None:
        """Release the directory for other writers; not collective; harmless when called again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _on_rank_0(self, what: str, work: Callable[[], _T]) -> _T:
        """Do `work` on rank 0; its result or its error on every rank."""
        comm = self._comm
        if comm is None or comm.size == 1:
            return work()
        outcome: tuple[str, Any] = ("", None)
        failure: BaseException | None = None
        if comm.rank == 0:
            try:
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
