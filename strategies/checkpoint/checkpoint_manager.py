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
from strategies.checkpoint.remote_state import RemoteTensor
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

    By default the state is the same on all ranks. Rank 0 reads and writes for all, and only rank 0
    needs the file system. With `sharded`, all ranks read and write at the same time: each rank its
    own part, such as a `Slice` of a larger array, and a share of the tensors that several ranks
    hold. All ranks then need access to the directory. Either kind of checkpoint can be restored on
    any number of ranks, sharded or not.

    An error on one rank is raised on every rank. The manager locks the directory from its first
    `save` until `close`, so that a second job fails with a clear error instead of adding its
    checkpoints. URLs have no lock: `save` raises if another job has written in the meantime.

    With `sharded` and without `comm`, this process saves alone, but tasks that hold parts of an
    object of `Saver`, such as the variables of a `ParameterServerStrategy`, write and read these
    parts. They also need access to the directory.

    With `background`, `save` returns when the writing ranks have copied their arrays; threads write
    the copies. At most one checkpoint is in progress. The next collective call waits for it and
    raises its error on all ranks.

    With `sharded`, a rank waits for another rank's part for at most an hour, because file systems
    may take that long. A dead rank is detected at once.

    Args:
        directory: directory of checkpoints, as rank 0 sees it; or a URL, such as
            "s3://bucket/run", which needs fsspec.
        comm: the ranks; None for this process alone.
        keep: number of checkpoints to keep, see `save`.
        keep_every_n_hours: also keep the first of the older ones, and then one per this many hours.
        best: "min" or "max": also keep the checkpoint with the lowest or highest metric.
        background: whether to write in the background. The copies stay allocated for the next save.
        sharded: whether each rank, or each task that holds a part, writes and reads its part.

    Raises:
        ValueError: `keep_every_n_hours` is not above 0, or `best` is unknown.
        ImportError: the directory is a URL, and fsspec is not installed.
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
        # Keyed by name and box; a box implies the shape, so only dtypes are compared.
        self._copies: dict[Any, npt.NDArray[Any]] = {}
        self._lock: DirectoryLock | None = None
        # One rank alone writes the whole tensors, and needs no messages.
        self._sharded = sharded and comm is not None and comm.size > 1
        self._asks_tasks = sharded and not self._sharded
        self._crew: sharded_writing.WriterGroup | None = None

    @property
    def comm(self) -> cc.Communicator | None:
        """The ranks; None for this process alone."""
        return self._comm

    @property
    def directory(self) -> Location:
        """Directory of the checkpoints."""
        return self._directory

    @property
    def in_background(self) -> bool:
        """Whether `save` may return before the checkpoint is complete."""
        return self._background is not None

    @property
    def sharded(self) -> bool:
        """Whether each of several ranks writes its part."""
        return self._sharded

    @property
    def asks_tasks(self) -> bool:
        """Whether this process saves alone, and tasks write and read their parts of its objects."""
        return self._asks_tasks

    def save(
        self,
        tensors: Mapping[str, npt.ArrayLike | Slice | RemoteTensor],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> Location:
        """Write a checkpoint, as the function `save`.

        *Collective*. Arguments of ranks other than 0 are ignored, unless the checkpoints are
        sharded: then each rank passes its tensors. A tensor of several ranks must be equal on all
        of them. The `Slice` parts of a tensor must cover it.

        Args:
            tensors: tensors as for the function `save`, slices of larger ones, or tensors that
                other tasks write, which are released when they are written.
            step: training step; rank 0's is used. With `sharded` it must be equal on all ranks.
            metadata: as for the function `save`; rank 0's is used.
            metric: quality of the model, for `best`; rank 0's is used. A metric that is not finite
                counts as None.

        Returns:
            The directory of the checkpoint, on every rank.

        Raises:
            OpError: as the function `save`, the same on every rank. With `background` it may be the
                error of the previous save; this call has then saved nothing.
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
            # After `prepare`: an invalid argument must not create the directory.
            self._claim()
            given = checkpoint.slices_of_rank(draft)
            if self._background is None:
                return checkpoint.write_alone(self._directory, draft, given)
            # Before `save` returns, since the caller changes its arrays in the next step.
            copied = self._copy_arrays(given)
            # The thread yields the cores to training; a save in the foreground does not pause.
            rest = self._background.throttle
            self._behind(lambda: checkpoint.write_alone(self._directory, draft, copied, rest))
            return self._directory / name_of(draft.step)

        return self._on_rank_0("save", write)

    def _save_together(self, prepared: Callable[[], PreparedCheckpoint]) -> Location:
        """Assign the tensors to writers, and let each rank write its part."""
        comm = self._comm
        assert comm is not None

        # Agree before the first message about the plan: a rank with a bad argument would leave the
        # others waiting in the all-gather.
        draft = self._ranks.run_then_agree("save: prepare", prepared)
        self._on_rank_0("save", self._claim)  # also waits for the save in the background
        # Made in the first save, because its constructor is collective.
        crew = self._crew = self._crew or sharded_writing.WriterGroup(comm)
        # All ranks compute the same plan from the same facts, so no rank has to send one.
        gathered = comm.allgather_object((draft.step, draft.held()))
        difference = first_difference(comm, "save", [[f"step {step}"] for step, _ in gathered])
        if difference is not None:
            raise extend.collective_error(comm, cc.MismatchError(difference))
        share = write_plan.assign_writers([held for _, held in gathered])[comm.rank]
        # All errors above are raised on all ranks, so the ranks count their checkpoints alike.
        number, given = crew.next(), checkpoint.slices_of_rank(draft, share)
        if self._background is not None:
            # A rank that lacks memory must stop all ranks before rank 0 begins the checkpoint.
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
        unread: Callable[[str, tuple[int, ...]], bool] | None = None,
    ) -> checkpoint.Checkpoint | None:
        """Read the newest complete checkpoint; return None without one.

        *Collective*.

        Args:
            path: another checkpoint, such as `best()`, as rank 0 sees it.
            slices: name -> box of a tensor that this rank needs, for tensors it needs in part; may
                differ between ranks. Unknown names are ignored. Or a function of name and shape
                that returns a box, or None for the whole tensor.
            unread: function of name and shape that returns whether to leave out a tensor, because
                other tasks read it; only if `asks_tasks`.

        Returns:
            The same checkpoint on every rank apart from `slices`, with bit-equal arrays in separate
            memory.

        Raises:
            InvalidArgumentError: a box is not inside its tensor; on every rank.
            OpError: as the function `restore`, the same on every rank.
        Cost: one broadcast of the manifest and one per tensor, or per slice in a file.
        """
        whole: dict[str, npt.NDArray[Any]] = {}

        def find() -> tuple[Location, Manifest] | None:
            place = checkpoint.latest(self._directory) if path is None else resolve(path)
            if place is None:
                return None
            place = checkpoint_listing.select(place, None)
            plan = manifest.read(place)
            # With several readers, the others get the manifest from rank 0, so all ranks read the
            # same checkpoint even if a newer one appears meanwhile.
            if not self._sharded and not self._asks_tasks:
                whole.update(checkpoint.read_boxes(place, plan, plan.boxes()))
            return place, plan

        found = self._on_rank_0("restore", find)
        if found is None:
            return None
        # All ranks get the manifest with `found`: the broadcasts need names, shapes and dtypes.
        place, plan = found
        # Before any data moves: a wrong box on one rank must not leave the others in a broadcast.
        wanted = self._ranks.run_then_agree(
            "restore: slices", lambda: read_plan.plan_reads(slices, plan)
        )
        if self._sharded:
            assert self._comm is not None
            tensors = read_plan.read_together(self._comm, place, plan, wanted)
        elif self._asks_tasks:
            boxes = plan.boxes() | wanted
            if unread is not None:
                boxes = {n: box for n, box in boxes.items() if not unread(n, plan.tensors[n].shape)}
            tensors = checkpoint.read_boxes(place, plan, boxes)
        else:
            tensors = read_plan.distribute(self._comm, plan, whole)
            tensors = read_plan.parts(tensors, wanted, plan)
        return checkpoint.Checkpoint(plan.step, tensors, dict(plan.metadata), place, plan)

    def latest(self) -> Location | None:
        """Return the newest complete checkpoint, as this rank sees the directory; not collective.

        It waits for a checkpoint that this rank writes in the background. `wait` waits for those of
        all ranks. Ranks that call it at different moments may get different results. If all ranks
        must act on the result, broadcast one rank's.

        Raises:
            OpError: the manager has one rank, and its save in the background has failed. With
                several ranks, the next collective call raises this error.
        """
        self._await_background()
        return checkpoint.latest(self._directory)

    def best(self) -> Location | None:
        """Return the checkpoint with the best metric or None; not collective, see `latest`.

        Raises:
            ValueError: the manager was made without `best`.
        """
        best = self._rules.best
        if best is None:
            raise ValueError("best: the manager was made without best, expected 'min' or 'max'")
        self._await_background()
        return checkpoint.best(self._directory, best)

    def wait(self) -> None:
        """Wait until the checkpoint in the background is complete. *Collective*.

        Raises:
            OpError: the error of that save; on every rank.
        """
        self._on_rank_0("save", lambda: None)

    def close(self) -> None:
        """Release the directory for other writers; not collective; harmless when repeated.

        Raises:
            OpError: the error of a checkpoint in the background, on a rank that wrote it; never
                after `wait`.
        """
        # Taken first, so that closing twice, or after an error, releases it once.
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
            # `wait` is collective: after an error, other ranks may not reach the end of the block.
            if kind is None and self._background is not None:
                self.wait()
        finally:
            try:
                self.close()
            except Exception as error:
                if kind is None:
                    raise
                # The block's own exception matters more, and no rank waits for this one.
                _log.error("save: the last checkpoint is incomplete: %s", error)

    def _claim(self) -> None:
        """Lock the directory for this job, on rank 0."""
        if self._lock is None and not isinstance(self._directory, StorageUrl):
            self._lock = DirectoryLock(self._directory)

    def _copy_arrays(self, given: list[NamedSlice]) -> list[NamedSlice]:
        """Copy the arrays, into the copies of the previous save where shape and dtype match."""
        old, copies = self._copies, {}
        for piece in given:
            place, array = (piece.name, piece.box), piece.array
            # Copies that stay in `old` are freed: they are of tensors that are no longer saved.
            copy = old.pop(place, None)
            if copy is None or copy.dtype != array.dtype:
                copy = _empty_like(array, piece.name)
            copy[...] = array
            copies[place] = copy
        self._copies = copies
        return [piece._replace(array=copies[piece.name, piece.box]) for piece in given]

    def _behind(self, work: Callable[[], object]) -> None:
        """Run `work` in the background; it holds the lock even if the manager is closed."""
        assert self._background is not None

        # The default argument keeps the lock alive as long as the thread runs. A manager dropped
        # without `close` would otherwise release it in the middle of a save.
        def run(held: DirectoryLock | None = self._lock) -> None:
            work()

        self._background.start(run)

    def _await_background(self) -> None:
        """Wait for this rank's background thread; the next collective call raises its error."""
        if self._comm is None or self._comm.size == 1:
            # Raises here, because a single rank has no collective call in which others wait.
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
        """Run `work` on rank 0 after the save in the background; result or error on every rank.

        Args:
            what: name of the operation.
            work: function on rank 0; all ranks get its result or error.
            others: function on the other ranks meanwhile. They report their errors to `work`.
        """
        comm = self._comm
        if comm is None or comm.size == 1:
            self._finish()
            return work()
        outcome: tuple[str, Any] = ("", None)
        failure: BaseException | None = None
        if comm.rank == 0:
            try:
                # The error of the previous save ends this call before `work`.
                self._finish()
                outcome = ("", work())
            except BaseException as error:  # also an interrupt: other ranks wait for the outcome
                failure = error
                outcome = (type(error).__name__, str(error))
        else:
            # Runs while rank 0 runs `work`: with `sharded` both exchange messages.
            failure = self._follow(others)
        try:
            # Also the barrier of the call: no rank returns before the checkpoint is complete.
            kind, result = comm.broadcast_object(outcome, root=0)
        except cc.CollectiveError as unheard:
            if failure is None:
                raise
            # This rank's own error explains more than the failed broadcast.
            raise failure from unheard
        # Rank 0 raises its own exception, with its traceback. Other ranks raise rank 0's text, as
        # their own errors are part of it; but an interrupt of this rank must not be lost.
        if failure is not None and (comm.rank == 0 or not isinstance(failure, Exception)):
            raise failure
        if not kind:
            return result  # type: ignore[no-any-return]
        raise sharded_writing.error_of(what, kind, result, "")

    def _follow(self, work: Callable[[], object] | None) -> BaseException | None:
        """Finish this rank's save in the background, then run `work`; return the error."""
        try:
            try:
                self._finish()
            except Exception as error:  # rank 0 has its report and raises it on all ranks
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
