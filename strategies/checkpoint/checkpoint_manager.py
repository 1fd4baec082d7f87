"""Checkpoint manager: collective saving and restoring with retention."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import collectives as cc
from collectives import extend
from strategies import errors
from strategies.checkpoint import (
    checkpoint,
    checkpoint_listing,
    manifest,
    read_plan,
    sharded_writing,
    write_plan,
)
from strategies.checkpoint.async_writer import AsyncWriter
from strategies.checkpoint.boxes import Slice
from strategies.checkpoint.checkpoint import PreparedCheckpoint
from strategies.checkpoint.checkpoint_listing import name_of
from strategies.checkpoint.manifest import Manifest
from strategies.checkpoint.read_plan import Wanted
from strategies.checkpoint.retention import Best, RetentionPolicy
from strategies.checkpoint.shards import NamedSlice
from strategies.checkpoint.storage import Location, StorageUrl, resolve
from strategies.core.agreement import first_difference
from strategies.core.atomic_io import DirectoryLock
from strategies.core.process_group import ProcessGroup

__all__ = ["CheckpointManager"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints of the state of all ranks.

    By default the state is the same on all ranks: rank 0 writes and reads for everybody, and only
    rank 0 needs the file system. With `sharded` each rank writes its part, all at the same time,
    and reads its part: what one rank alone has, such as a `Slice` of a larger array, and its share
    of what several have. All of them need to reach the directory then. Either way a checkpoint can
    be restored by any number of ranks, sharded or not.

    An error on one rank is raised on every rank. The manager holds the directory's lock from its
    first `save` until `close`, so that a second job is stopped by a clear error instead of mixing
    its checkpoints in. Behind a URL there is no lock: a second job is found out when a checkpoint
    of it has come in between.

    With `background`, `save` returns as soon as the ranks that write have copied their arrays;
    threads write them. At most one checkpoint is on its way: the next collective call waits for it,
    and raises its error on all ranks.

    Sharded, a rank waits for another one's part for an hour at most, since a file system may take
    as long; a rank that has died is found at once.

    Args:
        directory: the directory of checkpoints, as rank 0 sees it; or a URL, such as
            "s3://bucket/run", for which fsspec has to be installed.
        comm: the ranks, or None for this process alone.
        keep: how many checkpoints stay, see `save`.
        keep_every_n_hours: of older ones the first stays, too, and then one every so many hours.
        best: which metric is the best, "min" or "max"; that checkpoint stays, too.
        background: whether to write in the background. The copies stay in memory for the next save.
        sharded: whether each rank writes its part.

    Raises:
        ValueError: hours that are not above 0, or a word that is neither.
        ImportError: a URL, and fsspec is not installed.
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
        sharded: bool = False,
    ) -> None:
        self._directory = resolve(directory)
        self._comm = comm
        self._ranks = ProcessGroup(comm)
        self._rules = RetentionPolicy(keep, keep_every_n_hours, best)
        self._background = AsyncWriter() if background else None
        self._copies: dict[Any, npt.NDArray[Any]] = {}
        self._lock: DirectoryLock | None = None
        self._sharded = sharded and comm is not None and comm.size > 1
        self._crew: sharded_writing.WriterGroup | None = None

    @property
    def comm(self) -> cc.Communicator | None:
        """The ranks; None for this process alone."""
        return self._comm

    @property
    def directory(self) -> Location:
        """Where the checkpoints are."""
        return self._directory

    @property
    def in_background(self) -> bool:
        """Whether a checkpoint may not be there yet when `save` returns."""
        return self._background is not None

    @property
    def sharded(self) -> bool:
        """Whether each of several ranks writes its part."""
        return self._sharded

    def save(
        self,
        tensors: Mapping[str, npt.ArrayLike | Slice],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> Location:
        """Write a checkpoint, as the function `save` does.

        Collective: all ranks. What ranks other than 0 pass is not looked at, unless the checkpoints
        are sharded: then each passes the tensors that it has. Of one that several ranks have they
        all have the same numbers; of a `Slice` all ranks together have every element.

        Args:
            tensors: as the function `save` takes them, or slices of larger ones.
            step: likewise; that of rank 0 counts, as do the next two. Sharded, it must be equal on
                all ranks.
            metadata: likewise.
            metric: how good the model is, for `best`. What is not finite counts as None.

        Returns:
            The directory of the checkpoint, on every rank.

        Raises:
            OpError: as the function `save`, the same on every rank. In the background it may be
                that of the save before; then nothing has been saved now.
            MismatchError: sharded, and `step` differs among the ranks; on all ranks.
        """

        def prepared() -> PreparedCheckpoint:
            size = 1 if self._comm is None else self._comm.size
            return checkpoint.prepare(
                tensors,
                step=step,
                metadata=metadata,
                rules=self._rules,
                metric=metric,
                world_size=size,
            )

        if self._sharded:
            return self._save_together(prepared)

        def write() -> Location:
            draft = prepared()
            self._claim()
            given = checkpoint.slices_of_rank(draft)
            if self._background is None:
                return checkpoint.write_alone(self._directory, draft, given)
            copied = self._copy_arrays(given)
            rest = self._background.throttle
            self._behind(lambda: checkpoint.write_alone(self._directory, draft, copied, rest))
            return self._directory / name_of(draft.step)

        return self._on_rank_0("save", write)

    def _save_together(self, prepared: Callable[[], PreparedCheckpoint]) -> Location:
        """Settle who writes what, and let each rank write its part."""
        comm = self._comm
        assert comm is not None

        draft = self._ranks.run_then_agree("save: prepare", prepared)
        self._on_rank_0("save", self._claim)  # after what is in the background
        crew = self._crew = self._crew or sharded_writing.WriterGroup(comm)
        gathered = comm.allgather_object((draft.step, draft.held()))
        difference = first_difference(comm, "save", [[f"step {step}"] for step, _ in gathered])
        if difference is not None:
            raise extend.collective_error(comm, cc.MismatchError(difference))
        share = write_plan.assign_writers([held for _, held in gathered])[comm.rank]
        number, given = crew.next(), checkpoint.slices_of_rank(draft, share)
        if self._background is not None:
            given = self._ranks.run_then_agree("save: copy", lambda: self._copy_arrays(given))
            rest = self._background.throttle
            self._behind(
                (lambda: crew.follow(given, number, rest))
                if comm.rank
                else (lambda: crew.lead(self._directory, draft, given, number, rest))
            )
            return self._directory / name_of(draft.step)
        return self._on_rank_0(
            "save",
            lambda: crew.lead(self._directory, draft, given, number),
            lambda: crew.follow(given, number),
        )

    def restore_or_none(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        slices: Wanted | None = None,
    ) -> checkpoint.Checkpoint | None:
        """Read the newest complete checkpoint; None where there is none.

        Collective: all ranks.

        Args:
            path: of another checkpoint, such as that of `best()`, as rank 0 sees it.
            slices: name -> which elements of a tensor this rank wants, where it does not want all;
                may differ between ranks. What the checkpoint does not hold is passed over. Or a
                function of name and shape that returns them, or None for all.

        Returns:
            The same checkpoint on every rank but for `slices`, bit-equal arrays in memory of its
            own.

        Raises:
            InvalidArgumentError: a slice does not lie inside of its tensor; on every rank.
            OpError: as the function `restore`, the same on every rank.
        Cost: one broadcast of the manifest and one per tensor, or slice in a file.
        """
        whole: dict[str, npt.NDArray[Any]] = {}

        def find() -> tuple[Location, Manifest] | None:
            place = checkpoint.latest(self._directory) if path is None else resolve(path)
            if place is None:
                return None
            place = checkpoint_listing.select(place, None)
            if self._sharded:
                return place, manifest.read(place)
            plan, tensors = checkpoint.read_all(place)
            whole.update(tensors)
            return place, plan

        found = self._on_rank_0("restore", find)
        if found is None:
            return None
        place, plan = found
        wanted = self._ranks.run_then_agree(
            "restore: slices", lambda: read_plan.plan_reads(slices, plan)
        )
        if self._sharded:
            assert self._comm is not None
            tensors = read_plan.read_together(self._comm, place, plan, wanted)
        else:
            tensors = read_plan.distribute(self._comm, plan, whole)
            tensors = read_plan.parts(tensors, wanted, plan)
        return checkpoint.Checkpoint(plan.step, tensors, dict(plan.metadata), place)

    def latest(self) -> Location | None:
        """Find the newest complete checkpoint, as this rank sees the directory; not collective.

        It waits for a checkpoint that this rank writes in the background; `wait` waits for the
        checkpoints of all ranks. Ranks that call it at different moments may get different results:
        broadcast one of them where all ranks must act on it.

        Raises:
            OpError: the manager has one rank only, and its save in the background has failed. Of
                several ranks, the next collective call raises this error.
        """
        self._await_background()
        return checkpoint.latest(self._directory)

    def best(self) -> Location | None:
        """Find the checkpoint with the best metric, None without any; not collective, as `latest`.

        Raises:
            ValueError: the manager was made without `best`.
        """
        best = self._rules.best
        if best is None:
            raise ValueError("best: the manager was made without best, expected 'min' or 'max'")
        self._await_background()
        return checkpoint.best(self._directory, best)

    def wait(self) -> None:
        """Wait until the checkpoint in the background is there. Collective: all ranks.

        Raises:
            OpError: what `save` would have raised; on every rank.
        """
        self._on_rank_0("save", lambda: None)

    def close(self) -> None:
        """Release the directory for other writers; not collective; harmless when called again.

        Raises:
            OpError: of a checkpoint in the background, on a rank that wrote it. After `wait` there
                is none.
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

    def _claim(self) -> None:
        """Take the directory for this job, on rank 0."""
        if self._lock is None and not isinstance(self._directory, StorageUrl):
            self._lock = DirectoryLock(self._directory)

    def _copy_arrays(self, given: list[NamedSlice]) -> list[NamedSlice]:
        """Copy the arrays, into memory of the save before where that fits."""
        old, copies = self._copies, {}
        for piece in given:
            place, array = (piece.name, piece.box), piece.array
            copy = old.pop(place, None)
            if copy is None or copy.dtype != array.dtype:
                copy = _empty_like(array, piece.name)
            copy[...] = array
            copies[place] = copy
        self._copies = copies
        return [piece._replace(array=copies[piece.name, piece.box]) for piece in given]

    def _behind(self, work: Callable[[], object]) -> None:
        """Do some work in the background, with the lock, also if nobody else holds it any more."""
        assert self._background is not None

        def run(held: DirectoryLock | None = self._lock) -> None:
            work()

        self._background.start(run)

    def _await_background(self) -> None:
        """Wait for this rank's background thread; the next collective call raises its error."""
        if self._comm is None or self._comm.size == 1:
            self._finish()
        elif self._background is not None:
            self._background.wait()

    def _finish(self) -> None:
        if self._background is not None:
            self._background.finish()

    def _on_rank_0(
        self,
        what: str,
        work: Callable[[], _T],
        others: Callable[[], object] | None = None,
    ) -> _T:
        """Do `work` on rank 0, after what is in the background; result or error on every rank.

        Args:
            what: the operation.
            work: whose result or error all ranks get.
            others: what other ranks do meanwhile. Rank 0 hears of their errors in `work`.
        """
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
        else:
            failure = self._follow(others)
        try:
            kind, result = comm.broadcast_object(outcome, root=0)
        except cc.CollectiveError as unheard:
            if failure is None:
                raise
            raise failure from unheard
        if failure is not None and (comm.rank == 0 or not isinstance(failure, Exception)):
            raise failure
        if not kind:
            return result  # type: ignore[no-any-return]
        raise sharded_writing.error_of(what, kind, result, "")

    def _follow(self, work: Callable[[], object] | None) -> BaseException | None:
        """On other ranks: finish what is in the background, and do some work; return its error."""
        try:
            try:
                self._finish()
            except Exception as error:  # rank 0 has heard of it, and tells
                _log.debug("save: in the background of this rank: %s", error)
            if work is not None:
                work()
        except BaseException as error:
            return error
        return None


def _empty_like(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    try:
        return np.empty_like(array)
    except MemoryError as error:
        raise errors.ResourceExhaustedError(
            f"save: out of memory for a copy, expected {array.nbytes} bytes free (tensor: {name}). "
            "Save without background"
        ) from error
