"""Crash-safe file operations: write, fsync and rename.

The order is always the same: write a temporary file beside the target, fsync it, rename it, fsync
the directory. A rename is atomic, so a reader sees the old or the new state. Without the two fsyncs
a power cut may leave the new name with old or no content.
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

# Bytes after which writeback is started, so that the device is busy during the write.
_BEHIND = 16 << 20

_ERROR_OF_ERRNO: dict[int | None, type[errors.OpError]] = {
    # RLIMIT_FSIZE gives EFBIG, because Python ignores SIGXFSZ.
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE),
        errors.ResourceExhaustedError,
    ),
    errno.ENOENT: errors.NotFoundError,
    errno.EIO: errors.DataLossError,
}


@contextlib.contextmanager
def translate_errors(operation: str, path: PathLike[str]) -> Iterator[None]:
    """Raise an `OSError` inside the block as the `OpError` that names operation and file.

    Args:
        operation: beginning of the message, such as "save".
        path: the file, if the `OSError` does not name one.

    Raises:
        ResourceExhaustedError: disk, quota, file size or descriptors are exhausted.
        NotFoundError: a file or directory does not exist.
        DataLossError: the device reported an input/output error.
        FailedPreconditionError: any other error, such as missing permissions.
    """
    try:
        yield
    except OSError as error:
        # Errors of fsspec have no number.
        code = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno
        reason = (os.strerror(code) if code else str(error)).lower()
        kind = _ERROR_OF_ERRNO.get(code, errors.FailedPreconditionError)
        raise kind(f"{operation}: {reason} (file: {error.filename or path})") from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[Any], None]]:
    """Create `path`, which must not exist; yield a function that appends bytes, then fsync."""
    # Never through a link: one may have been planted at this name.
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as descriptor:
        written = begun = 0

        def put(data: Any) -> None:
            nonlocal written, begun
            rest = memoryview(data)
            while rest:
                # Linux writes at most 2 GiB per call, and may write less.
                count = os.write(descriptor, rest)
                rest, written = rest[count:], written + count
            if written - begun >= _BEHIND:
                # For dirty pages this starts writeback, and drops nothing.
                os.posix_fadvise(descriptor, begun, written - begun, os.POSIX_FADV_DONTNEED)
                begun = written

        yield put
        # Before the caller renames the file: a name must not appear without its content.
        os.fsync(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Create `path`, which must not exist, with `data`, and fsync it."""
    with new_file(path) as put:
        put(data)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the device."""
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
    """Remove a file, a link (not its target) or a directory of files, if it exists."""
    if path.is_dir() and not path.is_symlink():
        try:
            # Freeing a large file's cached pages takes the time of the removing thread.
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(os.unlink, [p for p in path.iterdir() if not p.is_dir()]))
            # Subdirectories make it fail; no save creates any.
            os.rmdir(path)
        except OSError as error:
            error.filename = str(path)  # a name relative to some directory inside
            raise
    else:
        path.unlink(missing_ok=True)


class DirectoryLock:
    """Exclusive lock for writing in a directory, across the machine or cluster.

    An advisory lock (`flock`) on the file `.lock`. The kernel releases it when the process dies, so
    locks never become stale. The file stays. On a file system without locks a warning is logged,
    and two writers are not detected.

    Args:
        directory: created with its parents if missing.

    Raises:
        FailedPreconditionError: another process holds the lock; names the process.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / ".lock"
        with translate_errors("lock", path):
            directory.mkdir(parents=True, exist_ok=True)
            # `O_NOFOLLOW` as in `new_file`; `O_CLOEXEC`, because a child would share the lock.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
        try:
            self._take(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        self._release = weakref.finalize(self, _release, descriptor, os.getpid())
        self._release.atexit = False  # the kernel releases it, after the last writer has ended

    def _take(self, descriptor: int, path: Path) -> None:
        try:
            # Not blocking: a second job fails at once instead of waiting for the first to end.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            # Linux emulates `flock` on NFS by byte-range locks, which may report EACCES.
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            raise errors.FailedPreconditionError(
                f"lock: another writer uses this directory, expected one at a time, got {owner} "
                f"(file: {path}). Wait for it, or give each job a directory of its own"
            ) from error
        except OSError as error:
            _log.warning("lock: the file system has no locks: %s (file: %s)", error.strerror, path)
            return
        # The owner's name is only information, so a full disk must not raise here.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock; closing twice is harmless."""
        self._release()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _release(descriptor: int, process: int) -> None:
    # A forked child shares the lock: it must not release its parent's lock, and its copy must not
    # keep the lock after the parent closes.
    if process == os.getpid():
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
