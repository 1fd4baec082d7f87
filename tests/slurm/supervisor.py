"""The parent of a private Slurm's daemons: a program that `cluster.py` starts.

It reads a plan from standard input, one line of JSON, starts the daemons, and lives as long as the
other end of that pipe. When the tests close it, or die in whatever way, every daemon and every job
is ended and the directory removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

READY_SECONDS = 15.0
POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def supervise() -> None:
    """Start the daemons, wait until the pipe is closed or one of them ends, then end them all."""
    pipe = open(0, "rb", buffering=0)  # noqa: SIM115
    # Jobs leave the process tree of slurmd; as their reaper we still find and end them.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    plan = json.loads(pipe.readline())
    directory = Path(plan["directory"])
    try:
        daemons = {_start_daemon(directory, **daemon): daemon["name"] for daemon in plan["daemons"]}
        while not select.select([pipe], [], [], POLL_SECONDS)[0]:
            for pid, status in _reap():
                if pid in daemons:
                    code = os.waitstatus_to_exitcode(status)
                    print(f"{daemons[pid]} ended, status {code}", flush=True)
                    return
    finally:
        _end_children()
    shutil.rmtree(directory, ignore_errors=True)  # for tests that were killed


def _start_daemon(directory: Path, name: str, command: list[str], ready: str = "") -> int:
    with (directory / "log" / name).open("w") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + READY_SECONDS
    while ready and not os.path.exists(ready):
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name}: no {ready}, status {daemon.returncode}")
        time.sleep(POLL_SECONDS)
    return daemon.pid


def _reap() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_children() -> None:
    """Kill all descendants, those too that are born meanwhile."""
    while True:
        family = {os.getpid()}
        parents = _parents()
        while young := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= young
        for pid in family - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    return parents


if __name__ == "__main__":
    supervise()
