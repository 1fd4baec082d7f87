"""`init` with some of the processes only, and its failures."""

from launcher import mpirun, written

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


UNWRITABLE = """
import os, pathlib
from mpi4py import MPI
import collectives as cc

blocked = pathlib.Path(os.environ["UNISONO_TIMELINE"], "rank-1.json")
own = OSError if MPI.COMM_WORLD.Get_rank() == 1 else cc.MismatchError
for _ in range(2):
    try:
        cc.init()
        raise AssertionError("init has not failed")
    except own:
        assert not cc.is_initialized()
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.Get_rank() == 1:
    blocked.rmdir()
assert cc.init().size == 2
print("done", flush=True)
"""


def test_without_its_timeline_there_is_no_world(tmp_path):
    (tmp_path / "rank-1.json").mkdir()
    result = mpirun(2, "-c", UNWRITABLE, UNISONO_TIMELINE=str(tmp_path))
    assert result.status == 0, result
    assert result.stdout.splitlines().count("done") == 2
    assert (tmp_path / "rank-1.json").is_file()


def test_some_processes_are_the_world(tmp_path):
    result = mpirun(3, written(tmp_path, PROGRAM)).checked()
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


PART = """
from mpi4py import MPI
import numpy as np
import collectives as cc, strategies
from strategies import model_parallel

rank = MPI.COMM_WORLD.Get_rank()
if rank < 2:  # the others make a simulation
    comm = cc.from_mpi(MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl([0, 1])))
    for call in (
        lambda **ranks: strategies.DistributedOptimizer(strategies.SGD(1.0), **ranks),
        lambda **ranks: strategies.broadcast_parameters({"w": np.zeros(2)}, **ranks),
        lambda **ranks: strategies.check_consistent({"w": 1.0}, **ranks),
        lambda **ranks: model_parallel.allreduce(np.ones(2), **ranks),
    ):
        call(comm=comm)
        try:
            call()
        except ValueError as error:
            assert "comm is missing, expected comm=" in str(error), error
            print("refused", flush=True)
with cc.from_mpi(MPI.COMM_WORLD) as comm:  # of all processes, so there is one meaning
    strategies.check_consistent({"ranks": comm.size})
"""


def test_a_program_with_a_communicator_of_some_processes_has_to_name_it(tmp_path):
    result = mpirun(3, written(tmp_path, PART)).checked()
    assert result.stdout.split() == ["refused"] * 8
