"""Folders in which ranks of a node find each other's files, removed even if a maker is killed.

A file that another process is to open needs a name for a moment, and a process that is killed in
that moment cannot remove it. So files lie in a folder of their own, which its maker keeps locked
(`flock`), and the next who makes a folder beside it removes those whose lock nobody holds. The
kernel drops a lock when its process ends, however that happens, and does so across containers with
process numbers of their own. Folders of other users, which cannot be opened, are left alone.

The lock is the folder's, not a file's: who looks opens no file, so that locks which others hold
on the files stay (`collectives.transport.liveness`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["temporary"]

_PREFIX = "unisono-"

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
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _make(parent: str) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        path = str(Path(parent) / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = _locked(path)
            if descriptor is not None:
                return path, descriptor
    raise OSError(f"{parent}: other processes remove what is made there")


def _sweep(parent: str) -> None:
    for path in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _locked(str(path))
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _locked(path: str) -> int | None:
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
