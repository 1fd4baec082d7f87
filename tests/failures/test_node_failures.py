"""Ranks that die or stop while the others wait for them in shared memory, where nobody sends."""

import json
import os

import pytest
from victims import FAULT_TOLERANT

from launcher import mpirun, written

PROGRAM = """
import os, signal, sys, time
import numpy as np
import collectives as cc
from collectives.communicator import group_of

comm = cc.init()
plan = comm.plan_allreduce(comm.shared_empty(1000, np.float32))
plan()
kind, what = sys.argv[1:3]
limit = 2 if kind == "stop" else 30
x = np.ones(3)
def gather():
    return comm.allgather(x, timeout=limit)
for _ in range(6 if what == "learned" else 0):  # then compiled code repeats it
    gather()
large = np.ones(100_000)
calls = {
    "plan": plan, "learned": gather, "call": lambda: comm.allreduce(large, timeout=limit)
}
if comm.rank == 1:
    time.sleep(0.5)  # others may still be in what went before, and would fail there
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
began = time.monotonic()
try:
    calls[what]()
except cc.CollectiveError as error:
    seconds = time.monotonic() - began
    print(f"rank {comm.rank} after {seconds:.3f} s {type(error).__name__}: {error}", flush=True)
try:
    comm.barrier()
except cc.CollectiveError as error:
    print(f"rank {comm.rank} then {error}", flush=True)
if kind == "stop" and comm.rank == 0:
    group_of(comm).transport.mpi.Abort(3)  # the stopped rank would never end
"""


def run(tmp_path, *arguments, options=(), **extra):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    extra["UNISONO_RECORDER_DIR"] = str(tmp_path / "records")
    return mpirun(3, program, *arguments, options=options, timeout=60, **extra)


@pytest.mark.parametrize("what", ["plan", "call", "learned"])
def test_a_killed_rank_is_a_peer_failure_on_the_others_at_once(tmp_path, what):
    result = run(tmp_path, "kill", what, options=FAULT_TOLERANT)
    for rank in (0, 2):
        (line,) = [t for t in result.stdout.splitlines() if t.startswith(f"rank {rank} after ")]
        assert "PeerFailure: " in line, result
        assert f"rank 1 died (rank {rank} of 3)" in line
        assert float(line.split()[3]) < 20
        assert f"rank {rank} then barrier: this communicator is not usable" in result.stdout
        record = json.loads((tmp_path / "records" / f"rank-{rank}.json").read_text())
        assert "PeerFailure" in json.dumps(record)


def test_a_stopped_rank_is_named_with_what_it_did_last(tmp_path):
    result = run(tmp_path, "stop", "call")
    line = next(t for t in result.stdout.splitlines() if t.startswith("rank 0 after "))
    assert "CollectiveTimeout: allreduce: no answer within 2 s, still waiting for rank 1" in line
    assert "rank 1 left plan" in line  # making the plan, or calling it where that took long


def test_nothing_stays_in_shared_memory_when_all_ranks_are_killed(tmp_path):
    text = """
        import os, signal
        import numpy as np
        import collectives as cc
        comm = cc.init()
        x = comm.shared_empty(1 << 20, np.float32)
        comm.allreduce(x, out=x)
        comm.split(comm.rank % 2).barrier()
        print("ready", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = mpirun(3, written(tmp_path, text), timeout=60)
    pids = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("ready")]
    assert pids
    left = [name for name in os.listdir("/dev/shm") if name.startswith("unisono")]
    assert [name for name in left if name.split("-")[1] in pids] == []


KILLED = """
import os, signal, sys
from collectives.transport import liveness
from collectives.node import segment
import collectives as cc

broadcast = segment.broadcast_text

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_maker(transport, *given):  # the other rank comes here before it is made
    return kill() if transport.rank == 0 else broadcast(transport, *given)

if sys.argv[1] == "segment":  # made, and not yet mapped by the others
    segment.broadcast_text = kill_maker
elif sys.argv[1] == "liveness":
    liveness.Liveness = kill
cc.init().barrier()
print("done", flush=True)
"""


@pytest.mark.parametrize("moment", ["segment", "liveness"])
def test_what_a_rank_leaves_that_is_killed_before_all_have_opened_it_goes_at_the_next_start(
    tmp_path, moment
):
    program, memory = written(tmp_path, KILLED), tmp_path / "memory"
    memory.mkdir()
    assert mpirun(2, program, moment, UNISONO_SHARED_MEMORY=str(memory)).status != 0
    (left,) = memory.iterdir()
    names = sorted(path.name.split("-")[0] for path in left.iterdir())
    assert names in (["mark", "segment"], ["mark", "unisono"])
    result = mpirun(2, program, "none", UNISONO_SHARED_MEMORY=str(memory))
    assert result.stdout.split() == ["done"] * 2, result
    assert list(memory.iterdir()) == []
