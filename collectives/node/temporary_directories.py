"""Rendezvous directories of a node, removed even after a kill.

A file that another process is to open needs a name for a moment, and a process that is killed in
that moment cannot remove it. So files lie in a folder of their own, which its maker keeps locked
(`flock`), and the next who makes a folder beside it removes those whose lock nobody holds. The
kernel drops a lock when its process ends, however that happens, and does so across containers with
process numbers of their own.

The directory may also hold data of users. A folder is removed only if it has the name, owner and
mark of such a folder, and contains only files that ranks create there:

    DIRECTORY/unisono-4711-0123456789abcdef/mark, segment or unisono-4711-liveness-...

The lock is the folder's, not a file's: who looks opens no file, so that locks which others hold
on the files stay (`collectives.transport.liveness`).
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

# Names of the folders, from `_make`, and of their files, from `segment` and `liveness`.
_FOLDER = re.compile(r"unisono-\d+-[0-9a-f]{16}")
_FILE = re.compile(r"segment|unisono-\d+-liveness-\w+")

# Every folder holds this file.
_MARK, _MARKED = "mark", b"temporary folder of the library Unisono, removed by it\n"

# A folder is not locked yet when it is made, and may be removed right then; several times in a row
# only if something else is wrong.
_ATTEMPTS = 10


@contextlib.contextmanager
def temporary(parent: str) -> Iterator[str]:
    """Make a folder that is removed on exit, and remove those of this user whose makers are dead.

    Yields:
        Its path; mode 0700.

    Raises:
        OSError: it cannot be made.
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
    """Remove a folder that is open and locked, unless it contains files of other origin.

    Raises:
        OSError: the folder cannot be removed.
    """
    names = os.listdir(folder)
    own = [name for name in names if _FILE.fullmatch(name) and _is_file(name, folder)]
    content = _content(_MARK, folder) if _MARK in names else None
    # A process that is killed early leaves an empty folder, or an empty mark.
    if content != _MARKED and (own or content):
        return
    if len(names) != len(own) + (content is not None):
        return
    # The mark is last, so that a later sweep can finish an interrupted one.
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
    """Return the descriptor of a folder that nobody else has locked, locked; else None."""
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
