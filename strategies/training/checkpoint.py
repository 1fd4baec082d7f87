"""Checkpoints: named arrays in a directory, complete or not there, whenever the process dies.

    run/step-000120/rank-00000.safetensors      the arrays
    run/step-000120/manifest.json               lengths, checksums, metadata (see `manifest`)
    run/latest                                  one line: the name of the newest, for people
    run/.lock                                   held while somebody writes
    run/.tmp-step-000121, .tmp-latest           half-written; removed by the next save

A checkpoint is written in `.tmp-step-000120`, fsynced, and gets its name by one rename.
Where the step exists already, the old directory steps aside as `.old-step-000120`, is found under
that name should the process die just then, and is deleted last. *Newest* means written last, which
after going back to an earlier step is not the highest step. Nothing here is pickled.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies import errors
from strategies.training import durable, manifest, retention, shards
from strategies.training.retention import Best, Rules

__all__ = [
    "Checkpoint",
    "Draft",
    "best",
    "latest",
    "name_of",
    "places",
    "prepare",
    "restore",
    "save",
    "verify",
    "write",
]

_log = logging.getLogger(__name__)
_DIRECTORY_NAME = re.compile(r"(?:\.old-)?step-(\d{6,15})")  # 15 digits: `manifest.MAX_STEP`

# Half-written. Exactly our own names: the directory may hold other people's files.
_LEFTOVERS = re.compile(r"\.tmp-(?:latest|step-\d{6,15})")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint held.

    Attributes:
        step: training step at which it was written.
        tensors: name -> array in host memory, owned by the caller, writable.
        metadata: the JSON object given to `save`.
        path: directory that it was read from.
    """

    step: int
    tensors: dict[str, npt.NDArray[Any]]
    metadata: dict[str, Any]
    path: Path


def save(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, npt.ArrayLike],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int = 5,
) -> Path:
    """Write a checkpoint that is there completely or not at all; delete old ones beyond `keep`.

    The arrays must not change during the call. A checkpoint of the same step is replaced. Deleted
    are complete checkpoints of lower steps, those written first, until `keep` are left with the
    new one; never one of a higher step.

    Args:
        directory: created when it does not exist.
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
    """
    draft = prepare(tensors, step=step, metadata=metadata, rules=Rules(keep))
    root = Path(directory)
    with durable.DirectoryLock(root):
        return write(draft, root)


def restore(directory: str | os.PathLike[str], *, step: int | None = None) -> Checkpoint:
    """Read a checkpoint after its lengths and checksums have been verified.

    Args:
        directory: a checkpoint (`run/step-000120`), or a directory of checkpoints (`run`).
        step: which checkpoint of the directory; the newest complete one by default.

    Raises:
        NotFoundError: there is no such checkpoint, or one of its files is missing.
        DataLossError: a file is damaged or unsafe; the message names it and the tensor.
        FailedPreconditionError: written by a newer version of the library, or not readable.
        ResourceExhaustedError: the tensors do not fit in memory.
    """
    root = Path(directory)
    with durable.explained("restore", root):
        path = _choose(root, step)
        plan, found = _verified(path)
        tensors: dict[str, npt.NDArray[Any]] = {}
        for file, (entries, starts) in found.items():
            tensors |= shards.read(path / file, entries, starts)
    ordered = {name: tensors[name] for name in plan.tensors}
    return Checkpoint(plan.step, ordered, dict(plan.metadata), path)


def verify(path: str | os.PathLike[str]) -> None:
    """Read all of one checkpoint and compare lengths and checksums, with little memory.

    Raises:
        OpError: as `restore`.
    """
    with durable.explained("verify", Path(path)):
        _verified(Path(path))


def places(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a directory in the order of their steps, complete or not.

    Args:
        directory: of checkpoints; or a checkpoint, which is then the only one.

    Raises:
        NotFoundError: there is none.
    """
    root = Path(directory)
    with durable.explained("places", root):
        if _is_one(root):
            return [root]
        candidates = _candidates(root)
    if not candidates:
        raise errors.NotFoundError(f"places: no checkpoint (directory: {root})")
    return [candidates[step] for step in sorted(candidates)]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint: manifest in order, all files there at full length.

    What is incomplete is passed over with a warning in the log. Neither the pointer `latest` nor
    the clock is needed: each manifest holds its place in the order of writing.
    """
    root = Path(directory)
    with durable.explained("latest", root):
        found = _complete(root) if root.exists() else []
    newest = max(found, key=lambda item: (item[1].sequence, item[1].step), default=None)
    return newest[0] if newest else None


def best(directory: str | os.PathLike[str], best: Best) -> Path | None:
    """Find the complete checkpoint with the best metric; of equal ones that written first.

    Args:
        directory: of checkpoints.
        best: "min" or "max".

    Returns:
        None where no checkpoint has a metric.
    """
    root = Path(directory)
    with durable.explained("best", root):
        found = {plan.step: (path, plan) for path, plan in _complete(root)} if root.exists() else {}
    chosen = retention.best_of(best, [plan for _, plan in found.values()])
    return None if chosen is None else found[chosen.step][0]


@dataclass(frozen=True)
class Draft:
    """A checkpoint that has been checked but not written: all of it can be stored."""

    arrays: dict[str, npt.NDArray[Any]]
    step: int
    metadata: dict[str, Any]
    rules: Rules
    world_size: int
    metric: float | None


def prepare(
    tensors: Mapping[str, npt.ArrayLike],
    *,
    step: int,
    metadata: Mapping[str, Any] | None,
    rules: Rules,
    metric: float | None = None,
    world_size: int = 1,
) -> Draft:
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
    arrays = shards.as_arrays(tensors)
    if metric is not None:
        metric = _metric(metric)
    copied = manifest.json_copy(metadata)
    return Draft(arrays, int(step), copied, rules, world_size, metric)


def _metric(given: Any) -> float | None:
    try:
        metric = float(given)
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgumentError(
            f"save: bad metric, expected a number, got {given!r}"
        ) from error
    return metric if math.isfinite(metric) else None


def name_of(step: int) -> str:
    """Return what the directory of a checkpoint is called."""
    return f"step-{step:06d}"


def write(draft: Draft, root: Path) -> Path:
    """Write, name and point to the checkpoint, then prune; the caller holds the lock."""
    final = root / name_of(draft.step)
    part, pointer = root / f".tmp-{final.name}", root / ".tmp-latest"
    with durable.explained("save", final):
        _recover(root)
        others = _complete(root)
        sequence = 1 + max((plan.sequence for _, plan in others), default=0)
        if sequence >= manifest.MAX_SEQUENCE:
            raise errors.FailedPreconditionError(
                f"save: a checkpoint here takes the last place in the order of writing, expected "
                f"room for a later one (directory: {root}). Save to another directory"
            )
        try:
            # The pointer is written before the checkpoint gets its name, because a disk may fill
            # up here but not in a rename.
            plan = _fill(part, draft, sequence=sequence)
            durable.write_file(pointer, f"{final.name}\n".encode())
            if os.path.lexists(final):
                durable.rename(final, root / f".old-{final.name}")
            durable.rename(part, final)
            durable.rename(pointer, root / "latest")
        except BaseException:
            with contextlib.suppress(OSError):
                _recover(root)
            raise
    paths = {other.step: path for path, other in others}
    gone = retention.surplus(draft.rules, [other for _, other in others], plan)
    _prune(root, [paths[step] for step in gone])
    return final


def _fill(part: Path, draft: Draft, *, sequence: int) -> manifest.Manifest:
    """Write everything into a new directory, durably."""
    name = "rank-00000.safetensors"
    part.mkdir()
    shards.write(part / name, draft.arrays)
    entries = {
        tensor: manifest.TensorEntry(
            name, array.shape, array.dtype.name, manifest.checksum(shards.as_bytes(array).data)
        )
        for tensor, array in draft.arrays.items()
    }
    plan = manifest.Manifest(
        step=draft.step,
        sequence=sequence,
        world_size=draft.world_size,
        files={name: (part / name).stat().st_size},
        tensors=entries,
        metadata=draft.metadata,
        written=time.time(),
        metric=draft.metric,
    )
    durable.write_file(part / manifest.NAME, plan.encode())
    durable.sync(part)
    return plan


def _is_one(root: Path) -> bool:
    """Whether the directory is a checkpoint, by its name or its content."""
    named = _DIRECTORY_NAME.fullmatch(root.name) is not None and root.is_dir()
    return named or (root / manifest.NAME).exists()


_Entries = dict[str, manifest.TensorEntry]


def _verified(path: Path) -> tuple[manifest.Manifest, dict[str, tuple[_Entries, dict[str, int]]]]:
    """Return the manifest, and by file its tensors and their places in bytes; all is in order."""
    plan = manifest.read(path)
    entries: dict[str, _Entries] = {name: {} for name in plan.files}
    for name, entry in plan.tensors.items():
        entries[entry.file][name] = entry
    return plan, {file: (own, shards.verify(path / file, own)) for file, own in entries.items()}


def _choose(root: Path, step: int | None) -> Path:
    """Find the directory of the checkpoint that is meant."""
    if step is None and _is_one(root):
        return root
    candidates = _candidates(root)
    path = candidates.get(step) if step is not None else latest(root)
    if path is None and step is None and candidates:
        return candidates[max(candidates)]  # reading it says why it does not count
    if path is None:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise errors.NotFoundError(
            f"restore: no {wanted}, got steps {sorted(candidates)} (directory: {root})"
        )
    return path


def _candidates(root: Path) -> dict[int, Path]:
    """Give step -> directory that by its name is a checkpoint; links are not followed."""
    found = {}
    # ".old-step-1" sorts before "step-1" and so counts only where that is missing.
    for path in sorted(root.iterdir()):
        match = _DIRECTORY_NAME.fullmatch(path.name)
        if not match or path.is_symlink() or not path.is_dir():
            continue
        if path.name.endswith(name_of(int(match[1]))):
            found[int(match[1])] = path
    return found


def _complete(root: Path) -> list[tuple[Path, manifest.Manifest]]:
    """Give the complete checkpoints of the directory."""
    found = []
    for step, path in _candidates(root).items():
        try:
            plan = manifest.read(path)
        except errors.OpError as error:
            _log.warning("checkpoint passed over: %s", error)
            continue
        if plan.step == step:
            found.append((path, plan))
        else:
            _log.warning("checkpoint passed over: holds step %d (directory: %s)", plan.step, path)
    return found


def _recover(root: Path) -> None:
    """Undo or finish what a save that died left behind; the caller holds the lock."""
    for path in sorted(root.iterdir()):
        if _LEFTOVERS.fullmatch(path.name):
            durable.remove(path)
        elif path.name.startswith(".old-") and _DIRECTORY_NAME.fullmatch(path.name):
            final = root / path.name.removeprefix(".old-")
            if os.path.lexists(final):
                durable.remove(path)
            else:
                durable.rename(path, final)


def _prune(root: Path, paths: list[Path]) -> None:
    """Delete what was replaced, and `paths`, renamed first: none is ever found half-deleted."""
    try:
        _recover(root)
        for path in paths:
            trash = root / f".tmp-{path.name}"
            durable.rename(path, trash)
            durable.remove(trash)
    except OSError as error:
        _log.warning("save: old checkpoints were not deleted: %s (directory: %s)", error, root)
