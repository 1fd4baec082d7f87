"""Checkpoint storage: a local directory or a URL.

`StorageUrl` has the subset of `Path` that checkpoints need. fsspec provides access: `s3://`,
`gs://`, `memory://` and so on. `file://` URLs are local directories.
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
        files: file system of fsspec.
        path: path in it.
        protocol: scheme of the URL, before "://".
    """

    def __init__(self, files: Any, path: str, protocol: str) -> None:
        self.files = files
        self.path = path.rstrip("/")
        self.protocol = protocol

    def __truediv__(self, name: str) -> StorageUrl:
        return StorageUrl(self.files, f"{self.path}/{name}", self.protocol)

    def __str__(self) -> str:
        # A file system of fsspec may have several schemes and would use its first one.
        # The caller's scheme instead, so that the text leads back to the same place.
        return f"{self.protocol}://{self.files.unstrip_protocol(self.path).partition('://')[2]}"

    # Lets `os.fspath` accept a location where users pass paths.
    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"StorageUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageUrl) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    # Pickled as its text: a file system of fsspec holds connections and locks. Rank 0 sends
    # locations to other ranks.
    def __reduce__(self) -> Any:
        return resolve, (str(self),)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> StorageUrl:
        """The parent directory."""
        return StorageUrl(self.files, self.path.rpartition("/")[0], self.protocol)


Location: TypeAlias = Path | StorageUrl


def resolve(place: str | os.PathLike[str]) -> Location:
    """Return the location of a path or URL.

    Raises:
        ImportError: a URL, and fsspec or its package for this scheme is not installed.
        InvalidArgumentError: fsspec does not support the scheme.
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
    # Errors of this library, of arguments and of memory have no connection to the storage.
    except (errors.OpError, ValueError, TypeError, MemoryError):
        raise
    except Exception as error:
        # A bug in this package must not look like an unavailable storage.
        if isinstance(place, Path):
            raise
        raise errors.UnavailableError(
            f"{operation}: {type(error).__name__}: {error} (file: {place})"
        ) from error


def exists(place: Location) -> bool:
    """Return whether a file or directory exists."""
    return place.exists() if isinstance(place, Path) else bool(place.files.exists(place.path))


def folders(root: Location) -> list[Location]:
    """Return the subdirectories of a directory, sorted; links are not followed.

    Raises:
        OSError: the directory cannot be read.
    """
    if isinstance(root, Path):
        return [path for path in sorted(root.iterdir()) if not path.is_symlink() and path.is_dir()]
    # fsspec caches listings, and other processes write here.
    root.files.invalidate_cache(root.path)
    found = root.files.ls(root.path, detail=True)
    names = [entry["name"] for entry in found if entry["type"] == "directory"]
    # fsspec returns full paths, some file systems with a slash at the end.
    return [root / name.rstrip("/").rpartition("/")[2] for name in sorted(names)]


def length(directory: Location, name: str) -> int:
    """Return the length in bytes of a regular file inside a directory.

    Raises:
        NotFoundError: the file does not exist.
        DataLossError: the file is a link out of the directory, or not a regular file.
    """
    path = directory / name
    with explained("restore", path):
        if isinstance(path, StorageUrl):
            # A cached listing may be older than a file that another rank has written.
            path.files.invalidate_cache(path.parent.path)
            # One request for type and size, as each request to an object store takes milliseconds.
            facts = path.files.info(path.path)
            regular, nbytes = facts["type"] == "file", int(facts["size"])
        else:
            try:
                # A link could lead to any file that this process can read.
                real = path.resolve(strict=True)
            except RuntimeError as error:  # a cycle of links, before Python 3.13
                raise errors.DataLossError(f"restore: {error} (file: {path})") from error
            found = real.stat()
            # `resolve` has followed all links: one to a file inside the checkpoint is accepted.
            within = real.is_relative_to(path.parent.resolve())
            # A FIFO or device would block or never end, so only regular files are read.
            regular, nbytes = within and stat.S_ISREG(found.st_mode), found.st_size
    if not regular:
        raise errors.DataLossError(
            f"restore: unsafe file, expected a regular file inside the checkpoint, got a link out "
            f"of it or something else (file: {path})"
        )
    return nbytes


@contextlib.contextmanager
def opened(path: Location) -> Iterator[Any]:
    """Open a file for reading with random access, unbuffered if it is local."""
    with explained("restore", path):
        # Unbuffered, because `shards` reads large chunks directly into arrays.
        file = (
            path.open("rb", buffering=0) if isinstance(path, Path) else path.files.open(path.path)
        )
        with file:
            yield file
