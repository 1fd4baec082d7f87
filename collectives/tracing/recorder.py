"""Flight recorder: the last operations of each communicator, written to a file on failure.

Every communicator keeps its last operations in memory: number, operation, op, dtype, shape, root,
when it began and ended, how, and the line of the program that called it. Each rank writes them as
JSON, together with the stacks of all its threads, when an operation has timed out or a rank has
died, and on SIGUSR2 (`kill -USR2`, `scancel --signal=USR2`): compare the ranks' files, and the one
whose numbers stay behind is the one that the others wait for.

Cost: about 0.5 us per operation, 256 records per communicator, made once and written over; they
refer to no array.
"""

from __future__ import annotations

import _thread
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from collectives.node.control_block import CallTimes
from collectives.tracing.call_sites import Site, attributed, caller, user_frame

__all__ = [
    "NO_FIELDS",
    "Record",
    "Recorder",
    "default_directory",
    "install",
    "last_call",
    "write",
]

log = logging.getLogger(__name__)

CAPACITY = 256

# A name is found faster than a module and its attribute.
_now = time.monotonic

# Wall-clock time of the zero of the monotonic clock, so that records need one clock only.
_EPOCH = time.time() - time.monotonic()


NO_FIELDS: Mapping[str, object] = {}


class Record:
    """One operation; times are seconds of the monotonic clock, `caller` is a `Site` unnamed.

    Args:
        times: a `CallTimes`, which compiled code may write (`collectives.node.synchronization`).
    """

    __slots__ = ("_times", "address", "caller", "failure", "fields", "number", "operation")

    number: int
    operation: str
    caller: tuple[CodeType, int]

    def __init__(self, times: Any) -> None:
        self._times = times
        self.address = ctypes.addressof(times)
        self.fields = NO_FIELDS
        self.failure: str | None = None

    @property
    def site(self) -> Site:
        """Where the operation was called."""
        return Site(*self.caller)

    @property
    def began(self) -> float:
        """When it began."""
        began: float = self._times.began
        return began

    @property
    def ended(self) -> float | None:
        """When it ended; None if it has not."""
        return self._times.ended or None

    @property
    def state(self) -> str:
        """How it stands: "running", "done", or how it failed."""
        return self.failure or ("done" if self._times.ended else "running")

    def begin(self) -> None:
        """Note when the operation begins."""
        times = self._times
        times.ended = 0.0
        times.began = _now()

    def end(self, error: BaseException | None = None) -> None:
        """Note that the operation is over, and how it failed if it did."""
        if error is not None:
            self.failure = f"{type(error).__name__}: {error}"
        self._times.ended = _now()

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} at {self.site}"

    def facts(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        ended = self.ended
        return {
            "number": self.number,
            "operation": self.operation,
            **{name: _plain(value) for name, value in self.fields.items()},
            "state": self.state,
            "began": _clock(self.began),
            "ended": None if ended is None else _clock(ended),
            "seconds": (time.monotonic() if ended is None else ended) - self.began,
            "monotonic": self.began,
            "site": f"{self.site.file}:{self.site.line}",
        }


class Recorder:
    """The last operations of one communicator.

    Args:
        name: what the communicator is called in the file.
        rank: this rank in the communicator.
        size: number of its ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._ring = [Record(CallTimes()) for _ in range(CAPACITY)]
        self._begun = 0
        # The module that called last, since most calls are in few lines of one module. Its name,
        # because its globals would keep requests alive past the end of the program.
        self._program: str | None = None
        self._caller = type(self).begin.__code__, 0
        _recorders.add(self)

    @property
    def records(self) -> list[Record]:
        """The records of the last operations, the oldest first."""
        oldest = max(0, self._begun - CAPACITY)
        return [self._ring[i % CAPACITY] for i in range(oldest, self._begun)]

    def begin(
        self,
        number: int,
        operation: str,
        fields: Mapping[str, object] = NO_FIELDS,
        frame: FrameType | None = None,
    ) -> Record:
        """Note that an operation begins; arguments as `take`, by default the caller's frame."""
        record = self.take(number, operation, fields, frame or caller())
        record.begin()
        return record

    def take(
        self, number: int, operation: str, fields: Mapping[str, object], frame: FrameType
    ) -> Record:
        """Note all but the time of an operation that is about to begin.

        Args:
            fields: what else is known; the caller may fill in `fields` of the record later.
            frame: where the search for the user's line begins: the user's own frame, or one of our
                packages above which it is found.

        Returns:
            The record, which is the operation's until `CAPACITY` others have begun.
        """
        begun = self._begun
        record = self._ring[begun % CAPACITY]
        self._begun = begun + 1
        record.failure = None
        record.number = number
        record.operation = operation
        record.fields = fields
        if attributed and (origin := attributed.get(_thread.get_ident())) is not None:
            record.caller = origin.site
            return record
        code, last = frame.f_code, self._caller
        if code is not last[0] or frame.f_lasti != last[1]:
            last = self._caller = self._find_site(frame)
        record.caller = last
        return record

    def _find_site(self, frame: FrameType) -> tuple[CodeType, int]:
        """Return code and instruction of the first frame of the user, from this frame outwards."""
        if frame.f_globals.get("__name__") != self._program:  # nearly always the same module
            frame = user_frame(frame)
            self._program = frame.f_globals.get("__name__")
        return frame.f_code, frame.f_lasti

    def facts(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        operations = [record.facts() for record in self.records]
        return {"name": self.name, "rank": self.rank, "size": self.size, "operations": operations}


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def last_call() -> str:
    """Say what this process did last: "after allreduce #2 at train.py:5"."""
    newest = [recorder.records[-1] for recorder in list(_recorders) if recorder.records]
    if not newest:
        return "before its first call"
    record = max(newest, key=lambda record: record.began)
    return f"{'in' if record.ended is None else 'after'} {record}"


class _Process(NamedTuple):
    rank: int
    size: int
    directory: Path


_process: _Process | None = None


def install(rank: int, size: int, directory: str | None = None) -> None:
    """From now on, write files: on `write`, and on SIGUSR2.

    The signal is left alone outside the main thread, and where the program has a handler already.

    Args:
        rank: number of this process in the world; part of the file's name.
        size: number of processes.
        directory: where the files go; `default_directory()` if None. It is made when the first file
            is written, and a relative path counts from today's working directory.
    """
    global _process
    place = Path(default_directory(os.environ, size) if directory is None else directory)
    _process = _Process(rank, size, place.absolute())
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _on_signal)


def _leave_to_parent() -> None:
    """Write no file in a forked child, and restore the default action of SIGUSR2 there."""
    global _process
    _process = None
    if signal.getsignal(signal.SIGUSR2) is _on_signal:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)


def default_directory(environ: Mapping[str, str], size: int) -> str:
    """Return a name that all ranks of a job share and no other job has.

    Args:
        environ: the environment; the launcher's number of the job is in it, if there is one.
        size: number of processes; without a launcher's number they share their parent's.
    """
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE"):
        if environ.get(name):
            return "unisono-recorder-" + re.sub(r"[^A-Za-z0-9.]+", "-", environ[name])
    return f"unisono-recorder-{os.getppid() if size > 1 else os.getpid()}"


def write(reason: str) -> Path | None:
    """Write what all communicators of this process did last, over what was written before.

    Args:
        reason: why, in the file and in the log.

    Returns:
        The file; None where `install` was not called, or the file could not be written, which is
        logged: the failure that led here must not be hidden by a second one.
    """
    process = _process
    if process is None:
        return None
    path = process.directory / f"rank-{process.rank}.json"
    try:
        process.directory.mkdir(parents=True, exist_ok=True)
        # Complete or not there: the process may be about to be killed.
        beside = path.with_suffix(f".{threading.get_ident()}.tmp")
        beside.write_text(json.dumps(_everything(process, reason), indent=1))
        beside.replace(path)
    except Exception as error:
        log.warning("[%d/%d] no flight record: %s", process.rank, process.size, error)
        return None
    log.warning("[%d/%d] flight record after %s: %s", process.rank, process.size, reason, path)
    return path


def _on_signal(number: int, frame: object) -> None:
    # A thread of its own: the signal may have come while the main thread held a lock, such as that
    # of a log handler. `threading` has locks of its own, so the thread is started without it.
    _thread.start_new_thread(write, (signal.Signals(number).name,))


def _everything(process: _Process, reason: str) -> dict[str, Any]:
    names = {thread.ident: thread.name for thread in list(threading.enumerate())}
    own = threading.get_ident()
    return {
        "rank": process.rank,
        "size": process.size,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "reason": reason,
        "written": _clock(time.monotonic()),
        "communicators": [recorder.facts() for recorder in list(_recorders)],
        "threads": {
            f"{names.get(ident, 'thread')} ({ident})": traceback.format_stack(frame)
            for ident, frame in sys._current_frames().items()
            if ident != own or ident == threading.main_thread().ident
        },
    }


def _clock(monotonic: float) -> str:
    """Format a time as UTC with microseconds."""
    seconds = _EPOCH + monotonic
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e6):06d}Z"


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return [_plain(one) for one in value] if isinstance(value, tuple) else str(value)
