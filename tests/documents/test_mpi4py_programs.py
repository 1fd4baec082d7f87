"""Programs of mpi4py, its runner and its executors beside communicators of this library."""

from __future__ import annotations

import pytest

from launcher import ROOT, mpirun, written

BEGIN = """
import sys
import mpi4py
import numpy as np
"""

SUM = """
from mpi4py import MPI
import collectives as cc
comm = cc.init()
assert comm.allreduce(np.ones(3), op=cc.SUM)[0] == comm.size
assert comm.allreduce_async(np.ones(3), op=cc.SUM).wait()[0] == comm.size
"""

EXECUTOR = """
from mpi4py.futures import MPICommExecutor
with MPICommExecutor(MPI.COMM_WORLD, root=0) as pool:
    if pool is not None:
        assert list(pool.map(abs, range(-3, 0))) == [3, 2, 1]
assert comm.allreduce(np.ones(3), op=cc.SUM)[0] == comm.size
"""

HALVES = """
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor
import collectives as cc
whole = MPI.COMM_WORLD
half = whole.Split(whole.rank // 2, whole.rank)
if whole.rank < 2:
    with cc.from_mpi(half) as comm:
        half.Free()
        for _ in range(20):
            assert comm.allreduce(np.ones(3), op=cc.SUM)[0] == 2
else:
    with MPICommExecutor(half, root=0) as pool:
        if pool is not None:
            assert list(pool.map(abs, range(-3, 0))) == [3, 2, 1]
whole.Barrier()
"""

POOL = """
from mpi4py import MPI
from mpi4py.futures import MPIPoolExecutor
if __name__ == "__main__":
    import collectives
    with MPIPoolExecutor() as pool:
        assert list(pool.map(abs, range(-3, 0))) == [3, 2, 1]
    print("ended", flush=True)
"""

OWN = """
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_FUNNELED)
"""

END = """
print("ended", flush=True)
"""

# Name -> ranks, options of Python before the program, its text, and the ranks that print.
PROGRAMS = {
    "runner": (2, ("-m", "mpi4py"), SUM + END, 2),
    "executor": (3, (), SUM + EXECUTOR + END, 3),
    "an executor of other ranks": (4, (), HALVES + END, 4),
    "a pool": (3, ("-m", "mpi4py.futures"), POOL, 1),
    "one thread": (2, (), "mpi4py.rc.thread_level = 'single'\n" + SUM + END, 2),
    "MPI by the program": (2, (), OWN + SUM + "cc.shutdown()\nMPI.Finalize()\n" + END, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_mpi4py(tmp_path, name):
    size, options, text, ended = PROGRAMS[name]
    program = written(tmp_path, BEGIN, text)
    result = mpirun(size, *options, program, timeout=60, PYTHONPATH=str(ROOT)).checked()
    assert result.stdout.count("ended") == ended, result


def test_an_error_under_the_runner_ends_the_job(tmp_path):
    fail = "if comm.rank == 1:\n    raise RuntimeError('no more')\ncomm.allreduce(np.ones(3))\n"
    program = written(tmp_path, BEGIN, SUM, fail)
    result = mpirun(2, "-m", "mpi4py", program, timeout=60, PYTHONPATH=str(ROOT))
    assert result.status != 0
    assert "RuntimeError: no more" in result.stderr
