"""Transaction of one checkpoint: committed completely or not at all.

In a directory, the files are written under a temporary name, fsynced, and renamed at once::

    run/.tmp-step-000120/rank-00003.safetensors, manifest.json     then     run/step-000120

If the step exists already, the old directory is first renamed to `.old-step-000120`. If the process
dies in between, the old checkpoint is found under that name. It is deleted last.

URLs have no rename. There the manifest decides: it is written last, in one piece::

    url/step-000120/rank-00003-5f1c0ae27d90.safetensors            then     .../manifest.json

The files of each save have unique names. If a step is saved again, the old manifest stays valid
until the new one replaces it. The next save of the same step deletes the files of a save that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strategies import errors
from strategies.checkpoint import checkpoint_listing, manifest, retention
from strategies.checkpoint.manifest import Manifest
from strategies.checkpoint.retention import RetentionPolicy
from strategies.checkpoint.storage import Location, StorageUrl, explained
from strategies.core import atomic_io

__all__ = ["CheckpointTransaction", "begin", "locked", "new_file"]

_log = logging.getLogger(__name__)
# Incomplete saves. Only exact names of this module match: the directory may hold foreign files.
_LEFTOVERS = re.compile(r"\.tmp-(?:latest|step-\d{6,15})")
# Only files of URLs have the 12 hexadecimal digits of a save's suffix.
_SHARD = re.compile(r"[a-z]+-\d{5,}-[0-9a-f]{12}\.safetensors")
# The files of a checkpoint: a directory with any other file is never deleted.
_CHECKPOINT_FILES = re.compile(
    rf"{re.escape(manifest.NAME)}|[a-z]+-\d{{5,}}(?:-[0-9a-f]{{12}})?\.safetensors"
)


class CheckpointTransaction(ABC):
    """A checkpoint in progress; `commit` or `abandon` ends it.

    Attributes:
        part: directory to write the files to.
        suffix: suffix of their names, before ".safetensors".
        final: directory of the complete checkpoint.
        sequence: its number in the order of writing.
    """

    def __init__(self, root: Location, step: int, part: Location, suffix: str) -> None:
        self.root = root
        self.final = root / checkpoint_listing.name_of(step)
        self.part = part
        self.suffix = suffix
        # Listed once: `prune` uses the same list, and never deletes the files of another job.
        self.others = checkpoint_listing.complete(root)
        # Counted from all complete checkpoints, so that a return to an earlier step is newest.
        self.sequence = 1 + max((plan.sequence for _, plan in self.others), default=0)
        if self.sequence >= manifest.MAX_SEQUENCE:
            raise errors.FailedPreconditionError(
                f"save: a checkpoint here has the highest sequence number, expected a lower one "
                f"(directory: {root}). Save to another directory"
            )

    @abstractmethod
    def commit(self, plan: Manifest) -> None:
        """Complete the checkpoint by its manifest, after all files are written."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove the written files as far as possible."""

    def prune(self, rules: RetentionPolicy, plan: Manifest) -> None:
        """Delete checkpoints by the retention policy; failures are logged."""
        paths = {other.step: path for path, other in self.others}
        gone = retention.to_delete(rules, [other for _, other in self.others], plan)
        try:
            # A failure must not fail the save, because the new checkpoint is complete.
            with explained("save", self.root):
                self._delete([paths[step] for step in gone])
        except errors.OpError as error:
            _log.warning("save: old checkpoints were not deleted: %s", error)

    @abstractmethod
    def _delete(self, paths: Sequence[Any]) -> None:
        """Delete checkpoints and leftovers; a crash must not leave one that looks complete."""


def locked(root: Location) -> atomic_io.DirectoryLock | contextlib.nullcontext[None]:
    """Lock a directory for writing; for a URL, `commit` detects other writers.

    Raises:
        FailedPreconditionError: another process holds the lock.
    """
    return (
        contextlib.nullcontext() if isinstance(root, StorageUrl) else atomic_io.DirectoryLock(root)
    )


def begin(root: Location, step: int) -> CheckpointTransaction:
    """Begin a checkpoint; the caller holds the directory's lock."""
    with explained("save", root / checkpoint_listing.name_of(step)):
        return _BehindUrl(root, step) if isinstance(root, StorageUrl) else _InDirectory(root, step)


@contextlib.contextmanager
def new_file(path: Location) -> Iterator[Callable[[Any], object]]:
    """Create a file; yield a function that appends bytes. The file is durable after the block."""
    if isinstance(path, Path):
        with atomic_io.new_file(path) as put:
            yield put
        return
    with path.files.open(path.path, "wb") as file:
        try:
            yield file.write
        except BaseException:
            # Closing an fsspec file publishes it, so discard a partial one first.
            file.discard() if hasattr(file, "discard") else None
            raise


class _InDirectory(CheckpointTransaction):
    root: Path
    final: Path
    part: Path

    def __init__(self, root: Path, step: int) -> None:
        # The caller holds the lock, so every leftover is from a save that died.
        _recover(root)
        super().__init__(root, step, root / f".tmp-{checkpoint_listing.name_of(step)}", "")
        # Without `exist_ok`: a directory that `_recover` has not removed holds foreign files.
        self.part.mkdir()

    def commit(self, plan: Manifest) -> None:
        pointer = self.root / ".tmp-latest"
        atomic_io.write_file(self.part / manifest.NAME, plan.encode())
        # All entries must be durable before the rename publishes them.
        atomic_io.sync(self.part)
        # Write the pointer before the checkpoint gets its name: the disk may fill up here, but not
        # in a rename.
        atomic_io.write_file(pointer, f"{self.final.name}\n".encode())
        # A rename cannot replace a directory that has files.
        if os.path.lexists(self.final):
            atomic_io.rename(self.final, self.root / f".old-{self.final.name}")
        atomic_io.rename(self.part, self.final)
        # Last: a crash before it leaves the pointer at an older checkpoint. Readers do not use it.
        atomic_io.rename(pointer, self.root / checkpoint_listing.LATEST)

    def abandon(self) -> None:
        # The save's own error matters more, and the next save cleans up as well.
        with contextlib.suppress(OSError):
            _recover(self.root)

    def _delete(self, paths: Sequence[Path]) -> None:
        # First, because an `.old-` directory of a deleted step would be renamed back later.
        _recover(self.root)
        for path in paths:
            if _may_delete(path):
                # Rename first: a crash in the middle of `remove` then leaves a `.tmp-` directory,
                # which no reader takes for a checkpoint.
                trash = self.root / f".tmp-{path.name}"
                atomic_io.rename(path, trash)
                atomic_io.remove(trash)


def _recover(root: Path) -> None:
    """Undo or finish the renames of a save that died, and remove its files."""
    # Listed first, because the loop renames and removes entries.
    for path in sorted(root.iterdir()):
        if _LEFTOVERS.fullmatch(path.name):
            if _may_delete(path):
                atomic_io.remove(path)
        elif path.name.startswith(".old-") and checkpoint_listing.DIRECTORY_NAME.fullmatch(
            path.name
        ):
            final = root / path.name.removeprefix(".old-")
            # If the save died between its renames, the old checkpoint is still the valid one.
            if not os.path.lexists(final):
                atomic_io.rename(path, final)
            elif _may_delete(path):
                atomic_io.remove(path)


def _may_delete(path: Path) -> bool:
    """Return False and warn if a directory contains files that no save has written."""
    # A file or a link is one of this module's names; `remove` deletes the link, not its target.
    if path.is_symlink() or not path.is_dir():
        return True
    return _has_only_checkpoint_files(
        path, [p.name if p.is_file() else f"{p.name}/" for p in path.iterdir()]
    )


def _has_only_checkpoint_files(place: Location, names: Sequence[str]) -> bool:
    others = sorted(name for name in names if not _CHECKPOINT_FILES.fullmatch(name))
    if others:
        _log.warning(
            "save: a checkpoint is not deleted, since it holds files that no save has written: %s "
            "(directory: %s)", ", ".join(others), place,
        )  # fmt: skip
    return not others


class _BehindUrl(CheckpointTransaction):
    root: StorageUrl
    final: StorageUrl

    def __init__(self, root: StorageUrl, step: int) -> None:
        root.files.makedirs(root.path, exist_ok=True)
        place = root / checkpoint_listing.name_of(step)
        # A random suffix: a repeated save must not overwrite files of the valid manifest.
        super().__init__(root, step, place, f"-{secrets.token_hex(6)}")
        place.files.makedirs(place.path, exist_ok=True)

    def commit(self, plan: Manifest) -> None:
        # Without a lock, a sequence number written since `begin` reveals another writer.
        newest = max((p.sequence for _, p in checkpoint_listing.complete(self.root)), default=0)
        if newest >= self.sequence:
            raise errors.FailedPreconditionError(
                f"save: another writer uses this directory, expected one at a time, got a new "
                f"checkpoint of another writer (directory: {self.root}). Give each job its own "
                f"directory"
            )
        # One put of an object is atomic in object stores: readers see the old or the new manifest.
        self.root.files.pipe_file((self.final / manifest.NAME).path, plan.encode())
        # For people only: readers find the newest checkpoint by sequence numbers.
        self.root.files.pipe_file(
            (self.root / checkpoint_listing.LATEST).path, f"{self.final.name}\n".encode()
        )
        # Only now, because the old manifest needed these files until it was replaced.
        self._sweep(set(plan.files))

    def abandon(self) -> None:
        # The save's own error matters more. Unique names do not disturb a later save.
        with contextlib.suppress(Exception):
            mine = [
                name
                for name in _names_in(self.final)
                if name.endswith(f"{self.suffix}.safetensors")
            ]
            self._remove(self.final, mine)

    def _sweep(self, keep: set[str]) -> None:
        """Remove the files of earlier saves of this step."""
        try:
            gone = [n for n in _names_in(self.final) if _SHARD.fullmatch(n) and n not in keep]
            self._remove(self.final, gone)
        except Exception as error:
            _log.warning("save: old files were not deleted: %s (directory: %s)", error, self.final)

    def _remove(self, place: StorageUrl, names: Sequence[str]) -> None:
        for name in names:
            self.root.files.rm_file((place / name).path)

    def _delete(self, paths: Sequence[StorageUrl]) -> None:
        for path in paths:
            if _has_only_checkpoint_files(path, _names_in(path)):
                # Without its manifest the directory does not count, however far `rm` gets.
                path.files.rm_file((path / manifest.NAME).path)
                path.files.rm(path.path, recursive=True)


def _names_in(place: StorageUrl) -> list[str]:
    # A cached listing would lack files of other ranks.
    place.files.invalidate_cache(place.path)
    found = place.files.ls(place.path, detail=False)
    return [name.rstrip("/").rpartition("/")[2] for name in found]
