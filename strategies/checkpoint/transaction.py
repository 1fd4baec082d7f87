"""Transaction of one checkpoint: committed completely or not at all.

In a directory it is written beside its place, fsynced, and gets its name by one rename::

    run/.tmp-step-000120/rank-00003.safetensors, manifest.json     then     run/step-000120

Where the step exists already, the old directory steps aside as `.old-step-000120`, is found under
that name should the process die just then, and is deleted last.

Behind a URL nothing can be renamed, and the manifest decides, which is written last, in one piece::

    url/step-000120/rank-00003-5f1c0ae27d90.safetensors            then     .../manifest.json

Files of each save have names of their own, so that where a step is saved again the old manifest
holds until the new one takes its place. What a save that died has left is deleted by the next one
of the same step.
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
# Half-written. Exactly our own names: the directory may hold other people's files.
_LEFTOVERS = re.compile(r"\.tmp-(?:latest|step-\d{6,15})")
_SHARD = re.compile(r"[a-z]+-\d{5,}-[0-9a-f]{12}\.safetensors")
# The files of a checkpoint: a directory with any other file is never deleted.
_CHECKPOINT_FILES = re.compile(
    rf"{re.escape(manifest.NAME)}|[a-z]+-\d{{5,}}(?:-[0-9a-f]{{12}})?\.safetensors"
)


class CheckpointTransaction(ABC):
    """A checkpoint that has been begun; `commit` or `abandon` ends it.

    Attributes:
        part: where its files are written.
        suffix: of their names, before ".safetensors".
        final: where the checkpoint will be.
        sequence: its place in the order of writing.
    """

    def __init__(self, root: Location, step: int, part: Location, suffix: str) -> None:
        self.root = root
        self.final = root / checkpoint_listing.name_of(step)
        self.part = part
        self.suffix = suffix
        self.others = checkpoint_listing.complete(root)
        self.sequence = 1 + max((plan.sequence for _, plan in self.others), default=0)
        if self.sequence >= manifest.MAX_SEQUENCE:
            raise errors.FailedPreconditionError(
                f"save: a checkpoint here takes the last place in the order of writing, expected "
                f"room for a later one (directory: {root}). Save to another directory"
            )

    @abstractmethod
    def commit(self, plan: Manifest) -> None:
        """Write the manifest, which completes the checkpoint; all files are there."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove what has been written, as far as that is possible."""

    def prune(self, rules: RetentionPolicy, plan: Manifest) -> None:
        """Delete what need not stay now that this one is there; what cannot be done is logged."""
        paths = {other.step: path for path, other in self.others}
        gone = retention.to_delete(rules, [other for _, other in self.others], plan)
        try:
            with explained("save", self.root):
                self._delete([paths[step] for step in gone])
        except errors.OpError as error:
            _log.warning("save: old checkpoints were not deleted: %s", error)

    @abstractmethod
    def _delete(self, paths: Sequence[Any]) -> None:
        """Delete checkpoints, so that none is ever found half-deleted, and leftovers."""


def locked(root: Location) -> atomic_io.DirectoryLock | contextlib.nullcontext[None]:
    """Take the right to write in a directory; behind a URL `commit` finds out about others.

    Raises:
        FailedPreconditionError: somebody else has it.
    """
    return (
        contextlib.nullcontext() if isinstance(root, StorageUrl) else atomic_io.DirectoryLock(root)
    )


def begin(root: Location, step: int) -> CheckpointTransaction:
    """Begin to write; the caller holds the right to write in the directory."""
    with explained("save", root / checkpoint_listing.name_of(step)):
        return _BehindUrl(root, step) if isinstance(root, StorageUrl) else _InDirectory(root, step)


@contextlib.contextmanager
def new_file(path: Location) -> Iterator[Callable[[Any], object]]:
    """Create a file; yields what appends bytes to it. In the end it is safely stored."""
    if isinstance(path, Path):
        with atomic_io.new_file(path) as put:
            yield put
        return
    with path.files.open(path.path, "wb") as file:
        try:
            yield file.write
        except BaseException:
            file.discard() if hasattr(file, "discard") else None
            raise


class _InDirectory(CheckpointTransaction):
    root: Path
    final: Path
    part: Path

    def __init__(self, root: Path, step: int) -> None:
        _recover(root)
        super().__init__(root, step, root / f".tmp-{checkpoint_listing.name_of(step)}", "")
        self.part.mkdir()

    def commit(self, plan: Manifest) -> None:
        pointer = self.root / ".tmp-latest"
        atomic_io.write_file(self.part / manifest.NAME, plan.encode())
        atomic_io.sync(self.part)
        # The pointer is written before the checkpoint gets its name, because a disk may fill up
        # here but not in a rename.
        atomic_io.write_file(pointer, f"{self.final.name}\n".encode())
        if os.path.lexists(self.final):
            atomic_io.rename(self.final, self.root / f".old-{self.final.name}")
        atomic_io.rename(self.part, self.final)
        atomic_io.rename(pointer, self.root / "latest")

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            _recover(self.root)

    def _delete(self, paths: Sequence[Path]) -> None:
        _recover(self.root)
        for path in paths:
            if _may_delete(path):
                trash = self.root / f".tmp-{path.name}"
                atomic_io.rename(path, trash)
                atomic_io.remove(trash)


def _recover(root: Path) -> None:
    """Undo or finish what a save that died left behind."""
    for path in sorted(root.iterdir()):
        if _LEFTOVERS.fullmatch(path.name):
            if _may_delete(path):
                atomic_io.remove(path)
        elif path.name.startswith(".old-") and checkpoint_listing.DIRECTORY_NAME.fullmatch(
            path.name
        ):
            final = root / path.name.removeprefix(".old-")
            if not os.path.lexists(final):
                atomic_io.rename(path, final)
            elif _may_delete(path):
                atomic_io.remove(path)


def _may_delete(path: Path) -> bool:
    """Return False for a directory with files that no save has written, and warn of them."""
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
        super().__init__(root, step, place, f"-{secrets.token_hex(6)}")
        place.files.makedirs(place.path, exist_ok=True)

    def commit(self, plan: Manifest) -> None:
        newest = max((p.sequence for _, p in checkpoint_listing.complete(self.root)), default=0)
        if newest >= self.sequence:
            raise errors.FailedPreconditionError(
                f"save: another writer uses this directory, expected one at a time, got a "
                f"checkpoint that was written meanwhile (directory: {self.root}). Give each job a "
                f"directory of its own"
            )
        self.root.files.pipe_file((self.final / manifest.NAME).path, plan.encode())
        self.root.files.pipe_file((self.root / "latest").path, f"{self.final.name}\n".encode())
        self._sweep(set(plan.files))

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            mine = [
                name
                for name in _names_in(self.final)
                if name.endswith(f"{self.suffix}.safetensors")
            ]
            self._remove(self.final, mine)

    def _sweep(self, keep: set[str]) -> None:
        """Remove files of earlier saves of this step."""
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
                path.files.rm_file((path / manifest.NAME).path)  # from here on it is none
                path.files.rm(path.path, recursive=True)


def _names_in(place: StorageUrl) -> list[str]:
    place.files.invalidate_cache(place.path)
    found = place.files.ls(place.path, detail=False)
    return [name.rstrip("/").rpartition("/")[2] for name in found]
