"""`init` with some of the processes only, as numbers and as a communicator of mpi4py."""

from __future__ import annotations

import textwrap

from launcher import mpirun

PROGRAM = """
from mpi4py import MPI
import collectives as cc
from collectives import extend

world = MPI.COMM_WORLD
process = world.Get_rank()

def told(*arguments):
    try:
        cc.init(*arguments)
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)

if process == 1:
    for wrong in ([0, 2], [0, 0, 1], [5], ["a"], MPI.COMM_NULL):
        told(wrong)
else:
    comm = cc.init([2, 0])
    assert cc.init() is comm and cc.init([2, 0]) is comm
    assert cc.allgather([process]).tolist() == [2, 0]
    assert extend.describe_ranks(comm, 0) == "rank 0 (world rank 2)"
    told([0, 2])
    cc.shutdown()
    part = world.Create_group(world.Get_group().Incl([0, 2]))
    assert cc.init(part).allgather([process]).tolist() == [0, 2]
    part.Free()
    cc.barrier()
    cc.shutdown()
world.Barrier()
comm = cc.init(world)
assert cc.init() is comm and cc.size() == 3
assert cc.split(process % 2).size == 2 - process % 2
assert (cc.group([1]) is None) == (process != 1)
print("done", flush=True)
"""


def test_some_processes_are_the_world(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    result = mpirun(3, program)
    assert result.status == 0, result
    lines = result.stdout.splitlines()
    assert lines.count("done") == 3
    expected = "expected processes 0 .. 2, each at most once, got"
    for line in (
        "init: process 1 of 3 is not among the processes [0, 2], so it must not call init with "
        "them",
        f"init: {expected} [0, 0, 1]",
        f"init: {expected} [5]",
    ):
        assert f"ValueError: {line}" in lines, result
    assert any(line.startswith("TypeError: ") for line in lines)
    assert "init: expected a communicator of the processes of one group" in result.stdout
    again = "init: there is a world already, of the processes [2, 0], got [0, 2]; call shutdown()"
    assert result.stdout.count(again) == 2, result
