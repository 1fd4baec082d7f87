"""Event log of an elastic job: one line of JSON per event.

Where `UNISONO_EVENTS` names a directory, rank 3 writes to `rank-3.jsonl` there, by its number at
the start of the program; a program that starts again adds to it::

    {"event": "fault", "time": 1763942405.317, "rank": 3, "step": 12, "kind": "kill"}
    {"event": "recovered", "time": 1763942405.612, "rank": 2, "size": 3, "commit": 11, ...}

A line is written at once and whole: it is there also if the process is killed right after.

| event | when | facts |
| --- | --- | --- |
| `commit` | all ranks have a commit | `commit`: its number |
| `fault` | before a fault on purpose | `step`, `kind` |
| `failure` | this rank has learnt of one | `error` |
| `recovered` | those that live go on | `size`, `commit`, `seconds` since `failure` |
| `spare` | this rank begins to wait in reserve | |
| `admitted` | it trains from now on | `place`: its rank there; `size`, `commit` |
| `error` | an error of the program ends the job | `error` |
| `end` | `run_elastic` returns | |
| `restored` | a session begins, or has gone back | `step`: after which; `file`: or from memory |
| `saved` | a session has a checkpoint, or it is on its way in the background | `step`, `seconds` |
| `retried` | a session goes back after an error of a step | `step`, `error` |
| `asked` | a session learns that it was asked to stop | `step`: after which |
| `left` | it stops for that, with a checkpoint | `step` |
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import collectives as cc

__all__ = ["VARIABLE", "number_at_start", "read", "write"]

VARIABLE = "UNISONO_EVENTS"

_number: int | None = None
_descriptor: int | None = None  # -1 for none


def number_at_start() -> int:
    """Return the rank that this process was at the first call, before any had died."""
    global _number
    if _number is None:
        _number = cc.rank() if cc.is_initialized() else 0
    return _number


def write(event: str, /, **facts: Any) -> None:
    """Add an event to this rank's file; nothing where `UNISONO_EVENTS` is not set.

    Args:
        event: what has happened, in one word.
        facts: what JSON can carry.

    Raises:
        OSError: the file cannot be written.
    """
    global _descriptor
    rank = number_at_start()
    if _descriptor is None:
        _descriptor = _open(rank)
    if _descriptor >= 0:
        line = json.dumps({"event": event, "time": round(time.time(), 6), "rank": rank, **facts})
        os.write(_descriptor, line.encode() + b"\n")


def _open(rank: int) -> int:
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return -1
    Path(folder).mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.open(Path(folder) / f"rank-{rank}.jsonl", flags, 0o644)


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of all ranks, in the order of their times.

    A last line that was cut short is left out.
    """
    events = []
    for path in sorted(Path(folder).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: event["time"])
