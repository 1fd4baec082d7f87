"""Disk cache of compiled code: one folder per user, files named by digest.

The first usable folder holds the files:

    NUMBA_CACHE_DIR/unisono                      if the variable is set; then no other folder
    XDG_CACHE_HOME/unisono or ~/.cache/unisono
    TMPDIR/unisono-cache-UID                     if the home is missing, full or read-only

Code in the package (`collectives.kernels.prebuilt`) is not cached. A file's name
contains a digest of everything that determines its content: source, compiler and processor. So any
number of checkouts and versions share the folder, and no process loads code of another source. A
process that writes a file removes the files that were not read for 90 days.

The code of a file is run without further checks. So a folder or file is used only if this user or
root owns it and its mode lets no other user write. A file is written under a temporary name and
renamed, and an incomplete file counts as absent: a full disk or a truncated file costs one
compilation and nothing else.

    bytes of a file    0                              32
                       SHA-256 of everything that     the code
                       determines the code, and
                       of the code
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

from collectives.kernels import compile_lock

__all__ = ["NO_NUMBA", "CacheEntry", "announce_compiling", "digest_of_files", "folders"]

log = logging.getLogger(__name__)

NO_NUMBA = "compiling: numba is not installed, which compiles own functions: pip install numba"
"""Text of the ImportError if code has to be compiled without numba."""

_DIGEST_BYTES = 32
_DAY = 86400.0
_KEPT_SECONDS = 90 * _DAY
# Age from which on a read renews the time of a file: once a week, because it costs a write.
_RENEWED_SECONDS = 7 * _DAY

# Names of cached files, and of files that a killed process has not renamed. The folder may also
# hold files of the user.
_CACHED = re.compile(r".+\.[0-9a-f]{24}\.(?:o|nbc)(?:\.[0-9a-f]{16})?")

# A program that is silent for longer looks hung. One function compiles in 0.3 to 2 s.
_SILENT_SECONDS = 2.0


class CacheEntry:
    """The compiled code of one function in the cache.

    Args:
        label: readable start of the file's name.
        suffix: end of the file's name, without a dot.
        made_from: everything that the code depends on, besides the compiler and the processor.
    """

    def __init__(self, label: str, suffix: str, made_from: bytes) -> None:
        # The toolchain is a part: object files of another compiler or processor may crash.
        self._made_from = hashlib.sha256(_toolchain() + made_from).digest()
        # 24 hexadecimal digits are 96 bits, more than enough for names; the file's head has all
        # bits.
        self._name = f"{label}.{self._made_from.hex()[:24]}.{suffix}"

    @property
    def description(self) -> str:
        """Identity and folders of the code, equal in all processes that need the same code."""
        return f"{self._made_from.hex()} {[str(folder) for folder in folders()]}"

    def read(self) -> bytes | None:
        """Return the code; None if no folder has a complete file."""
        for folder in folders():
            # Any error of a folder: the next one may have the file.
            with contextlib.suppress(OSError), _open_folder(folder) as descriptor:
                content = _read_file(descriptor, self._name)
                digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
                # An incomplete or damaged file, such as after a full disk, counts as absent.
                if digest == self._digest(code):
                    return code
                # Replaced by the next write under the same name.
                log.info("code is compiled again: %s is damaged", folder / self._name)
        return None

    def write(self, code: bytes) -> None:
        """Write the code to the first usable folder, if there is one."""
        # The first folder that takes the file; one that is full or read-only is skipped.
        for folder in folders():
            try:
                with _open_folder(_create(folder)) as descriptor:
                    _replace(descriptor, self._name, self._digest(code) + code)
                    # Only after a write: a process that compiles has time for it.
                    _remove_unread(folder, descriptor)
            except OSError as error:
                log.info("compiled code is not kept in %s: %s", folder, error)
            else:
                return

    def remove(self) -> None:
        """Remove the code from all folders."""
        # From all of them, because several processes may have chosen different ones.
        for folder in folders():
            with contextlib.suppress(OSError):
                (folder / self._name).unlink()

    def _digest(self, code: bytes) -> bytes:
        return hashlib.sha256(self._made_from + code).digest()


def folders() -> list[Path]:
    """Return the folders that may hold compiled code, in order of preference."""
    # numba's own variable, so that one setting moves both caches.
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen) / "unisono"]
    found = []
    # A process without a home, as in some containers.
    with contextlib.suppress(RuntimeError):  # no home
        found.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono")
    return [*found, Path(tempfile.gettempdir()) / f"unisono-cache-{os.geteuid()}"]


def digest_of_files(paths: Iterable[str | Path]) -> bytes:
    """Return a digest of the text of files, in the order of their paths."""
    digest = hashlib.sha256()
    # By path, so that the order of the file system does not matter.
    for path in sorted(map(Path, paths)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


_compiled_seconds = 0.0
# The socket by which this process has the right to announce, None if another process has it; empty
# until this process first needs the right.
_announcers: list[socket.socket | None] = []


@contextlib.contextmanager
def announce_compiling(what: str) -> Iterator[None]:
    """Log once per job and machine that `what` is compiled, after 2 s spent in such blocks."""
    global _compiled_seconds
    # The seconds of earlier functions count, because many short compilations look hung as well.
    timer = threading.Timer(max(0.0, _SILENT_SECONDS - _compiled_seconds), _announce, [what])
    timer.daemon = True
    # The right is asked for once; later blocks of this process need no timer.
    if not _announcers:
        timer.start()
    began = time.monotonic()
    try:
        yield
    finally:
        timer.cancel()
        # Summed over the process, also by failed compilations.
        _compiled_seconds += time.monotonic() - began


def _announce(what: str) -> None:
    # The ranks of a node have the same parent. The process that announces holds the socket until it
    # exits.
    _announcers.append(compile_lock.claim_slot(f"announces compilation {os.getppid()}", 1))
    if _announcers[-1] is not None:
        folder = _first_writable()
        place = "not kept on disk" if folder is None else f"kept in {folder}"
        log.warning("compiling %s, once; %s", what, place)


def _first_writable() -> Path | None:
    for folder in folders():
        with contextlib.suppress(OSError), _open_folder(_create(folder)):
            if os.access(folder, os.W_OK):
                return folder
    return None


@functools.cache
def _toolchain() -> bytes:
    """Describe the compiler, the processor and the sources of this folder.

    Raises:
        ImportError: numba is not installed.
    """
    import llvmlite.binding as llvm

    # Settings of numba change the code that it makes.
    chosen = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    try:
        numba = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(NO_NUMBA) from error
    facts = (
        numba,
        importlib.metadata.version("llvmlite"),
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        sorted(llvm.get_host_cpu_features().items()),
        [item for item in chosen if item[0] != "NUMBA_CACHE_DIR"],
    )
    # The sources of this folder, because every kernel may inline them.
    return repr(facts).encode() + digest_of_files(Path(__file__).parent.glob("*.py"))


def _create(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        # Only this user: code from the folder is executed.
        folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open a folder of compiled code.

    Raises:
        OSError: the folder is absent, or another user may write to it.
    """
    # One descriptor for check and use, so that the folder cannot be exchanged in between.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if fault := _fault(os.fstat(descriptor)):
            _warn(folder, fault)
            raise PermissionError(errno.EPERM, fault)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_file(descriptor: int, name: str) -> bytes:
    """Read a file of an open folder, and renew its time."""
    # Relative to the open folder, whose owner was checked.
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=descriptor), "rb") as file:
        facts = os.fstat(file.fileno())
        if fault := _fault(facts):
            raise PermissionError(errno.EPERM, fault)
        # Once a week, because a write per read would load network file systems.
        if time.time() - facts.st_mtime > _RENEWED_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
        return file.read()


def _fault(facts: os.stat_result) -> str | None:
    """Describe how another user could have written to a folder or file; None if none could."""
    # Root may install a cache for all users.
    if facts.st_uid not in (0, os.geteuid()):
        return f"expected user {os.geteuid()} or root as owner, got user {facts.st_uid}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(facts.st_mode)
        return f"expected a mode in which only the owner writes, got {mode:04o}"
    return None


@functools.cache  # once for each process
def _warn(folder: Path, fault: str) -> None:
    log.warning("code cache: %s is not used, because other users may write: %s", folder, fault)


def _replace(descriptor: int, name: str, content: bytes) -> None:
    """Write a file of an open folder, so that other processes see all of it or none."""
    # A random name, because several processes may write the same file.
    aside = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(aside, flags, 0o600, dir_fd=descriptor), "wb") as file:
            file.write(content)
        # Atomic: readers see the old file or the new one.
        os.replace(aside, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        # The error of the write matters, not that of the removal.
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=descriptor)
        raise


# Folders that this process has searched for old files. It may write dozens of files.
_swept: set[Path] = set()


def _remove_unread(folder: Path, descriptor: int) -> None:
    """Remove the cached files of an open folder that no process has read for 90 days."""
    if folder in _swept:
        return
    _swept.add(folder)
    oldest = time.time() - _KEPT_SECONDS
    with os.scandir(descriptor) as files:
        for file in files:
            # Other files may belong to the user.
            if not _CACHED.fullmatch(file.name):
                continue
            with contextlib.suppress(OSError):  # another process may remove it
                if file.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(file.name, dir_fd=descriptor)
