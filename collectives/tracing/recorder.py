"""Flight recorder: the last operations of each communicator, written to a file on failure.

Every communicator keeps its last operations in memory: number, operation, op, dtype, shape, root,
start and end, outcome, and the calling line of the program. Each rank writes them as JSON, with the
stacks of all its threads, after a timeout, after the death of a rank, and on SIGUSR2
(`kill -USR2`, `scancel --signal=USR2`). Compare the ranks' files: the rank with the lowest last
number delays the other ranks.

Cost: about 0.5 us per operation; 256 records per communicator, allocated once and reused, without
references to arrays.
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

import numpy as np

from collectives.arrays.host_arrays import Array
from collectives.core.process_hooks import in_child
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

# A global name is faster than an attribute of a module.
_now = time.monotonic

# Wall-clock time at the zero of the monotonic clock, so that records need one clock only.
_EPOCH = time.time() - time.monotonic()


NO_FIELDS: Mapping[str, object] = {}


class Record:
    """One operation; times are seconds of the monotonic clock.

    `caller` has the values of a `Site`.

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
        """Call site of the operation."""
        return Site(*self.caller)

    @property
    def began(self) -> float:
        """Start time."""
        began: float = self._times.began
        return began

    @property
    def ended(self) -> float | None:
        """End time; None while the operation runs."""
        return self._times.ended or None

    @property
    def state(self) -> str:
        """State: "running", "done", or the text of the failure."""
        return self.failure or ("done" if self._times.ended else "running")

    def begin(self) -> None:
        """Record the start time."""
        # `ended` first: a reader must not see an old end with a new start.
        times = self._times
        times.ended = 0.0
        times.began = _now()

    def end(self, error: BaseException | None = None) -> None:
        """Record the end time and, if any, the failure."""
        # As text, because an exception would keep the frames and arrays of the program alive.
        if error is not None:
            self.failure = f"{type(error).__name__}: {error}"
        self._times.ended = _now()

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} at {self.site}"

    def facts(self) -> dict[str, Any]:
        """Return the record as JSON values."""
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
    """Last operations of one communicator.

    Args:
        name: name of the communicator in the file.
        rank: number of this rank in the communicator.
        size: number of ranks of the communicator.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._ring = [Record(CallTimes()) for _ in range(CAPACITY)]
        self._begun = ctypes.c_int64()
        # Module of the last call, because most calls are on a few lines of one module. Stored by
        # name, because its globals would keep requests alive past the end of the program.
        self._program: str | None = None
        self._caller = type(self).begin.__code__, 0
        _recorders.add(self)

    @property
    def records(self) -> list[Record]:
        """Records of the last operations, oldest first."""
        # The ring holds the last `CAPACITY` records, in the order of their numbers.
        begun = self._begun.value
        return [self._ring[i % CAPACITY] for i in range(max(0, begun - CAPACITY), begun)]

    @property
    def newest(self) -> Record:
        """Record of the last operation."""
        return self._ring[(self._begun.value - 1) % CAPACITY]

    def in_memory(self) -> tuple[Array, int, int]:
        """Return the addresses of the records, their number, and the address of the count begun.

        `collectives.calls.fast_path` writes the records of the calls that it repeats.
        """
        return np.array([id(made) for made in self._ring]), CAPACITY, ctypes.addressof(self._begun)

    def begin(
        self,
        number: int,
        operation: str,
        fields: Mapping[str, object] = NO_FIELDS,
        frame: FrameType | None = None,
    ) -> Record:
        """Record the start of an operation; arguments as `take`, by default the caller's frame."""
        record = self.take(number, operation, fields, frame or caller())
        record.begin()
        return record

    def take(
        self, number: int, operation: str, fields: Mapping[str, object], frame: FrameType
    ) -> Record:
        """Record an operation that is about to start, without its time.

        Args:
            number: number of the call in the communicator.
            operation: name of the operation.
            fields: further facts; the caller may replace `fields` of the record later.
            frame: start of the search for the user's line: the user's frame, or a frame of the
                packages below it.

        Returns:
            The record, valid until `CAPACITY` further operations have started.
        """
        begun = self._begun.value
        record = self._ring[begun % CAPACITY]
        self._begun.value = begun + 1
        record.failure = None
        record.number = number
        record.operation = operation
        # Replaced, never changed, because plans share one dictionary.
        record.fields = fields
        if attributed and (origin := attributed.get(_thread.get_ident())) is not None:
            record.caller = origin.site
            return record
        # Loops call from the same line, so the last call site usually fits.
        code, last = frame.f_code, self._caller
        # By identity of the code object, because comparing code objects takes longer.
        if code is not last[0] or frame.f_lasti != last[1]:
            last = self._caller = self._find_site(frame)
        record.caller = last
        return record

    def _find_site(self, frame: FrameType) -> tuple[CodeType, int]:
        """Return code and instruction of the first user frame, from this frame outwards."""
        if frame.f_globals.get("__name__") != self._program:  # rarely: calls share a module
            frame = user_frame(frame)
            self._program = frame.f_globals.get("__name__")
        return frame.f_code, frame.f_lasti

    def facts(self) -> dict[str, Any]:
        """Return the communicator and its records as JSON values."""
        operations = [record.facts() for record in self.records]
        return {"name": self.name, "rank": self.rank, "size": self.size, "operations": operations}


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def last_call() -> str:
    """Describe the last operation of this process: "after allreduce #2 at train.py:5"."""
    # The ring of a communicator without calls is empty.
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
    """Enable flight records: on `write`, and on SIGUSR2.

    The signal handler is installed only in the main thread, and if the program has no handler.

    Args:
        rank: number of this process in the world; part of the file name.
        size: number of processes.
        directory: directory of the files; None uses `default_directory()`. It is created with the
            first file. A relative path is resolved now.
    """
    global _process
    place = Path(default_directory(os.environ, size) if directory is None else directory)
    _process = _Process(rank, size, place.absolute())
    # `signal.signal` works in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return
    # A handler of the program stays.
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _on_signal)


def _leave_to_parent() -> None:
    """Write no file in a forked child, and restore the default action of SIGUSR2."""
    global _process
    _process = None
    if signal.getsignal(signal.SIGUSR2) is _on_signal:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


in_child(_leave_to_parent)


def default_directory(environ: Mapping[str, str], size: int) -> str:
    """Return a directory name that all ranks of a job share and no other job has.

    Args:
        environ: the environment, with the launcher's job number if there is a launcher.
        size: number of processes; without a job number, they share the number of their parent.
    """
    # Numbers of batch systems and of PMIx, one for all ranks of a job.
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE"):
        if environ.get(name):
            return "unisono-recorder-" + re.sub(r"[^A-Za-z0-9.]+", "-", environ[name])
    # Ranks of one launcher without a number have the same parent.
    return f"unisono-recorder-{os.getppid() if size > 1 else os.getpid()}"


def write(reason: str) -> Path | None:
    """Write the last operations of all communicators of this process, over an earlier file.

    Args:
        reason: cause of the record, for the file and the log.

    Returns:
        The file; None if `install` was not called or the file could not be written. That error is
        only logged, because it must not hide the failure that led here.
    """
    process = _process
    if process is None:
        return None
    path = process.directory / f"rank-{process.rank}.json"
    try:
        process.directory.mkdir(parents=True, exist_ok=True)
        # Write and rename, because the process may be killed at any time.
        beside = path.with_suffix(f".{threading.get_ident()}.tmp")
        beside.write_text(json.dumps(_everything(process, reason), indent=1))
        beside.replace(path)
    except Exception as error:
        # Any error: the record must never hide the failure that it describes.
        log.warning("[%d/%d] no flight record: %s", process.rank, process.size, error)
        return None
    log.warning("[%d/%d] flight record after %s: %s", process.rank, process.size, reason, path)
    return path


def _on_signal(number: int, frame: object) -> None:
    # In another thread, because the signal may interrupt the main thread while it holds a lock,
    # such as the lock of a log handler. Not by `threading`, which has locks of its own.
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
        # A copy of the stacks at this moment, without stopping the threads.
        "threads": {
            f"{names.get(ident, 'thread')} ({ident})": traceback.format_stack(frame)
            for ident, frame in sys._current_frames().items()
            # The writing thread shows only this function, unless it is the main thread, whose stack
            # matters.
            if ident != own or ident == threading.main_thread().ident
        },
    }


def _clock(monotonic: float) -> str:
    seconds = _EPOCH + monotonic
    # `strftime` does not format microseconds.
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e6):06d}Z"


def _plain(value: object) -> object:
    # Floats and other objects as text: JSON has no infinity, and values are shown, not parsed.
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return [_plain(one) for one in value] if isinstance(value, tuple) else str(value)
