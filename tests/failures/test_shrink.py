"""Ranks die, and those that live go on as a smaller communicator."""

import re

import pytest
from victims import FAULT_TOLERANT, needs_fault_tolerance

from launcher import mpirun, written

# Every round one part of the ranks dies, and the others go on with everything that there was.
PROGRAM = """
import os, signal, sys, time
import numpy as np
import collectives as cc

world = comm = cc.init()
number = comm.rank
rounds = [[int(rank) for rank in victims.split(",")] for victims in sys.argv[1].split("/")]

def work(comm):
    x = np.full(3000, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    assert (comm.allreduce(x, op=cc.SUM) == total).all()
    assert (comm.allreduce_async(x, op=cc.SUM).wait(30) == total).all()
    plan = comm.plan_allreduce(comm.shared_empty(1000, np.float32))
    plan()
    half = comm.split(comm.rank % 2)
    assert half.allreduce(1, op=cc.SUM) == (comm.size + 1 - comm.rank % 2) // 2
    half.close()

work(comm)
for victims in rounds:
    if number in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            work(comm)
    except cc.PeerFailure as error:
        words = str(error)
    began = time.monotonic()
    comm, before = cc.shrink(), comm
    assert cc.init() is comm
    work(comm)
    seconds = time.monotonic() - began
    print(f"{number} is rank {comm.rank} of {comm.size} after {seconds:.3f} s: {words}", flush=True)
    try:
        before.barrier()
    except cc.CollectiveError as error:
        assert "since it was shrunk" in str(error), error
if len(sys.argv) > 2 and comm.rank == comm.size - 1:
    time.sleep(float(sys.argv[2]))  # who ends first waits for the others
print(f"{number} ends", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    needs_fault_tolerance()


# A rank that hears of nothing. In such a job mpirun ends without it.
COMPUTING = """
    import os, time

    def compute():
        launcher = os.getppid()
        while os.getppid() == launcher:
            time.sleep(0.1)
        os._exit(0)
"""


def start(tmp_path, text, size, *arguments, timeout=60, **extra):
    program = written(tmp_path, COMPUTING, text)
    extra = {"UNISONO_RECORDER_DIR": str(tmp_path / "records"), **extra}
    return mpirun(size, program, *arguments, options=FAULT_TOLERANT, timeout=timeout, **extra)


@pytest.mark.parametrize(
    ("victims", "memory"),
    [("0/3", "memory"), ("0,2", "messages"),
     *[pytest.param(victims, memory, marks=pytest.mark.long)
       for victims, memory in [("1", "memory"), ("3/0", "messages"), ("1,2/0", "memory")]]],
)  # fmt: skip
def test_those_that_live_go_on_with_everything_there_was(tmp_path, victims, memory):
    folder = tmp_path / "memory"
    folder.mkdir()
    where = "off" if memory == "messages" else str(folder)
    result = start(tmp_path, PROGRAM, 4, victims, "0.6", UNISONO_SHARED_MEMORY=where)
    living = set(range(4))
    for dead in victims.split("/"):
        living -= {int(rank) for rank in dead.split(",")}
        for place, number in enumerate(sorted(living)):
            words = rf"{number} is rank {place} of {len(living)} after (\S+) s: .* died"
            told = re.search(words, result.stdout)
            assert told, result
            assert float(told[1]) < 20
    assert sorted(re.findall(r"(\d) ends", result.stdout)) == [str(rank) for rank in sorted(living)]
    assert result.status == 0, result
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_the_limit_of_an_end_after_a_failure_does_not_end_those_that_go_on(tmp_path):
    result = start(tmp_path, PROGRAM, 3, "1", "8")  # the limit is 5 s
    assert sorted(re.findall(r"(\d) ends", result.stdout)) == ["0", "2"], result
    assert result.status == 0, result


def test_a_rank_that_does_not_come_is_named_within_the_limit(tmp_path):
    text = """
        import os, signal, time
        import collectives as cc
        comm = cc.init()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 2:
            compute()
        try:
            comm.barrier()
        except cc.PeerFailure:
            pass
        comm.shrink(timeout=2)
    """
    result = start(tmp_path, text, 3, timeout=110)
    told = "CollectiveTimeout: shrink: no answer within 2 s, still waiting for rank 2 to come"
    assert told in result.stderr, result
    assert result.status != 0


def test_a_rank_that_has_ended_its_program_is_named_as_elsewhere(tmp_path):
    text = """
        import collectives as cc
        world = cc.init()
        half = world.split(world.rank % 2)
        half.barrier()
        if world.rank == 1:
            for comm in (half, world):
                try:
                    comm.agree(True)
                except cc.PeerFailure as error:
                    print(error, flush=True)
    """
    result = start(tmp_path, text, 4)
    words = r"agree: rank 1 \(world rank 3\) has ended .*\) \(rank 0 \(world rank 1\) of 2\)\n"
    assert re.search(words, result.stdout), result
    words = r"\nagree: rank [023] has ended its program \(.*\) \(rank 1 of 4\)\n"
    assert re.search(words, result.stdout), result


# Of four processes three are the world; nobody can ask them where they are.
SOME = """
    import os, signal
    import collectives as cc
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 3:
        os._exit(0)  # its MPI_Finalize might wait for the dead
    comm = cc.init([0, 1, 2])
    comm.barrier()
    assert comm.agree(True) and not comm.agree(comm.rank != 1) and comm.agree(True)
"""


@pytest.mark.parametrize("operation", ["agree(True, ", "shrink("])
def test_in_a_world_of_some_processes_a_meeting_has_its_limit(tmp_path, operation):
    text = f"""{SOME}
    if comm.rank == 2:
        compute()
    comm.{operation}timeout=2)
    """
    result = start(tmp_path, text, 4, timeout=110)
    name, _, _ = operation.partition("(")
    told = rf"CollectiveTimeout: {name}: no answer within 2 s, still waiting for other "
    assert re.search(rf"{told}ranks to come \(rank [01] of 3\)", result.stderr), result
    assert result.status != 0


def test_in_a_world_of_some_processes_those_that_live_go_on(tmp_path):
    text = f"""{SOME}
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert not comm.agree(True)
    comm = cc.shrink()
    assert comm.agree(True)
    print("sum", comm.allreduce(1, op=cc.SUM), flush=True)
    """
    result = start(tmp_path, text, 4)
    assert result.stdout.count("sum 2") == 2, result
    assert result.status == 0, result


def test_in_a_world_of_some_processes_who_shrinks_meets_those_that_agree_first(tmp_path):
    text = f"""{SOME}
    if comm.rank > 0:
        assert not comm.agree(True)
    comm = cc.shrink()
    print("sum", comm.allreduce(1, op=cc.SUM), flush=True)
    """
    result = start(tmp_path, text, 4)
    assert result.stdout.count("sum 3") == 3, result
    assert result.status == 0, result


def test_who_gives_up_lets_the_others_leave_and_all_meet_again(tmp_path):
    text = """
        import sys
        import numpy as np
        import collectives as cc
        comm = cc.init()
        comm.barrier()
        try:
            if comm.rank == 1:
                comm.revoke("it has had enough")
            comm.allreduce(np.ones(10))
        except cc.CollectiveError as error:
            print(f"{comm.rank}: {type(error).__name__}: {error}", flush=True)
        comm = comm.shrink()
        print("sum", comm.allreduce(1, op=cc.SUM), flush=True)
    """
    result = start(tmp_path, text, 3)
    assert result.stdout.count("sum 3") == 3, result
    own = (
        "1: CollectiveError: allreduce: this communicator is not usable any more, since it has had"
    )
    assert own in result.stdout, result
    for rank in (0, 2):
        assert f"{rank}: PeerFailure: allreduce: " in result.stdout, result


def test_a_status_that_those_that_live_leave_with_is_that_of_the_job(tmp_path):
    """MPI's end, which may hang after a death, is not waited for: mpirun would say 0 then."""
    text = """
        import atexit, os, signal
        import collectives as cc
        comm = cc.init()
        atexit.register(lambda: print("at exit"))  # unflushed, and before ours
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.barrier()
        except cc.PeerFailure:
            comm = cc.shrink()
        cc.exit_all(85)
    """
    result = start(tmp_path, text, 3)
    assert result.status == 85, result
    assert result.stdout.count("at exit") == 2, result
    assert "sys.exit" not in result.stderr, result


def test_where_a_death_ends_the_job_an_error_says_what_is_possible(tmp_path):
    text = """
        import collectives as cc
        comm = cc.init()
        try:
            comm.shrink()
        except cc.LaunchError as error:
            print(error)
        print("sum", comm.allreduce(1, op=cc.SUM))
    """
    result = mpirun(2, written(tmp_path, text), timeout=60)
    told = (
        "shrink: a dead rank ends this job, expected Open MPI >= 5 started by `mpirun --with-ft "
        "ulfm`, got Open MPI v5"
    )
    assert result.stdout.count(told) == 2, result
    assert result.stdout.count("sum 2") == 2


GIVEN_UP = """
import collectives as cc

world = cc.init()
part = world.group([1, 0])
if world.rank == 0:
    print("agree:", part.agree(True, timeout=40), flush=True)
elif world.rank == 1:
    part.revoke("it will make no more calls")
world.barrier()
"""


def test_who_waits_to_agree_learns_that_another_rank_has_given_up(tmp_path):
    """As long as it waited for that one, that one waited for it, in a wider group."""
    result = start(tmp_path, GIVEN_UP, 3, UNISONO_TIMEOUT="40")
    assert result.stdout == "agree: False\n", result
    assert result.status == 0
