"""Ranks that are killed, stopped or interrupted, each in an mpirun of its own."""

import os
import re
import signal
import subprocess
import sys

import pytest
from victims import FAULT_TOLERANT, needs_fault_tolerance

from launcher import environment, mpirun, mpirun_path, written

# Messages only: without shared memory a rank of the node is as far away as one of another node.
MESSAGES = {"UNISONO_SHARED_MEMORY": "off"}

# Seconds within which the survivors of a killed rank have to know: room for a busy machine, and far
# less than the 600 s that a call may last.
KNOWN_WITHIN = 20.0


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    """These tests kill ranks and look at the survivors, so the MPI library must let them live."""
    needs_fault_tolerance()


HEAD = """
    import os, signal, sys, threading, time
    import numpy as np
    import collectives as cc

    def die():
        time.sleep(0.5)  # others may still be in what went before, and would fail there
        # One clock for all processes of the machine.
        print("died at", time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def survive(function):
        try:
            while True:
                function()
        except cc.PeerFailure as error:
            now = time.monotonic()
            print(f"rank {comm.rank} of {comm.size} knew at {now}: {error}", flush=True)

    comm = cc.init()
"""


def program(tmp_path, *parts):
    return written(tmp_path, HEAD, *parts)


def check_that_survivors_knew(result, size, victim, operation):
    """Every survivor must have named the victim in time."""
    died = float(re.search(r"died at (\S+)", result.stdout)[1])
    for rank in set(range(size)) - {victim}:
        # A survivor that was slow to hear may find that others have ended meanwhile.
        words = rf"rank {rank} of {size} knew at (\S+): {operation}: ranks? (?:\d )*{victim} .*died"
        told = re.search(words + rf" \(rank {rank} of {size}\)", result.stdout)
        assert told, result
        assert float(told[1]) - died < KNOWN_WITHIN


@pytest.mark.parametrize(
    ("victim", "algorithm"), [(0, "tree"), (3, "tree"), (1, "ring"), (2, "native")]
)
def test_a_killed_rank_is_named_on_all_others_and_the_program_goes_on(tmp_path, victim, algorithm):
    text = f"""
        x = np.ones(100_000)
        for step in range(3):
            comm.allreduce(x, algorithm="{algorithm}")
        if comm.rank == {victim}:
            die()
        survive(lambda: comm.allreduce(x, algorithm="{algorithm}"))
        try:
            comm.barrier()
        except cc.CollectiveError as error:
            print(f"rank {{comm.rank}} then: {{error}}", flush=True)
    """
    file = program(tmp_path, text)
    result = mpirun(4, file, timeout=60, options=FAULT_TOLERANT, **MESSAGES)
    check_that_survivors_knew(result, 4, victim, "allreduce")
    then = "barrier: this communicator is not usable any more, since allreduce failed: PeerFailure"
    assert result.stdout.count(then) == 3


def test_a_rank_that_waits_for_a_living_one_learns_of_another_ones_death(tmp_path):
    # Rank 0 waits for rank 1, which is busy, so nobody is there to tell it about rank 2.
    text = """
        from collectives.transport.mpi import MpiTransport
        from collectives.transport.transport import Deadline
        from mpi4py import MPI
        transport = MpiTransport(MPI.COMM_WORLD)
        buffer = np.zeros(8)
        if comm.rank == 2:
            die()
        elif comm.rank == 1:
            open("busy", "w").close()
            while not os.path.exists("known"):
                time.sleep(0.01)
        else:
            survive(lambda: transport.receive(buffer, 1, Deadline("receive", 30)))
            open("known", "w").close()
    """
    file = program(tmp_path, text)
    result = mpirun(3, file, timeout=60, cwd=tmp_path, options=FAULT_TOLERANT, **MESSAGES)
    died = float(re.search(r"died at (\S+)", result.stdout)[1])
    told = re.search(r"rank 0 of 3 knew at (\S+): receive: rank 2 died", result.stdout)
    assert told, result
    assert float(told[1]) - died < KNOWN_WITHIN


def test_a_rank_that_hears_of_a_death_at_its_end_still_ends(tmp_path):
    text = """
        from mpi4py import MPI

        def finalize():  # MPI's own may hang after a death
            print("alarm in", signal.getitimer(signal.ITIMER_REAL)[0], flush=True)
            os._exit(0)

        MPI.Finalize = finalize
        if comm.rank == 2:
            die()
        while not MPI.COMM_WORLD.Get_failed().size:
            MPI.COMM_SELF.Iprobe()  # a call that lets MPI hear of it
            time.sleep(0.01)
    """
    result = mpirun(3, program(tmp_path, text), timeout=60, options=FAULT_TOLERANT, **MESSAGES)
    alarms = [float(seconds) for seconds in re.findall(r"alarm in (\S+)", result.stdout)]
    assert len(alarms) == 2, result
    assert all(alarms), result


def test_two_ranks_killed_at_once(tmp_path):
    text = """
        comm.barrier()
        if comm.rank in (0, 2):
            die()
        survive(comm.barrier)
    """
    result = mpirun(4, program(tmp_path, text), timeout=60, options=FAULT_TOLERANT, **MESSAGES)
    for rank in (1, 3):
        assert re.search(
            rf"rank {rank} of 4 knew at \S+: barrier: ranks? (0|2|0 2) died", result.stdout
        )


def test_a_group_without_the_dead_rank_goes_on(tmp_path):
    text = """
        part = comm.split(0 if comm.rank < 2 else 1)
        if comm.rank == 3:
            die()
        if comm.rank == 2:
            survive(part.barrier)
        else:
            survive(comm.barrier)
            print("sum", part.allreduce(1, op=cc.SUM), flush=True)
    """
    result = mpirun(4, program(tmp_path, text), timeout=60, options=FAULT_TOLERANT, **MESSAGES)
    assert result.stdout.count("sum 2") == 2, result
    assert "rank 2 of 4 knew" in result.stdout


def test_a_request_raises_when_a_rank_is_killed(tmp_path):
    text = """
        comm.barrier_async().wait(30)
        if comm.rank == 1:
            die()
        request = comm.barrier_async()
        survive(lambda: request.wait(30))
    """
    result = mpirun(3, program(tmp_path, text), timeout=60, options=FAULT_TOLERANT, **MESSAGES)
    check_that_survivors_knew(result, 3, 1, "barrier")


def test_a_job_ends_and_names_a_request_that_the_other_rank_never_starts(tmp_path):
    text = """
        comm.barrier_async().wait(30)
        if comm.rank == 0:
            request = comm.barrier_async()
    """
    result = mpirun(2, program(tmp_path, text), timeout=60, **MESSAGES).checked()
    told = (
        "barrier_async at program.py:24 was never waited for (failed: PeerFailure: barrier: rank 1"
    )
    assert result.stderr.count(told) == 1, result


def test_memory_of_a_message_that_nobody_waits_for_any_more_is_kept(tmp_path):
    text = """
        import gc, weakref
        from collectives.transport.mpi import MpiTransport
        from collectives.transport.transport import Deadline
        from mpi4py import MPI
        transport = MpiTransport(MPI.COMM_WORLD)
        array = np.zeros(8)
        left = weakref.ref(array)
        try:
            transport.receive(array, 0, Deadline("receive", 0.1))
        except cc.CollectiveTimeout:
            pass
        transport.close()  # does not wait
        del array, transport
        gc.collect()
        print("kept", left() is not None)
    """
    assert mpirun(1, program(tmp_path, text), timeout=60).stdout == "kept True\n"


@pytest.mark.parametrize("options", [(), FAULT_TOLERANT], ids=["plain", "fault tolerant"])
def test_a_stopped_rank_is_named_by_the_deadline_and_the_job_ends(tmp_path, options):
    text = """
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier(timeout=3 if comm.rank == 0 else 20)  # rank 0 waits for rank 1
    """
    result = mpirun(3, program(tmp_path, text), timeout=60, options=options, **MESSAGES)
    assert result.status != 0
    assert "CollectiveTimeout: barrier: no answer within 3 s" in result.stderr, result
    assert re.search(r"still waiting for rank 1 to send \d+ bytes \(rank 0 of 3\)", result.stderr)


def test_an_exception_ends_a_fault_tolerant_job_too(tmp_path):
    text = """
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("on rank 1")
        comm.barrier()
    """
    result = mpirun(3, program(tmp_path, text), timeout=60, options=FAULT_TOLERANT, **MESSAGES)
    assert result.status != 0
    assert result.stderr.count("[1/3] KeyError: 'on rank 1'") == 1, result


def test_ctrl_c_at_the_terminal_ends_the_job(tmp_path):
    text = """
        comm.barrier()
        print("waiting", flush=True)
        if comm.rank == 0:
            comm.barrier()
        threading.Event().wait(50)
    """
    command = [mpirun_path(), "-np", "2", sys.executable, str(program(tmp_path, text))]
    process = subprocess.Popen(
        command, env=environment(**MESSAGES), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0


def test_a_rank_that_waits_leaves_its_core_to_others(tmp_path):
    text = """
        comm.barrier()
        if comm.rank == 0:
            time.sleep(3)  # this rank is slow
            comm.barrier()
        else:
            used = []
            timer = threading.Timer(0.05, lambda: used.append(time.process_time()))
            timer.start()
            began = time.monotonic()
            comm.barrier()
            print("share", (time.process_time() - used[0]) / (time.monotonic() - began))
    """
    result = mpirun(2, program(tmp_path, text), timeout=60, **MESSAGES)
    assert float(re.search(r"share (\S+)", result.stdout)[1]) <= 0.05, result


def test_who_has_waited_too_long_does_not_wait_for_the_end_of_mpi_for_ever(tmp_path):
    text = """
        def set_alarm(seconds):
            if comm.rank == 0:
                print("seconds until the alarm:", seconds, flush=True)
                open(sys.argv[1], "w").close()
                os._exit(0)

        signal.alarm = set_alarm
        comm.barrier()
        if comm.rank == 0:
            try:
                comm.barrier(timeout=0.2)
            except cc.CollectiveTimeout:
                pass
        else:
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            os._exit(0)
    """
    file = program(tmp_path, text)
    for limit, expected in (("5", 60), ("90", 90)):
        ended = tmp_path / f"ended {limit}"
        result = mpirun(2, file, ended, timeout=60, UNISONO_TIMEOUT=limit, **MESSAGES)
        assert result.stdout == f"seconds until the alarm: {expected}\n", result
