"""Liveness of the ranks of a node, through file locks that the kernel releases.

Ranks that share memory exchange no messages, so no message would report a death. Each rank of a
node holds a POSIX record lock on byte `rank` of one small file. The kernel drops the lock when the
process ends, however it ends, and other processes can see whether the byte is locked. This works
across containers with their own process numbers, for zombies, and for processes with surviving
children, because children do not inherit record locks.

Locks of one process never conflict. So ranks that are threads of one process identify each other by
a random word that each rank writes behind the locked bytes: equal words mean the same process,
which is alive. Other words mean that a rank has left in good order, and how.

Cost: one system call per other rank, about 0.5 us each.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import signal
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from collectives.core.process_hooks import ExitStage, at_exit, in_child

__all__ = [
    "Liveness",
    "create",
    "fire_soon",
    "is_disarmed",
    "disarm",
    "arm",
    "arm_for_finalize",
    "check_before_exit",
    "note_failure",
    "prepare_exit",
    "set_finalizer",
    "announce_status",
]

# Seconds that MPI may take to finalize after a rank has died.
_EXIT_SECONDS = 5

# The same once all surviving ranks have synchronized at the end of their programs. Open MPI 5.0.11
# did not exit by itself in 7 of 16 runs of 4 ranks of which one or two had died.
_MET_EXIT_SECONDS = 1

# `struct flock` of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi")

_WORD = struct.Struct("q")

# Words of ranks that have left. 0 means that a rank has not written a word yet.
_GONE = {-1: "has closed the communicator", -2: "has ended its program"}
_CLOSED, _ENDED = _GONE


def create(directory: str = "/dev/shm") -> str:
    """Create the lock file for the ranks of one node, and return its path.

    One rank calls this, in a directory that is removed even if the rank is killed
    (`collectives.node.temporary_directories`), and sends the path to the other ranks. It removes
    the directory once all ranks have constructed their `Liveness`.
    """
    file, path = tempfile.mkstemp(prefix=f"unisono-{os.getpid()}-liveness-", dir=directory)
    os.close(file)
    return path


def arm(seconds: float = _EXIT_SECONDS) -> None:
    """End this process soon after its program has ended, even if MPI does not.

    For a rank that knows of a dead rank, or has failed while other ranks may not have.
    `MPI_Finalize` waits for all ranks; after a death it sometimes never returns (Open MPI 5.0.11:
    in 1 of 40 runs, more often on busy cores). Skipping it would not help: a rank that exits before
    the other ranks have ended looks dead to them. So the kernel gets an alarm, which fires even
    when Python code no longer runs.

    Args:
        seconds: from the end of the program to the alarm; the smallest value of all calls applies.
    """
    global _exit_limit
    if not _lifted:
        _exit_limit = min(_exit_limit, seconds)


def arm_for_finalize() -> None:
    """Set the alarm for `MPI_Finalize`, which this process calls next on exit.

    In a fault-tolerant job a rank may be killed during finalization. Later exit handlers have no
    limit unless a rank failed earlier.
    """
    global _ends_with_finalize
    _ends_with_finalize = _exit_limit == math.inf and not _lifted
    arm()
    prepare_exit()


def disarm() -> None:
    """Cancel the limit: the surviving ranks resume, and will wait for each other at the end."""
    global _exit_limit, _lifted
    _exit_limit, _lifted = math.inf, True


def fire_soon() -> None:
    """Set a short alarm: the surviving ranks have synchronized, and MPI has nothing left to do.

    mpirun exits with 0 if signals ended ranks of a fault-tolerant job. If the status is known to be
    another one, this process exits with it at once, without MPI.
    """
    if status := _status or _failure:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MET_EXIT_SECONDS)


def announce_status(status: int) -> None:
    """Record the status with which the program is about to exit on all ranks."""
    global _status
    _status = status


def note_failure(status: int) -> None:
    """Record the exit status of a failed rank, because the job must not exit with 0."""
    global _failure
    _failure = _failure or status


def is_disarmed() -> bool:
    """Return whether the surviving ranks have resumed after a death."""
    return _lifted


_exit_limit, _lifted, _status, _failure = math.inf, False, 0, 0
_ends_with_finalize = False  # whether the alarm covers MPI_Finalize alone
_finalizer: Callable[[], object] | None = None


def set_finalizer(function: Callable[[], object]) -> None:
    """Register a function for the exit of this process, after all other handlers of this package.

    Forked children do not call it.
    """
    global _finalizer
    _finalizer = function


def _at_exit() -> None:
    prepare_exit()
    if _finalizer is not None:
        _finalizer()
        if _ends_with_finalize:
            signal.alarm(0)


def prepare_exit() -> None:
    """Announce to the node that this program has ended, and start the alarm if a limit is set."""
    for sign in list(_signs):
        sign.end()
    if _exit_limit < math.inf and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(_exit_limit))


def _leave_to_parent() -> None:
    """Clear the alarm and finalizer in a forked child, which is not a rank."""
    global _exit_limit, _finalizer, _status, _failure
    _exit_limit, _finalizer, _status, _failure = math.inf, None, 0, 0


at_exit(ExitStage.LIVENESS, _at_exit)  # a service that leaves may still detect a death
in_child(_leave_to_parent)


def check_before_exit() -> None:
    """Set the alarm if a rank has died while this one waits for all ranks at its end."""
    if _exit_limit == math.inf and any(sign.dead() for sign in list(_signs)):
        arm()
        prepare_exit()


class Liveness:
    """This rank's lock, and a view of the locks of the other ranks.

    No other code may open the file: a process loses all its record locks on a file as soon as it
    closes any descriptor of the file.

    Args:
        path: the lock file, on a file system of this node; equal on all ranks.
        rank: number of this rank on the node, `0 .. size - 1`.
        size: number of ranks on the node.

    Raises:
        OSError: the file cannot be opened or locked.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._file: _File | None = None
        file = _open(path)
        try:
            fcntl.lockf(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            _write_word(file, rank, size, file.word)
        except OSError:
            _release(file)
            raise
        self._file = file
        _signs.add(self)
        # Also runs if the program drops this object, because the rank then makes no further call.
        self._close = weakref.finalize(self, _leave_for_good, file, rank, size)
        self._close.atexit = False  # at exit `prepare_exit` writes another word

    def dead(self) -> list[int]:
        """Return the ranks whose processes ended without `close` and `end`, in order.

        Ranks that have not constructed their `Liveness` yet are not included.
        """
        file = self._file
        if file is None:
            return []
        before = self._words(file)
        # Ranks with this process's word are its threads, whose locks would not conflict.
        others = [rank for rank, word in enumerate(before) if word > 0 and word != file.word]
        unlocked = [rank for rank in others if not _is_locked(file.descriptor, rank)]
        if not unlocked:
            return []
        # A rank that left in between has changed its word by now, because it writes before it
        # unlocks.
        after = self._words(file)
        return [rank for rank in unlocked if after[rank] == before[rank]]

    def exited(self, rank: int) -> str:
        """Return how a rank has left in good order; "" if it has not."""
        return "" if self._file is None else _GONE.get(self._words(self._file)[rank], "")

    def end(self) -> None:
        """Announce the end of this rank's program; the rank can still look at other ranks."""
        if self._file is not None:
            _leave(self._file, self.rank, self.size, _ENDED)

    def close(self) -> None:
        """Announce that this rank closes the communicator, and unlock; idempotent."""
        self._file = None
        self._close()

    def _words(self, file: _File) -> list[int]:
        words = os.pread(file.descriptor, _WORD.size * self.size, self.size)
        words += bytes(_WORD.size * self.size - len(words))
        return [word for (word,) in _WORD.iter_unpack(words)]

    def __enter__(self) -> Liveness:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class _File:
    """The one descriptor of a file in this process, shared by all its ranks."""

    key: tuple[int, int, int]
    descriptor: int
    users: int = 0
    process: int = field(default_factory=os.getpid)
    # Positive: 0 means no word yet, and negative words mean ranks that have left.
    word: int = field(default_factory=lambda: 1 + secrets.randbits(62))


# Locks that this process holds, in all communicators.
_signs: weakref.WeakSet[Liveness] = weakref.WeakSet()

# (process, device, inode) -> file. Closing a second descriptor of a file would drop all locks.
_files: dict[tuple[int, int, int], _File] = {}
_guard = threading.RLock()  # reentrant: a garbage collection may release a file while it is held


def _open(path: str) -> _File:
    with _guard:
        facts = os.stat(path, follow_symlinks=False)
        # Per process, because a forked child does not inherit the record locks of its parent.
        key = (os.getpid(), facts.st_dev, facts.st_ino)
        file = _files.get(key)
        if file is None:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            file = _files[key] = _File(key, os.open(path, flags))
        file.users += 1
        return file


def _release(file: _File) -> None:
    """Drop one user of a file; the last one closes the descriptor, which drops all its locks."""
    with _guard:
        file.users -= 1
        if file.users == 0:
            del _files[file.key]
            os.close(file.descriptor)


def _leave(file: _File, rank: int, size: int, word: int) -> None:
    if os.getpid() == file.process:  # a forked child is not a rank
        _write_word(file, rank, size, word)


def _leave_for_good(file: _File, rank: int, size: int) -> None:
    if os.getpid() == file.process:
        _leave(file, rank, size, _CLOSED)
        _release(file)


def _write_word(file: _File, rank: int, size: int, word: int) -> None:
    """Write a word behind the `size` locked bytes."""
    os.pwrite(file.descriptor, _WORD.pack(word), size + rank * _WORD.size)


def _is_locked(descriptor: int, byte: int) -> bool:
    """Return whether another process holds a lock on a byte."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer: bytes = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
