"""Crash-safe file operations: write, fsync and rename.

The order is always the same: write beside the target, fsync what was written, rename, fsync the
directory that holds the name. A rename is atomic, so that a reader sees the old or the new state
whatever happens in between; without the two fsyncs a power cut may show the new name with old or
no content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

from strategies import errors

__all__ = [
    "DirectoryLock",
    "translate_errors",
    "new_file",
    "remove",
    "rename",
    "sync",
    "write_file",
]

_log = logging.getLogger(__name__)

# Files removed at the same time.
_AT_ONCE = 4

# Bytes after which the system is told to begin to write, so that the device is busy meanwhile.
_BEHIND = 16 << 20

_ERROR_OF_ERRNO: dict[int | None, type[errors.OpError]] = {
    # EFBIG is what RLIMIT_FSIZE answers: Python ignores the signal SIGXFSZ.
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE),
        errors.ResourceExhaustedError,
    ),
    errno.ENOENT: errors.NotFoundError,
    errno.EIO: errors.DataLossError,
}


@contextlib.contextmanager
def translate_errors(operation: str, path: PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` inside the block into the `OpError` that names the operation and file.

    Args:
        operation: beginning of the message, such as "save".
        path: the file meant when the `OSError` does not name one.

    Raises:
        ResourceExhaustedError: disk, quota, file size or descriptors used up.
        NotFoundError: a file or directory does not exist.
        DataLossError: the device answered with an input/output error.
        FailedPreconditionError: anything else, permissions for instance.
    """
    try:
        yield
    except OSError as error:
        # Those of fsspec have no number.
        code = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno
        reason = (os.strerror(code) if code else str(error)).lower()
        kind = _ERROR_OF_ERRNO.get(code, errors.FailedPreconditionError)
        raise kind(f"{operation}: {reason} (file: {error.filename or path})") from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[Any], None]]:
    """Create `path`, which must not exist; yields what appends bytes; fsyncs it in the end."""
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as descriptor:
        written = begun = 0

        def put(data: Any) -> None:
            nonlocal written, begun
            rest = memoryview(data)
            while rest:
                count = os.write(descriptor, rest)
                rest, written = rest[count:], written + count
            if written - begun >= _BEHIND:
                # Of pages that are not written yet this begins the writing, and forgets nothing.
                os.posix_fadvise(descriptor, begun, written - begun, os.POSIX_FADV_DONTNEED)
                begun = written

        yield put
        os.fsync(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Create `path`, which must not exist, with `data`, and fsync it."""
    with new_file(path) as put:
        put(data)


def sync(path: Path) -> None:
    """Wait until the file's content, or the directory's list of names, is on the device."""
    with _open(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    except OSError as error:
        error.filename = str(path)  # a call on a descriptor does not know it
        raise
    finally:
        os.close(descriptor)


def rename(source: Path, dest: Path) -> None:
    """Rename within one directory, atomically, and make the new name durable."""
    os.rename(source, dest)
    sync(dest.parent)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it points to) or a directory of files, if there."""
    if path.is_dir() and not path.is_symlink():
        try:
            # What pages of a large file are in memory is given back by who removes it.
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(os.unlink, [p for p in path.iterdir() if not p.is_dir()]))
            os.rmdir(path)
        except OSError as error:
            error.filename = str(path)  # a name relative to some directory inside
            raise
    else:
        path.unlink(missing_ok=True)


class DirectoryLock:
    """The right to write in a directory, held by at most one process of the machine or cluster.

    An advisory lock (`flock`) on the file `.lock`: the kernel releases it when the process dies,
    however it dies, so that there is no stale lock to clean up. The file stays. On a file system
    without locks a warning is logged, and two writers are not told apart.

    Args:
        directory: created with its parents when it does not exist.

    Raises:
        FailedPreconditionError: somebody else holds the lock; the message says which process.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / ".lock"
        with translate_errors("lock", path):
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
        try:
            self._take(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        self._release = weakref.finalize(self, _release, descriptor, os.getpid())
        self._release.atexit = False  # then the kernel does it, after all that still writes

    def _take(self, descriptor: int, path: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            raise errors.FailedPreconditionError(
                f"lock: another writer uses this directory, expected one at a time, got {owner} "
                f"(file: {path}). Wait for it, or give each job a directory of its own"
            ) from error
        except OSError as error:
            _log.warning("lock: the file system has no locks: %s (file: %s)", error.strerror, path)
            return
        # The name only helps those who meet the lock: a full disk must not stop us here.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Let others write; harmless when called again."""
        self._release()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _release(descriptor: int, process: int) -> None:
    # A forked child shares the lock: it must not release it for its parent, and where the parent
    # closes, the child's copy must not keep it.
    if process == os.getpid():
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
