"""Ctrl-C while a rank waits for the others in shared memory: it stops, and they say who left."""

from __future__ import annotations

import pytest

from launcher import mpirun

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import collectives as cc

comm = cc.init()
x = np.ones(100_000, np.float32)
plan = comm.plan_allreduce(x)
calls = {
    "a plan": plan,
    "a call": lambda: comm.allreduce(np.ones((50_000, 2))[:, 0]),
    "a known call": lambda: comm.allreduce(x, op=cc.SUM, out=x),
}
wait = calls[sys.argv[1]]
wait()
wait()

def interrupt():
    while True:  # until this rank is inside
        record = comm._calls.recorder.records[-1]
        if record.state == "running" and time.monotonic() - record.began > float(sys.argv[2]):
            break
        time.sleep(0.005)
    global sent
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

def tell(text):
    print(f"rank {comm.rank} {text}", flush=True)

if comm.rank == 0:
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        wait()
    except KeyboardInterrupt:
        tell(f"stopped after {time.monotonic() - sent:.3f} s")
    comm._transport.mpi.Barrier()
    try:
        comm.barrier()
    except cc.CollectiveError as error:
        tell(f"then {error}")
else:
    comm._transport.mpi.Barrier()
    began = time.monotonic()
    try:
        for _ in range(9):  # rank 0 may have given to the first what it had to give
            comm.allreduce(x, op=cc.SUM, out=x, timeout=1)
    except cc.CollectiveError as error:
        tell(f"after {time.monotonic() - began:.3f} s {type(error).__name__}: {error}")
comm._transport.mpi.Barrier()
"""


# Interrupted while it still polls, and while it sleeps between two looks.
@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("what", ["a plan", "a call", "a known call"])
def test_a_rank_that_is_interrupted_stops_and_the_others_name_it(tmp_path, what, seconds):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = mpirun(
        3, program, what, str(seconds), timeout=60, UNISONO_RECORDER_DIR=str(tmp_path / "records")
    )
    lines = result.stdout.splitlines()
    (stopped,) = [line for line in lines if line.startswith("rank 0 stopped")]
    assert float(stopped.split()[4]) < 1, result
    (then,) = [line for line in lines if line.startswith("rank 0 then")]
    assert "not usable any more" in then
    assert "failed: KeyboardInterrupt" in then
    for rank in (1, 2):
        (line,) = [line for line in lines if line.startswith(f"rank {rank} after")]
        if what == "a known call":  # in which all three meet, up to where rank 0 left
            assert "CollectiveTimeout: allreduce: no answer within 1 s, still waiting for" in line
        else:
            assert "CollectiveTimeout" in line or "MismatchError" in line
        assert float(line.split()[3]) < 12, result
    assert result.status == 0, result


def test_an_interrupt_that_nobody_catches_ends_the_job(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, collectives as cc\n"
        "comm = cc.init()\n"
        "comm.barrier()\n"
        "if comm.rank == 0:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "for _ in range(2):\n"
        "    comm.barrier()\n"
        "print('went on', flush=True)\n"
    )
    result = mpirun(2, program, timeout=60)
    assert result.status != 0
    assert "KeyboardInterrupt" in result.stderr
    assert "went on" not in result.stdout
