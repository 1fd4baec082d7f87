"""Event log of an elastic job: one line of JSON per event.

If `UNISONO_EVENTS` names a directory, rank 3 writes to `rank-3.jsonl` in it. The number is the rank
at the start of the program, 0 before `init`. A program that is started again appends to the file::

    {"event": "fault", "time": 1763942405.317, "rank": 3, "step": 12, "kind": "kill"}
    {"event": "recovered", "time": 1763942405.612, "rank": 2, "size": 3, "commit": 11, ...}

Each line is written by one system call, so it is complete even if the process is killed next. If a
file cannot be written, such as on a full disk, the rank logs one warning and writes no more events.

| event | when | facts |
| --- | --- | --- |
| `commit` | all ranks have a commit | `commit`: its number |
| `fault` | before an injected fault | `step`, `kind` |
| `failure` | this rank detects a failure | `error` |
| `recovered` | the surviving ranks resume | `size`, `commit`, `seconds` since `failure` |
| `spare` | this rank starts to wait as a spare rank | |
| `admitted` | this spare rank starts to train | `place`: its rank there; `size`, `commit` |
| `error` | an error of the program ends the job | `error` |
| `end` | `run_elastic` returns | |
| `restored` | a session starts, or returns to a step | `step`: steps done; `file`: from a file? |
| `saved` | a session has written a checkpoint, or started it in background | `step`, `seconds` |
| `retried` | a session returns to a commit or checkpoint after an error | `step`, `error` |
| `asked` | a session learns that it was asked to stop | `step`: steps done |
| `left` | the session stops for that, with a checkpoint | `step` |
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import collectives as cc

__all__ = ["VARIABLE", "number_at_start", "read", "write"]

_log = logging.getLogger(__name__)

VARIABLE = "UNISONO_EVENTS"

_number: int | None = None  # None before `init`
_descriptors: dict[int, int] = {}  # number -> file; -1 if there is none


def number_at_start() -> int:
    """Return this process's rank at the first call after `init`, before any rank died; else 0."""
    global _number
    # Kept: after a shrink the rank changes, but its file must not.
    if _number is None and cc.is_initialized():
        _number = cc.rank()
    return _number or 0


def write(event: str, /, **facts: Any) -> None:
    """Append an event to this rank's file; do nothing if `UNISONO_EVENTS` is not set.

    Args:
        event: name of the event.
        facts: values that JSON supports.
    """
    rank = number_at_start()
    try:
        if rank not in _descriptors:
            _descriptors[rank] = _open(rank)
        if _descriptors[rank] >= 0:
            facts = {"event": event, "time": round(time.time(), 6), "rank": rank, **facts}
            line = json.dumps(facts).encode() + b"\n"
            if os.write(_descriptors[rank], line) < len(line):
                raise OSError(errno.ENOSPC, "the last line is incomplete")
    except OSError as error:
        # Not raised: an event is written while a job recovers, and other ranks wait for this one.
        _descriptors[rank] = -1
        _log.warning("event log: rank %d writes no more events: %s", rank, error)


def _open(rank: int) -> int:
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return -1
    Path(folder).mkdir(parents=True, exist_ok=True)
    # O_APPEND, because a program that starts again adds to the file.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(Path(folder) / f"rank-{rank}.jsonl", flags, 0o644)
    size = os.fstat(descriptor).st_size
    # A full disk or the death of the process may have cut the last line.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of all ranks, ordered by time.

    Incomplete lines are skipped: a full disk may cut a line, and the last one may still be written.
    """
    events = []
    for path in sorted(Path(folder).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: event["time"])
