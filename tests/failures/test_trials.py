"""Trials of the MPI library leave no processes behind, also where it hangs."""

import sys
import time

from launcher import ROOT, run
from limits import Limit

# Stands for an mpirun that never ends, of which a process is left when it is killed.
HANGS = """#!/bin/sh
echo $$ >> FOLDER/pids
sleep 1000 &
echo $! >> FOLDER/pids
wait
"""


def test_jobs_that_hang_are_killed_at_the_limit(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    (folder / "mpirun").write_text(HANGS.replace("FOLDER", str(tmp_path)))
    (folder / "mpirun").chmod(0o755)
    program = ROOT / "benchmarks" / "joining_later.py"
    command = [folder / "python", program, "accept", "--within", "2"]
    result = run(list(map(str, command)), timeout=30)
    assert result.stdout.splitlines() == [
        "first mpirun: not joined within 2 s, status -9",
        "second mpirun: not joined within 2 s, status -9",
    ], result
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert len(pids) == 4
    limit = Limit(10)
    while any(map(is_running, pids)):  # a process that was killed may end a moment later
        assert limit.left(), pids
        time.sleep(0.01)


def is_running(pid):
    """Whether there is such a process, and it is not about to be forgotten."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
