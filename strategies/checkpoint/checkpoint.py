"""One checkpoint: named arrays in a directory, written atomically.

    run/step-000120/rank-00000.safetensors      what rank 0 has written of the arrays
    run/step-000120/manifest.json               lengths, checksums, metadata (see `manifest`)
    run/latest                                  one line: the name of the newest, for people
    run/.lock                                   held while somebody writes
    run/.tmp-step-000121, .tmp-latest           half-written; removed by the next save

`writing` says how that is done, also behind URLs. *Newest* means written last, which after going
back to an earlier step is not the highest step. Nothing here is pickled.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies import errors
from strategies.checkpoint import manifest, shards, transaction
from strategies.checkpoint.boxes import Box, Slice, inside, whole
from strategies.checkpoint.checkpoint_listing import best, latest, list_steps, name_of, select
from strategies.checkpoint.manifest import Manifest, SliceEntry, TensorEntry
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
    "latest",
    "name_of",
    "slices_of_rank",
    "list_steps",
    "prepare",
    "read",
    "read_all",
    "restore",
    "save",
    "verify",
    "write_alone",
    "write_shard",
]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint held.

    Attributes:
        step: training step at which it was written.
        tensors: name -> array in host memory, owned by the caller, writable.
        metadata: the JSON object given to `save`.
        path: directory that it was read from: a `Path`, or what stands for a URL.
    """

    step: int
    tensors: dict[str, npt.NDArray[Any]]
    metadata: dict[str, Any]
    path: Location


def save(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, npt.ArrayLike],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int = 5,
) -> Location:
    """Write a checkpoint that is there completely or not at all; delete old ones beyond `keep`.

    The arrays must not change during the call. A checkpoint of the same step is replaced. Deleted
    are complete checkpoints of lower steps, those written first, until `keep` are left with the
    new one; never one of a higher step.

    Args:
        directory: a path, created when it does not exist, or a URL.
        tensors: name -> host array (or scalar) of a dtype in `manifest.DTYPES`, any shape.
        step: training step, >= 0.
        metadata: small facts that JSON holds unchanged, such as the position of a reader.
        keep: how many checkpoints stay, >= 1.

    Returns:
        The directory of the checkpoint, `directory/step-000120`.

    Raises:
        InvalidArgumentError: a tensor, name, step, metadata or keep that cannot be stored.
        ResourceExhaustedError: the disk is full; what was there before is untouched.
        FailedPreconditionError: another writer uses the directory, or it cannot be written.
        UnavailableError: what is behind the URL cannot be reached.
        ImportError: a URL, and fsspec is not installed.
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
        step: which checkpoint of the directory; the newest complete one by default.

    Raises:
        NotFoundError: there is no such checkpoint, or one of its files is missing.
        DataLossError: a file is damaged or unsafe; the message names it and the tensor.
        FailedPreconditionError: written by a newer version of the library, or not readable.
        ResourceExhaustedError: the tensors do not fit in memory.
    """
    root = resolve(directory)
    with explained("restore", root):
        path = select(root, step)
    plan, tensors = read_all(path)
    return Checkpoint(plan.step, tensors, dict(plan.metadata), path)


def read_all(path: Location) -> tuple[Manifest, dict[str, npt.NDArray[Any]]]:
    """Read the manifest and all tensors of a checkpoint.

    Raises:
        OpError: as `restore`.
    """
    plan = manifest.read(path)
    tensors = {
        name: shards.empty(name, entry.shape, entry.dtype) for name, entry in plan.tensors.items()
    }
    targets = {
        (name, one.box): Target(whole(entry.shape), tensors[name])
        for name, entry in plan.tensors.items()
        for one in entry.slices
    }
    read(path, plan, targets)
    return plan, tensors


def verify(path: str | os.PathLike[str]) -> None:
    """Read all of one checkpoint and compare lengths and checksums, with little memory.

    Raises:
        OpError: as `restore`.
    """
    place = resolve(path)
    with explained("verify", place):
        read(place, manifest.read(place), None)


def read(path: Location, plan: Manifest, targets: Targets | None) -> None:
    """Read what is wanted of a checkpoint, and verify it on the way.

    Args:
        path: of the checkpoint.
        plan: its manifest.
        targets: for each slice that is wanted, where its elements go; None: verify all.

    Raises:
        OpError: as `restore`.
    """
    by_file: dict[str, dict[str, TensorEntry]] = {name: {} for name in plan.files}
    needed = set(plan.files) if targets is None else set()
    for name, entry in plan.tensors.items():
        for one in entry.slices:
            by_file[one.file][name] = entry
            if targets is not None and (name, one.box) in targets:
                needed.add(one.file)
    for file, entries in by_file.items():
        if file in needed or not entries:  # an empty one costs nothing to check
            with explained("restore", path / file):
                shards.read(path, file, entries, targets, plan.checksum)


@dataclass(frozen=True)
class PreparedCheckpoint:
    """A checkpoint that has been checked but not written: all of it can be stored.

    Attributes:
        slices: name -> what this rank holds.
        step: as given to `prepare`, like what follows.
    """

    slices: dict[str, Slice]
    step: int
    metadata: dict[str, Any]
    rules: RetentionPolicy
    world_size: int
    metric: float | None

    def held(self) -> dict[str, HeldPart]:
        """Say what this rank has, for `write_plan.assign_writers`."""
        return {
            name: HeldPart(part.array.dtype.name, part.array.itemsize, part.shape, part.box)
            for name, part in self.slices.items()
        }


class Written(NamedTuple):
    """A file of a checkpoint that has been written.

    Attributes:
        file: its name.
        nbytes: its length.
        shapes: tensor name -> dtype and shape of the whole.
        slices: tensor name and what the manifest says of a slice.
    """

    file: str
    nbytes: int
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    slices: list[tuple[str, SliceEntry]]


def prepare(
    tensors: Mapping[str, npt.ArrayLike | Slice],
    *,
    step: int,
    metadata: Mapping[str, Any] | None,
    rules: RetentionPolicy,
    metric: float | None = None,
    world_size: int = 1,
) -> PreparedCheckpoint:
    """Check the arguments of `save` before anything touches the disk.

    A metric that is not a finite number, such as the loss of a run that diverges, counts as none.

    Raises:
        InvalidArgumentError: something cannot be stored.
    """
    for name, value, low in (("step", step, 0), ("keep", rules.keep, 1)):
        right = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not right or not low <= value < manifest.MAX_STEP:
            raise errors.InvalidArgumentError(
                f"save: bad {name}, expected an integer in {low}..{manifest.MAX_STEP - 1}, "
                f"got {value!r}"
            )
    slices = shards.as_slices(tensors)
    if metric is not None:
        metric = _metric(metric)
    copied = manifest.json_copy(metadata)
    return PreparedCheckpoint(slices, int(step), copied, rules, world_size, metric)


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
    """Return the arrays that a rank writes, as views where they lie in one run.

    Args:
        draft: what it has.
        share: names and boxes that it writes; if None it writes alone.

    Raises:
        InvalidArgumentError: it writes alone, and has a tensor only in part.
    """
    found = []
    if share is None:
        try:
            (share,) = assign_writers([draft.held()])
        except errors.InvalidArgumentError as error:
            raise errors.InvalidArgumentError(
                f"{error}. Where ranks have parts, make the manager with sharded=True"
            ) from error
    for name, box in share:
        part = draft.slices[name]
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
    """Write one file of a checkpoint; any process that reaches the directory may do it.

    Args:
        part: where, of the `CheckpointTransaction`.
        suffix: of the file's name, likewise.
        rank: who writes.
        given: what to write.
        job: what the number counts.
        rest: called between pieces of about a MiB.

    Raises:
        OpError: it cannot be written.
    """
    name = f"{job}-{rank:05d}{suffix}.safetensors"
    path = part / name
    with explained("save", path), transaction.new_file(path) as put:
        nbytes, entries = shards.write(put, name, given, rest)
    shapes = {piece.name: (piece.array.dtype.name, piece.shape) for piece in given}
    return Written(name, nbytes, shapes, entries)


def commit(
    begun: CheckpointTransaction,
    draft: PreparedCheckpoint,
    write: Callable[[CheckpointTransaction], list[Written]],
) -> Location:
    """Have the files of a checkpoint written, complete it, and delete what need not stay.

    Args:
        begun: the checkpoint, which is abandoned if anything fails.
        draft: what it is.
        write: is given `begun`, returns all that has been `Written`.

    Raises:
        OpError: as `save`.
    """
    try:
        with explained("save", begun.final):
            plan = _plan(begun, draft, write(begun))
            begun.commit(plan)
    except BaseException:
        begun.abandon()
        raise
    begun.prune(draft.rules, plan)
    return begun.final


def write_alone(
    root: Location,
    draft: PreparedCheckpoint,
    given: list[NamedSlice],
    rest: Callable[[], object] | None = None,
) -> Location:
    """Write a checkpoint in one file; the caller holds the right to write in the directory."""

    def write(begun: CheckpointTransaction) -> list[Written]:
        return [write_shard(begun.part, begun.suffix, 0, given, rest=rest)]

    return commit(transaction.begin(root, draft.step), draft, write)


def _plan(
    begun: CheckpointTransaction, draft: PreparedCheckpoint, written: list[Written]
) -> Manifest:
    """Return what the manifest says."""
    slices: dict[str, list[SliceEntry]] = {name: [] for name in draft.slices}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for one in written:
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
        written=time.time(),
        metric=draft.metric,
    )
