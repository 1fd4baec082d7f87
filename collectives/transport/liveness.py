"""Liveness of the ranks of a node, through file locks that the kernel releases.

Ranks that share memory send nothing to each other, so nobody would tell them that one has gone.
Each rank of a node holds a POSIX record lock on byte `rank` of one small file. The kernel drops the
lock when the process ends, however it ends, and another process can see whether the byte is locked.
This holds across containers with process numbers of their own, for processes that nobody has waited
for yet, and for processes whose children live on: children do not inherit record locks.

Locks of one process never conflict, so ranks that are threads of one process tell each other apart
by a random word that each rank writes behind the locked bytes: equal words mean the same process,
which is alive. Where a rank leaves in good order, another word says how.

Cost: one system call per other rank, about 0.5 us each.
"""

from __future__ import annotations

import atexit
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

# How long MPI may take to end after a rank has died.
_EXIT_SECONDS = 5

# The same where all that live have met at the end of their programs. Open MPI 5.0.11 does not end
# by itself in 7 of 16 runs of 4 ranks of which one or two have died.
_MET_EXIT_SECONDS = 1

# `struct flock` of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi")

_WORD = struct.Struct("q")

# Words of ranks that have left; 0 is that of one that has not come.
_GONE = {-1: "has closed the communicator", -2: "has ended its program"}
_CLOSED, _ENDED = _GONE


def create(directory: str = "/dev/shm") -> str:
    """Make the file for the ranks of one node, and return its path.

    One rank does this, in a folder that goes away even if its maker is killed
    (`collectives.node.temporary_directories`), and tells the others; when all have constructed
    their `Liveness`, it removes the folder.
    """
    file, path = tempfile.mkstemp(prefix=f"unisono-{os.getpid()}-liveness-", dir=directory)
    os.close(file)
    return path


def arm(seconds: float = _EXIT_SECONDS) -> None:
    """From now on, end this process soon after its program has ended, even if MPI does not.

    For a rank that learns that a rank has died, or has failed otherwise while others may not have.
    `MPI_Finalize` waits for all ranks; once one has died, it sometimes never returns (Open MPI
    5.0.11: in 1 of 40 runs, on busy cores more often). To leave it out would be no better: a rank
    that goes before the others have ended looks dead to them, too. So the kernel gets an alarm,
    which goes off also when no Python code runs any more.

    Args:
        seconds: from the end of the program to the alarm; the shortest limit of all calls holds.
    """
    global _exit_limit
    if not _lifted:
        _exit_limit = min(_exit_limit, seconds)


def arm_for_finalize() -> None:
    """Set the alarm for `MPI_Finalize`, which the exit of this process calls next.

    In a job that outlives its ranks one may be killed in there. The exit handlers after it have no
    limit unless a rank has failed before.
    """
    global _ends_with_finalize
    _ends_with_finalize = _exit_limit == math.inf and not _lifted
    arm()
    prepare_exit()


def disarm() -> None:
    """Take the limit back: those that live go on, and will wait for each other at the end."""
    global _exit_limit, _lifted
    _exit_limit, _lifted = math.inf, True


def fire_soon() -> None:
    """Set the alarm: those that live have waited for each other, and MPI has nothing more to do.

    But mpirun's own status is 0 where a signal has ended ranks of a job that outlives them: one
    that is known to be another is said at once, and MPI does not get to end.
    """
    if status := _status or _failure:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MET_EXIT_SECONDS)


def announce_status(status: int) -> None:
    """Note the status with which the program is about to end on all ranks."""
    global _status
    _status = status


def note_failure(status: int) -> None:
    """Note the exit status of a rank that has failed, since the job must not exit with 0."""
    global _failure
    _failure = _failure or status


def is_disarmed() -> bool:
    """Tell whether those that live have gone on after a death."""
    return _lifted


_exit_limit, _lifted, _status, _failure = math.inf, False, 0, 0
_ends_with_finalize = False  # whether the alarm is for MPI_Finalize alone
_finalizer: Callable[[], object] | None = None


def set_finalizer(function: Callable[[], object]) -> None:
    """Call a function at the exit of this process, after all other handlers of this package.

    Forked children do not call it.
    """
    global _finalizer
    _finalizer = function


# Registered before all other handlers of this package, so Python calls it after them: a service
# that leaves may still detect a death.
@atexit.register
def _at_exit() -> None:
    prepare_exit()
    if _finalizer is not None:
        _finalizer()
        if _ends_with_finalize:
            signal.alarm(0)


def prepare_exit() -> None:
    """Tell the others of the node that this program has ended; set the alarm if there is one."""
    for sign in list(_signs):
        sign.end()
    if _exit_limit < math.inf and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(_exit_limit))


def _leave_to_parent() -> None:
    """Set no alarm and call no finalizer in a forked child."""
    global _exit_limit, _finalizer, _status, _failure
    _exit_limit, _finalizer, _status, _failure = math.inf, None, 0, 0


os.register_at_fork(after_in_child=_leave_to_parent)


def check_before_exit() -> None:
    """Set the alarm if a rank has died while this one, whose program has ended, waits for all."""
    if _exit_limit == math.inf and any(sign.dead() for sign in list(_signs)):
        arm()
        prepare_exit()


class Liveness:
    """This rank's sign of life, and a view of the others'.

    Nobody else may open the file: record locks are gone as soon as a process closes any descriptor
    of it.

    Args:
        path: the file, on a file system of this node; the same on all ranks.
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
        # Also if the program drops this object, since it makes no further call then.
        self._close = weakref.finalize(self, _leave_for_good, file, rank, size)
        self._close.atexit = False  # `prepare_exit` writes another word

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended without `close` and `end`, in order.

        A rank that has not constructed its `Liveness` yet is not among them.
        """
        file = self._file
        if file is None:
            return []
        before = self._words(file)
        others = [rank for rank, word in enumerate(before) if word > 0 and word != file.word]
        unlocked = [rank for rank in others if not _is_locked(file.descriptor, rank)]
        if not unlocked:
            return []
        # One that has left between the two looks says so by now: a lock goes after the word.
        after = self._words(file)
        return [rank for rank in unlocked if after[rank] == before[rank]]

    def exited(self, rank: int) -> str:
        """Say how a rank has left in good order; empty if it has not."""
        return "" if self._file is None else _GONE.get(self._words(self._file)[rank], "")

    def end(self) -> None:
        """Tell the others that the program of this rank has ended; it can still look at them."""
        if self._file is not None:
            _leave(self._file, self.rank, self.size, _ENDED)

    def close(self) -> None:
        """Leave in good order, so that the others do not miss this rank; harmless when repeated."""
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
    """The one descriptor of a file that this process holds, whatever the number of its ranks."""

    key: tuple[int, int, int]
    descriptor: int
    users: int = 0
    process: int = field(default_factory=os.getpid)
    # Positive: 0 stands for a rank that has not come, and what is below for those that have left.
    word: int = field(default_factory=lambda: 1 + secrets.randbits(62))


# What this process shows of itself, in all communicators.
_signs: weakref.WeakSet[Liveness] = weakref.WeakSet()

# (process, device, inode) -> file. Closing a second descriptor of a file would drop all locks.
_files: dict[tuple[int, int, int], _File] = {}
_guard = threading.RLock()  # garbage may be collected while a thread holds it


def _open(path: str) -> _File:
    with _guard:
        facts = os.stat(path, follow_symlinks=False)
        key = (os.getpid(), facts.st_dev, facts.st_ino)
        file = _files.get(key)
        if file is None:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            file = _files[key] = _File(key, os.open(path, flags))
        file.users += 1
        return file


def _release(file: _File) -> None:
    """Close the descriptor with its last user, which drops the locks of all of them."""
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
    """Write behind the `size` locked bytes."""
    os.pwrite(file.descriptor, _WORD.pack(word), size + rank * _WORD.size)


def _is_locked(descriptor: int, byte: int) -> bool:
    """Tell whether another process holds a lock on one byte."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer: bytes = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
