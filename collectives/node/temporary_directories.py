"""Rendezvous directories of a node, removed even after a kill.

A file that another process opens by name must exist for a moment, and a process killed in that
moment cannot remove it. So files are created in a directory of their own, which its creator keeps
locked (`flock`). The next process that creates a directory removes unlocked ones. The
kernel drops a lock when its process ends, however it ends, and also across containers with their
own process numbers.

The parent may also hold user data. A directory is removed only if it has the name, owner and mark
of a temporary directory, and contains only files that ranks create there:

    DIRECTORY/unisono-4711-0123456789abcdef/mark, segment or unisono-4711-liveness-...

The lock is on the directory, not on a file. A process that checks the lock opens no file, so it
drops no record lock on one (`collectives.transport.liveness`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["temporary"]

# Names of the directories, from `_make`, and of their files, from `segment` and `liveness`.
_FOLDER = re.compile(r"unisono-\d+-[0-9a-f]{16}")
_FILE = re.compile(r"segment|unisono-\d+-liveness-\w+")

# Every folder holds this file.
_MARK, _MARKED = "mark", b"temporary folder of the library Unisono, removed by it\n"

# Another process may remove a new directory before it is locked. Several such races in a row mean
# that something else is wrong.
_ATTEMPTS = 10


@contextlib.contextmanager
def temporary(parent: str) -> Iterator[str]:
    """Create a directory that is removed on exit, and remove stale ones of this user.

    Yields:
        path of the directory, mode 0700.

    Raises:
        OSError: the directory cannot be created.
    """
    _sweep(parent)
    path, descriptor = _make(parent)
    try:
        _mark(descriptor)
        yield path
    finally:
        with contextlib.suppress(OSError):
            _remove(path, descriptor)
        os.close(descriptor)


def _make(parent: str) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        path = str(Path(parent) / f"unisono-{os.getpid()}-{secrets.token_hex(8)}")
        os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = _is_locked(path)
            if descriptor is not None:
                return path, descriptor
    raise OSError(f"{parent}: other processes remove what is made there")


def _mark(folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(_MARK, flags, 0o600, dir_fd=folder)
    try:
        os.write(file, _MARKED)
    finally:
        os.close(file)


def _sweep(parent: str) -> None:
    found: list[str] = []
    with contextlib.suppress(OSError):  # the directory may be writable but not readable
        found = [name for name in os.listdir(parent) if _FOLDER.fullmatch(name)]
    for path in [os.path.join(parent, name) for name in found]:
        with contextlib.suppress(OSError):
            descriptor = _is_locked(path)
            if descriptor is not None:
                try:
                    _remove(path, descriptor)
                finally:
                    os.close(descriptor)


def _remove(path: str, folder: int) -> None:
    """Remove an open, locked directory, unless it contains foreign files.

    Raises:
        OSError: the folder cannot be removed.
    """
    names = os.listdir(folder)
    own = [name for name in names if _FILE.fullmatch(name) and _is_file(name, folder)]
    content = _content(_MARK, folder) if _MARK in names else None
    # A process killed early leaves an empty directory, or an empty mark.
    if content != _MARKED and (own or content):
        return
    if len(names) != len(own) + (content is not None):
        return
    # The mark is removed last, so that a later sweep can finish an interrupted one.
    for name in [*own, _MARK] if content is not None else []:
        os.unlink(name, dir_fd=folder)
    os.rmdir(path)  # follows no link, and fails if the folder is not empty


def _is_file(name: str, folder: int) -> bool:
    return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _content(name: str, folder: int) -> bytes:
    """Return the first bytes of a regular file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{name} is not a regular file")
        return os.read(file, len(_MARKED) + 1)
    finally:
        os.close(file)


def _is_locked(path: str) -> int | None:
    """Lock a directory and return its descriptor; None if another process holds the lock."""
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or not os.path.samestat(facts, os.stat(path)):
            return None
        stack.pop_all()
    return descriptor
