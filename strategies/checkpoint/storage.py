"""Checkpoint storage: a local directory or a URL.

A `StorageUrl` has what of `Path` is needed here. Files behind it are reached by fsspec: `s3://`, `gs://`,
`memory://` and so on. `file://` is a directory as any other.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from strategies import errors
from strategies.core import atomic_io
from strategies.core.urls import fsspec, is_url

__all__ = [
    "Location",
    "StorageUrl",
    "explained",
    "exists",
    "folders",
    "length",
    "resolve",
    "opened",
]


class StorageUrl:
    """A directory or file behind a URL.

    Args:
        files: the file system of fsspec.
        path: in it.
        protocol: what stands before "://".
    """

    def __init__(self, files: Any, path: str, protocol: str) -> None:
        self.files = files
        self.path = path.rstrip("/")
        self.protocol = protocol

    def __truediv__(self, name: str) -> StorageUrl:
        return StorageUrl(self.files, f"{self.path}/{name}", self.protocol)

    def __str__(self) -> str:
        # A file system has several names, and gives the first.
        return f"{self.protocol}://{self.files.unstrip_protocol(self.path).partition('://')[2]}"

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"StorageUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageUrl) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return resolve, (str(self),)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> StorageUrl:
        """The directory that it is in."""
        return StorageUrl(self.files, self.path.rpartition("/")[0], self.protocol)


Location: TypeAlias = Path | StorageUrl
os.PathLike.register(StorageUrl)


def resolve(place: str | os.PathLike[str]) -> Location:
    """Return where a path or a URL leads.

    Raises:
        ImportError: a URL, and fsspec or what it needs for this one is not installed.
        InvalidArgumentError: fsspec does not know such URLs.
    """
    text = os.fspath(place)
    if isinstance(place, (Path, StorageUrl)):
        return place
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if not is_url(text):
        return Path(text)
    try:
        files, path = fsspec().core.url_to_fs(text)
    except ValueError as error:
        raise errors.InvalidArgumentError(f"checkpoints: {error} ({text})") from error
    return StorageUrl(files, path, text.partition("://")[0])


@contextlib.contextmanager
def explained(operation: str, place: Location) -> Iterator[None]:
    """As `atomic_io.translate_errors`; other errors of fsspec become `UnavailableError`."""
    try:
        with atomic_io.translate_errors(operation, place):
            yield
    except (errors.OpError, ValueError, TypeError, MemoryError):
        raise
    except Exception as error:
        if isinstance(place, Path):
            raise
        raise errors.UnavailableError(
            f"{operation}: {type(error).__name__}: {error} (file: {place})"
        ) from error


def exists(place: Location) -> bool:
    """Whether there is something of that name."""
    return place.exists() if isinstance(place, Path) else bool(place.files.exists(place.path))


def folders(root: Location) -> list[Location]:
    """Return the directories in a directory, sorted; links are not followed.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(root, Path):
        return [path for path in sorted(root.iterdir()) if not path.is_symlink() and path.is_dir()]
    root.files.invalidate_cache(root.path)
    found = root.files.ls(root.path, detail=True)
    names = [entry["name"] for entry in found if entry["type"] == "directory"]
    return [root / name.rstrip("/").rpartition("/")[2] for name in sorted(names)]


def length(directory: Location, name: str) -> int:
    """Return the bytes in a regular file of a directory, never of one outside.

    Raises:
        NotFoundError: it does not exist.
        DataLossError: it leads out of the directory by a link, or is not a regular file.
    """
    path = directory / name
    with explained("restore", path):
        if isinstance(path, StorageUrl):
            path.files.invalidate_cache(path.parent.path)
            facts = path.files.info(path.path)
            regular, nbytes = facts["type"] == "file", int(facts["size"])
        else:
            try:
                real = path.resolve(strict=True)
            except RuntimeError as error:  # a circle of links, before Python 3.13
                raise errors.DataLossError(f"restore: {error} (file: {path})") from error
            found = real.stat()
            within = real.is_relative_to(path.parent.resolve())
            regular, nbytes = within and stat.S_ISREG(found.st_mode), found.st_size
    if not regular:
        raise errors.DataLossError(
            f"restore: unsafe file, expected a regular file inside the checkpoint, got a link out "
            f"of it or something else (file: {path})"
        )
    return nbytes


@contextlib.contextmanager
def opened(path: Location) -> Iterator[Any]:
    """Open a file for reading from any place of it, without a buffer where it is local."""
    with explained("restore", path):
        file = (
            path.open("rb", buffering=0) if isinstance(path, Path) else path.files.open(path.path)
        )
        with file:
            yield file
