"""Children of ranks are not ranks: forked, spawned, and started as programs."""

import re
import sys

import pytest

from launcher import library_beside, lines, mpirun, mpirun_path, run, written
from requirements import require

FORKED = """
    import os, sys
    import numpy as np
    import collectives as cc
    from collectives import extend

    comm = cc.init()
    x = np.ones(3)
    plan = comm.plan_allreduce(x.copy())
    for _ in range(2):
        comm.allreduce(x)
    comm.allreduce_async(x).wait()
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(0)
    channel = extend.open_channel(comm)
    calls = {
        "repeated": lambda: comm.allreduce(x),
        "planned": plan,
        "asynchronous": lambda: comm.allreduce_async(x),
        "send": lambda: comm.send(x, 1 - comm.rank),
        "irecv": lambda: comm.irecv(1 - comm.rank),
        "barrier": comm.barrier,
        "object": lambda: comm.broadcast_object(1),
        "split": lambda: comm.split(0),
        "channel": lambda: channel.send(1 - comm.rank, [b"x"]),
    }

    def refused():
        for name, call in calls.items():
            try:
                call()
            except cc.CollectiveError as error:
                assert name == "channel" or "a forked child is not a rank" in str(error), error
            else:
                raise AssertionError(name)
        sys.exit(0)

    def leaves_blocks():
        with comm:
            cc.shutdown()
            sys.exit(7)

    def fails():
        raise KeyError("in the child")

    for work in (refused, leaves_blocks, fails, lambda: None):
        child = os.fork()
        if child == 0:
            work()
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"rank {comm.rank}: {work.__name__} {status}", flush=True)
    channel.close(all_together=True)
    print(f"rank {comm.rank}: sum {comm.allreduce(1.0, op=cc.SUM)}", flush=True)
"""


def test_forked_children_refuse_calls_and_leave_mpi_to_their_rank(tmp_path):
    result = mpirun(2, written(tmp_path, FORKED), timeout=100).checked()
    statuses = {"refused": 0, "leaves_blocks": 7, "fails": 1, "<lambda>": 0}
    told = [f"{name} {status}" for name, status in statuses.items()] + ["sum 2.0"]
    assert lines(result) == sorted(f"rank {rank}: {text}" for rank in (0, 1) for text in told)
    assert result.stderr.count("KeyError: 'in the child'") == 2, result


SIGNALS = """
    import multiprocessing, os, signal, sys, time
    import numpy as np
    import collectives as cc
    import strategies
    from strategies.checkpoint import Saver
    from strategies.session import TrainingSession

    comm = cc.init()
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    own = lambda *what: None
    signal.signal(signal.SIGUSR1, own)

    def child(pipe):
        pipe.send([signal.getsignal(n) == (own if n == signal.SIGUSR1 else signal.SIG_DFL)
                   for n in numbers])
        time.sleep(60)

    fork = multiprocessing.get_context("fork")
    weights = strategies.Variable(np.zeros(2), name="weights")
    with strategies.CheckpointManager("checkpoints", comm) as checkpoints:
        with TrainingSession(Saver(checkpoints, weights=weights), save_steps=100):
            here, there = fork.Pipe()
            process = fork.Process(target=child, args=(there,), daemon=True)
            process.start()
            print(f"rank {comm.rank}: {here.recv()}", flush=True)
            process.terminate()
            process.join(20)
            print(f"rank {comm.rank}: ended by {process.exitcode}", flush=True)
            process.kill()
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, own)
"""


def test_signal_handlers_count_only_in_the_process_that_set_them(tmp_path):
    result = mpirun(2, written(tmp_path, SIGNALS), cwd=tmp_path, timeout=100).checked()
    told = ("[True, True, True]", "ended by -15")
    assert lines(result) == sorted(f"rank {rank}: {text}" for rank in (0, 1) for text in told)


STARTED = """
    import multiprocessing, os, subprocess, sys
    import collectives as cc

    comm = cc.init()

    def work():
        pass

    if __name__ == "__main__":
        # In one write: print makes two of it, between which another rank's may come.
        text = "import os, collectives as cc; os.write(1, b'%d ' % cc.init().size)"
        program = [sys.executable, "-c", text]
        for how in ("spawn", "forkserver"):
            worker = multiprocessing.get_context(how).Process(target=work)
            worker.start()
            worker.join()
            print(f"rank {comm.rank}: {how} {worker.exitcode}", flush=True)
        status = os.waitstatus_to_exitcode(os.system(" ".join(["exec", *map(repr, program)])))
        print(f"rank {comm.rank}: system {status}", flush=True)
        if comm.rank == 0:
            job = subprocess.run([sys.argv[1], "-n", "2", *program], capture_output=True, text=True)
            print(f"rank {comm.rank}: job {job.stdout.split()} {job.returncode}", flush=True)
        comm.barrier()
"""


@pytest.mark.parametrize("library", ["Open MPI", "mpich"])
def test_a_child_that_calls_init_gets_an_error_that_names_its_parent(tmp_path, library):
    program = written(tmp_path, STARTED)
    if library == "Open MPI":
        result = mpirun(2, program, mpirun_path(), timeout=100)
    else:
        beside = library_beside(library)
        if beside is None:
            require(library, f"no {library} beside the interpreter")
        launcher, variables = beside
        command = [launcher, "-n", "2", sys.executable, program, launcher]
        result = run([str(word) for word in command], timeout=100, **variables)
    assert result.status == 0, result
    told = ("spawn 1", "forkserver 1", "system 1")
    expected = [f"rank {rank}: {text}" for rank in (0, 1) for text in told]
    assert lines(result) == sorted([*expected, "rank 0: job ['2', '2'] 0"]), result
    for rank in (0, 1):
        words = rf"LaunchError: init: .* got a child of rank {rank} of 2 .*__name__ == \"__main__\""
        assert len(re.findall(words, result.stderr)) == 3, result


@pytest.mark.parametrize("asked", ["initialize = False", "finalize = None"])
def test_mpi_is_finalized_with_the_program_if_init_has_initialized_it(tmp_path, asked):
    text = f"""
        import mpi4py
        mpi4py.rc.{asked}
        import collectives as cc
        comm = cc.init()
        print(f"rank {{comm.rank}}: {{comm.allreduce(1.0)}}", flush=True)
    """
    result = mpirun(2, written(tmp_path, text)).checked()
    assert lines(result) == ["rank 0: 1.0", "rank 1: 1.0"]
