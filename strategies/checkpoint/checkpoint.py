"""One checkpoint: named arrays in a directory, written atomically.

    run/step-000120/rank-00000.safetensors      the arrays that rank 0 has written
    run/step-000120/manifest.json               lengths, checksums, metadata (see `manifest`)
    run/latest                                  one line: the name of the newest, for people
    run/.lock                                   locked by the current writer
    run/.tmp-step-000121, .tmp-latest           incomplete; removed by the next save

`transaction` has the steps of a save, also for URLs. *Newest* means written last. After a return to
an earlier step the newest checkpoint does not have the highest step. Nothing here is pickled.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies import errors
from strategies.checkpoint import manifest, shards, transaction
from strategies.checkpoint.boxes import Box, Slice, inside
from strategies.checkpoint.checkpoint_listing import best, latest, list_steps, name_of, select
from strategies.checkpoint.manifest import Manifest, SliceEntry, TensorEntry
from strategies.checkpoint.remote_state import RemoteState, RemoteTensor, Written
from strategies.checkpoint.retention import RetentionPolicy
from strategies.checkpoint.shards import NamedSlice, Target, Targets
from strategies.checkpoint.storage import Location, explained, resolve
from strategies.checkpoint.transaction import CheckpointTransaction
from strategies.checkpoint.write_plan import HeldPart, assign_writers

__all__ = [
    "Checkpoint",
    "PreparedCheckpoint",
    "Written",
    "best",
    "commit",
    "fill",
    "latest",
    "name_of",
    "slices_of_rank",
    "list_steps",
    "prepare",
    "read",
    "read_boxes",
    "restore",
    "save",
    "verify",
    "write_alone",
    "write_shard",
]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: training step of the save.
        tensors: name -> writable array in host memory, owned by the caller.
        metadata: the JSON object passed to `save`.
        path: directory of the checkpoint: a `Path`, or a `StorageUrl`.
        manifest: shapes, files and checksums of all its tensors.
    """

    step: int
    tensors: dict[str, npt.NDArray[Any]]
    metadata: dict[str, Any]
    path: Location
    manifest: Manifest = field(repr=False)


def save(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, npt.ArrayLike],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int = 5,
) -> Location:
    """Write a checkpoint atomically and delete old checkpoints beyond `keep`.

    The arrays must not change during the call. A checkpoint of the same step is replaced. `save`
    deletes complete checkpoints of lower steps, oldest first, until `keep` remain with the new one.
    It never deletes checkpoints of higher steps.

    Args:
        directory: a path, created if it does not exist, or a URL.
        tensors: name -> host array (or scalar) of a dtype in `manifest.DTYPES`, any shape.
        step: training step, >= 0.
        metadata: values that JSON represents exactly, such as the position of a reader.
        keep: number of checkpoints to keep, >= 1.

    Returns:
        The directory of the checkpoint, `directory/step-000120`.

    Raises:
        InvalidArgumentError: a tensor, name, step, metadata or keep is invalid.
        ResourceExhaustedError: the disk is full; earlier checkpoints are untouched.
        FailedPreconditionError: another writer uses the directory, or it is not writable.
        UnavailableError: the storage of the URL cannot be reached.
        ImportError: the directory is a URL, and fsspec is not installed.
    """
    draft = prepare(tensors, step=step, metadata=metadata, rules=RetentionPolicy(keep))
    root = resolve(directory)
    with transaction.locked(root):
        return write_alone(root, draft, slices_of_rank(draft))


def restore(directory: str | os.PathLike[str], *, step: int | None = None) -> Checkpoint:
    """Read a checkpoint and verify lengths and checksums.

    Args:
        directory: a checkpoint (`run/step-000120`), or a directory of checkpoints (`run`); a path
            or a URL.
        step: step of the checkpoint; None reads the newest complete one.

    Raises:
        NotFoundError: the checkpoint or one of its files does not exist.
        DataLossError: a file is damaged or unsafe; the message names it and the tensor.
        FailedPreconditionError: a newer version of the library wrote it, or it is not readable.
        ResourceExhaustedError: the tensors do not fit in memory.
    """
    root = resolve(directory)
    path = select(root, step)
    plan = manifest.read(path)
    tensors = read_boxes(path, plan, plan.boxes())
    return Checkpoint(plan.step, tensors, dict(plan.metadata), path, plan)


def read_boxes(
    path: Location, plan: Manifest, boxes: Mapping[str, Box]
) -> dict[str, npt.NDArray[Any]]:
    """Read a box of each of some tensors.

    Args:
        path: the checkpoint.
        plan: its manifest.
        boxes: name of a tensor -> box of its elements.

    Raises:
        OpError: as `restore`.
    """
    tensors = {
        name: shards.empty(name, box.shape, plan.tensors[name].dtype) for name, box in boxes.items()
    }
    fill(path, plan, [(name, Target(box, tensors[name])) for name, box in boxes.items()])
    return tensors


def fill(path: Location, plan: Manifest, targets: Iterable[tuple[str, Target]]) -> None:
    """Read parts of tensors, given by name and destination; parts of one tensor are disjoint.

    Raises:
        OpError: as `restore`.
    """
    found: dict[tuple[str, Box], list[Target]] = {}
    for name, target in targets:
        # Each slice fills its own elements of the target.
        for one in plan.tensors[name].slices:
            found.setdefault((name, one.box), []).append(target)
    read(path, plan, found)


def verify(path: str | os.PathLike[str]) -> None:
    """Read a whole checkpoint in small chunks and compare lengths and checksums.

    Raises:
        OpError: as `restore`.
    """
    place = resolve(path)
    with explained("verify", place):
        read(place, manifest.read(place), None)


def read(path: Location, plan: Manifest, targets: Targets | None) -> None:
    """Read and verify the requested slices of a checkpoint.

    Args:
        path: the checkpoint.
        plan: its manifest.
        targets: destinations of each requested slice; None verifies all slices.

    Raises:
        OpError: as `restore`.
    """
    # By file, so that each one is opened once and compared with all of its slices.
    by_file: dict[str, dict[str, TensorEntry]] = {name: {} for name in plan.files}
    needed = set(plan.files) if targets is None else set()
    for name, entry in plan.tensors.items():
        for one in entry.slices:
            by_file[one.file][name] = entry
            if targets is not None and (name, one.box) in targets:
                needed.add(one.file)
    for file, entries in by_file.items():
        if file in needed or not entries:  # the check of a file without tensors costs nothing
            with explained("restore", path / file):
                shards.read(path, file, entries, targets, plan.checksum)


@dataclass(frozen=True)
class PreparedCheckpoint:
    """A validated checkpoint that is not written yet.

    Attributes:
        slices: name -> this rank's part of the tensor.
        remote: name -> tensor that other tasks write.
        step: the argument of `prepare`, as are the other fields.
    """

    slices: dict[str, Slice]
    remote: dict[str, RemoteTensor]
    step: int
    metadata: dict[str, Any]
    rules: RetentionPolicy
    world_size: int
    metric: float | None

    def remote_names(self) -> dict[RemoteState, dict[str, str]]:
        """Return for each remote state: name in the state -> name in the checkpoint."""
        found: dict[RemoteState, dict[str, str]] = {}
        for name, tensor in self.remote.items():
            found.setdefault(tensor.state, {})[tensor.name] = name
        return found

    def held(self) -> dict[str, HeldPart]:
        """Return this rank's parts, for `write_plan.assign_writers`."""
        return {
            name: HeldPart(part.array.dtype.name, part.array.itemsize, part.shape, part.box)
            for name, part in self.slices.items()
        }


def prepare(
    tensors: Mapping[str, npt.ArrayLike | Slice | RemoteTensor],
    *,
    step: int,
    metadata: Mapping[str, Any] | None,
    rules: RetentionPolicy,
    metric: float | None = None,
    world_size: int = 1,
) -> PreparedCheckpoint:
    """Validate the arguments of `save` before anything is written.

    A metric that is not finite, such as the loss of a diverging run, counts as None.

    Raises:
        InvalidArgumentError: an argument cannot be stored.
    """
    for name, value, low in (("step", step, 0), ("keep", rules.keep, 1)):
        # True and False are integers in Python, but an error here.
        right = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not right or not low <= value < manifest.MAX_STEP:
            raise errors.InvalidArgumentError(
                f"save: bad {name}, expected an integer in {low}..{manifest.MAX_STEP - 1}, "
                f"got {value!r}"
            )
    # The arrays are checked before any rank creates a file: a bad dtype leaves nothing behind.
    remote = {name: x for name, x in tensors.items() if isinstance(x, RemoteTensor)}
    slices = shards.as_slices(
        {name: x for name, x in tensors.items() if not isinstance(x, RemoteTensor)}
    )
    if metric is not None:
        metric = _metric(metric)
    # A copy, because the caller may change its metadata while a thread writes the checkpoint.
    copied = manifest.json_copy(metadata)
    return PreparedCheckpoint(slices, remote, int(step), copied, rules, world_size, metric)


def _metric(given: Any) -> float | None:
    try:
        metric = float(given)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgumentError(
            f"save: bad metric, expected a number, got {given!r}"
        ) from error
    return metric if math.isfinite(metric) else None


def slices_of_rank(
    draft: PreparedCheckpoint, share: Iterable[tuple[str, Box]] | None = None
) -> list[NamedSlice]:
    """Return the arrays that a rank writes, as views where they are contiguous.

    Args:
        draft: the checkpoint.
        share: names and boxes that the rank writes; None if the rank writes alone.

    Raises:
        InvalidArgumentError: the rank writes alone, but has only a part of a tensor.
    """
    found = []
    if share is None:
        try:
            (share,) = assign_writers([draft.held()])
        except errors.InvalidArgumentError as error:
            raise errors.InvalidArgumentError(
                f"{error}. Use sharded=True if ranks hold parts of a tensor"
            ) from error
    for name, box in share:
        part = draft.slices[name]
        # A view: `split` cuts an array in C order along its first axis longer than 1.
        array = np.asarray(part.array[inside(box, part.box)], order="C").reshape(box.shape)
        found.append(NamedSlice(name, part.shape, box, array))
    return found


def write_shard(
    part: Location,
    suffix: str,
    rank: int,
    given: list[NamedSlice],
    job: str = "rank",
    rest: Callable[[], object] | None = None,
) -> Written:
    """Write one file of a checkpoint, from any process that reaches the directory.

    Args:
        part: directory to write to, from the `CheckpointTransaction`.
        suffix: suffix of the file's name, from the `CheckpointTransaction`.
        rank: number of the writer, for the file's name.
        given: the slices to write.
        job: what the number counts, for the file's name.
        rest: called after each chunk of 1 MiB.

    Raises:
        OpError: the file cannot be written.
    """
    # Padded, so that the files of a listing are in rank order.
    name = f"{job}-{rank:05d}{suffix}.safetensors"
    path = part / name
    with explained("save", path), transaction.new_file(path) as put:
        nbytes, entries = shards.write(put, name, given, rest)
    # The shapes travel with the report, because rank 0 may hold no part of this tensor.
    shapes = {piece.name: (piece.array.dtype.name, piece.shape) for piece in given}
    return Written(name, nbytes, shapes, entries)


def commit(
    begun: CheckpointTransaction,
    draft: PreparedCheckpoint,
    write: Callable[[CheckpointTransaction], list[Written]],
) -> Location:
    """Write the files of a checkpoint, complete it, and delete old checkpoints.

    Args:
        begun: the transaction, abandoned if anything fails.
        draft: the checkpoint.
        write: called with `begun`; returns all files that all ranks have `Written`.

    Raises:
        OpError: as `save`.
    """
    try:
        with explained("save", begun.final):
            # The manifest is made last, as it needs the lengths and checksums of all files.
            plan = _plan(begun, draft, write(begun))
            begun.commit(plan)
    except BaseException:
        # Also after an interrupt: partial files take space until the next save.
        begun.abandon()
        raise
    # Delete old checkpoints only now, when the new one is complete.
    begun.prune(draft.rules, plan)
    return begun.final


def write_alone(
    root: Location,
    draft: PreparedCheckpoint,
    given: list[NamedSlice],
    rest: Callable[[], object] | None = None,
) -> Location:
    """Write this process's tensors as one file, and let other tasks write the remote ones.

    The caller holds the directory's lock.
    """

    def write(begun: CheckpointTransaction) -> list[Written]:
        files = [write_shard(begun.part, begun.suffix, 0, given, rest=rest)]
        for state, names in draft.remote_names().items():
            files += state.write(names, begun.part, begun.suffix, gently=rest is not None)
        return files

    try:
        return commit(transaction.begin(root, draft.step), draft, write)
    finally:
        for state in draft.remote_names():
            state.close()


def _plan(
    begun: CheckpointTransaction, draft: PreparedCheckpoint, written: list[Written]
) -> Manifest:
    """Return the manifest."""
    # Start with this rank's names, so that the manifest has the order that the user passed.
    slices: dict[str, list[SliceEntry]] = {name: [] for name in (*draft.slices, *draft.remote)}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for one in written:
        # `assign_writers` has checked that ranks agree on dtype and shape, so any rank's facts do.
        shapes |= one.shapes
        for name, entry in one.slices:
            slices.setdefault(name, []).append(entry)
    return Manifest(
        step=draft.step,
        sequence=begun.sequence,
        world_size=draft.world_size,
        files={one.file: one.nbytes for one in written},
        tensors={
            name: TensorEntry(shapes[name][1], shapes[name][0], tuple(found))
            for name, found in slices.items()
        },
        metadata=draft.metadata,
        # Only for `keep_every_n_hours`. `sequence` decides the order, since clocks may jump.
        written=time.time(),
        metric=draft.metric,
    )
