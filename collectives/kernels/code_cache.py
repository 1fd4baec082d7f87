"""Compiled code on disk: one folder of the user, whose files are named by what they are made from.

The first folder of these that can be used holds the files:

    NUMBA_CACHE_DIR/unisono                      where that variable is set, and then no other
    XDG_CACHE_HOME/unisono or ~/.cache/unisono
    TMPDIR/unisono-cache-UID                     where the home is missing, full or read-only

No file lies in the packages, because `pip uninstall` would leave it there. A file's name contains a
digest of everything that its content depends on: the source, the compiler, the processor. So any
number of checkouts and versions share the folder, and no process loads the code of another source.
A file that no process has read for 90 days is removed by the next process that writes one.

Files are run as they are. A folder or file is therefore used only if this user or root owns it and
nobody else may write to it. A file is written aside and renamed, and counts as absent if it is not
whole: a full disk or a file cut short costs a compilation and nothing else.

    bytes of a file    0                              32
                       SHA-256 of what it is made     the code
                       from, and of the code
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from collectives.kernels import turn

__all__ = ["Entry", "announced", "digest_of_files", "folders"]

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_DAY = 86400.0
_KEPT_SECONDS = 90 * _DAY
# A read renews the time of a file that is older: once a week, since it costs a write.
_RENEWED_SECONDS = 7 * _DAY

# The names of cached files, and of those of a write that died. The folder may hold files of users.
_CACHED = re.compile(r".+\.[0-9a-f]{24}\.(?:o|nbc)(?:\.[0-9a-f]{16})?")

# A program that stands still for longer looks broken. One function takes 0.3 to 2 s.
_SILENT_SECONDS = 2.0


class Entry:
    """One function's code in the cache.

    Args:
        label: the start of the file's name, for people.
        suffix: its end.
        made_from: what the code depends on, besides the compiler and the processor.
    """

    def __init__(self, label: str, suffix: str, made_from: bytes) -> None:
        self._made_from = hashlib.sha256(_toolchain() + made_from).digest()
        self._name = f"{label}.{self._made_from.hex()[:24]}.{suffix}"

    @property
    def described(self) -> str:
        """What identifies the code and its place; equal for all processes that need the same."""
        return f"{self._made_from.hex()} {[str(folder) for folder in folders()]}"

    def read(self) -> bytes | None:
        """Return the code, None if no folder has a file of it that is whole."""
        for folder in folders():
            with contextlib.suppress(OSError), _opened(folder) as descriptor:
                content = _content(descriptor, self._name)
                digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
                if digest == self._digest(code):
                    return code
                log.info("compiled code is made anew: %s is damaged", folder / self._name)
        return None

    def write(self, code: bytes) -> None:
        """Keep the code in the first folder where that is possible."""
        for folder in folders():
            try:
                with _opened(_made(folder)) as descriptor:
                    _replace(descriptor, self._name, self._digest(code) + code)
                    _remove_unread(folder, descriptor)
            except OSError as error:
                log.info("compiled code is not kept in %s: %s", folder, error)
            else:
                return

    def remove(self) -> None:
        """Forget the code."""
        for folder in folders():
            with contextlib.suppress(OSError):
                (folder / self._name).unlink()

    def _digest(self, code: bytes) -> bytes:
        return hashlib.sha256(self._made_from + code).digest()


def folders() -> list[Path]:
    """Return the folders that may hold compiled code, the preferred one first."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen) / "unisono"]
    found = []
    with contextlib.suppress(RuntimeError):  # no home
        found.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono")
    return [*found, Path(tempfile.gettempdir()) / f"unisono-cache-{os.geteuid()}"]


def digest_of_files(paths: Iterable[str | Path]) -> bytes:
    """Return a digest of the text of files, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(map(Path, paths)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


_compiled_seconds = 0.0
_announcers: list[socket.socket | None] = []  # this process's place, once it has asked for it


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Compile in this block; after 2 s of all such blocks one process of a job says so."""
    global _compiled_seconds
    timer = threading.Timer(max(0.0, _SILENT_SECONDS - _compiled_seconds), _announce)
    timer.daemon = True
    if not _announcers:
        timer.start()
    began = time.monotonic()
    try:
        yield
    finally:
        timer.cancel()
        _compiled_seconds += time.monotonic() - began


def _announce() -> None:
    # The ranks of a node have the same parent, and hold the place until they exit.
    _announcers.append(turn.place(f"announces compilation {os.getppid()}", 1))
    if _announcers[-1] is not None:
        folder = _first_writable()
        place = "not kept on disk" if folder is None else f"kept in {folder}"
        log.warning("compiling loops for this processor, once; %s", place)


def _first_writable() -> Path | None:
    for folder in folders():
        with contextlib.suppress(OSError), _opened(_made(folder)):
            if os.access(folder, os.W_OK):
                return folder
    return None


@functools.cache
def _toolchain() -> bytes:
    """Describe what compiles, with the sources of this folder, and the processor."""
    import llvmlite.binding as llvm

    chosen = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    facts = (
        importlib.metadata.version("numba"),
        importlib.metadata.version("llvmlite"),
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        sorted(llvm.get_host_cpu_features().items()),
        [item for item in chosen if item[0] != "NUMBA_CACHE_DIR"],
    )
    return repr(facts).encode() + digest_of_files(Path(__file__).parent.glob("*.py"))


def _made(folder: Path) -> Path:
    """Create the folder where it is missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder of compiled code.

    Raises:
        OSError: it is absent, or another user may write to it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if fault := _fault(os.fstat(descriptor)):
            _warn(folder, fault)
            raise PermissionError(errno.EPERM, fault)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int, name: str) -> bytes:
    """Read a file of an open folder, and note that it is in use."""
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=descriptor), "rb") as file:
        facts = os.fstat(file.fileno())
        if fault := _fault(facts):
            raise PermissionError(errno.EPERM, fault)
        if time.time() - facts.st_mtime > _RENEWED_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
        return file.read()


def _fault(facts: os.stat_result) -> str | None:
    """Describe why another user could have written what a folder or file holds; None if not."""
    if facts.st_uid not in (0, os.geteuid()):
        return f"expected user {os.geteuid()} or root as owner, got user {facts.st_uid}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(facts.st_mode)
        return f"expected a mode in which only the owner writes, got {mode:04o}"
    return None


@functools.cache  # once for each process
def _warn(folder: Path, fault: str) -> None:
    log.warning("code cache: %s is not used, since others may write there: %s", folder, fault)


def _replace(descriptor: int, name: str, content: bytes) -> None:
    """Write a file of an open folder, which no process ever sees half written."""
    aside = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(aside, flags, 0o600, dir_fd=descriptor), "wb") as file:
            file.write(content)
        os.replace(aside, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=descriptor)
        raise


_swept: set[Path] = set()  # once for each process, which may write dozens of files


def _remove_unread(folder: Path, descriptor: int) -> None:
    """Remove the cached files of an open folder that no process has read for long."""
    if folder in _swept:
        return
    _swept.add(folder)
    oldest = time.time() - _KEPT_SECONDS
    with os.scandir(descriptor) as files:
        for file in files:
            if not _CACHED.fullmatch(file.name):
                continue
            with contextlib.suppress(OSError):  # another process removes it
                if file.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(file.name, dir_fd=descriptor)
