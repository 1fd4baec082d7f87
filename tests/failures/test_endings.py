"""Ranks whose programs end while others go on, each job in an mpirun of its own."""

import itertools
import re

import pytest
from victims import FAULT_TOLERANT, needs_fault_tolerance

from launcher import mpirun, written
from pairwise import also

# Messages only: without shared memory a rank of the node is as far away as one of another node.
MESSAGES = {"UNISONO_SHARED_MEMORY": "off"}

# Seconds from the call to the error: room for a busy machine, and far less than a wait may last.
KNOWN_WITHIN = 20.0

HEAD = """
    import os, signal, sys, threading, time
    import numpy as np
    import collectives as cc

    def told(kind, function):
        began = time.monotonic()
        try:
            function()
        except cc.PeerFailure as error:
            seconds = time.monotonic() - began
            print(f"{kind}: rank {comm.rank} after {seconds:.2f} s: {error}", flush=True)

    comm = cc.init()
    x = np.ones(8)
"""


def program(tmp_path, *parts):
    return written(tmp_path, HEAD, *parts)


def check_told(result, ranks, kind, words):
    """All of some ranks have got an error with these words in time."""
    for rank in ranks:
        told = re.search(rf"{kind}: rank {rank} after (\S+) s: .*{words}", result.stdout)
        assert told, result
        assert float(told[1]) < KNOWN_WITHIN


# Every call on a communicator of its own, as none is usable after an error.
CALLS = """
    def bucket_step(buckets):
        for index in range(2):
            buckets.ready(index, x)
        buckets.wait()

    comms = {name: comm.split(0) for name in
             "plain new planned asynchronous buckets native receive first".split()}
    for name, one in comms.items():
        if name != "first":
            one.allreduce(x)
    comms["asynchronous"].allreduce_async(x).wait(30)
    plan = comms["planned"].plan_allreduce(x.copy())
    buckets = comms["buckets"].plan_buckets([x, x])
    bucket_step(buckets)
    if comm.rank == 1:
        if how == "ends":
            sys.exit()
        for name in ("plain", "new", "planned"):
            comms[name].close()
        while not (os.path.exists("told-0") and os.path.exists("told-2")):
            time.sleep(0.01)
        sys.exit()
    told("plain", lambda: comms["plain"].allreduce(x))
    told("new", lambda: comms["new"].allgather(x))
    told("planned", plan)
    if how == "ends":
        told("asynchronous", lambda: comms["asynchronous"].allreduce_async(x).wait(30))
        told("buckets", lambda: bucket_step(buckets))
        told("native", lambda: comms["native"].allreduce(x, algorithm="native"))
        told("receive", lambda: comms["receive"].recv(1))
        told("first", comms["first"].barrier)
"""
KINDS = ("plain", "new", "planned", "asynchronous", "buckets", "native")


@pytest.mark.parametrize("settings", [{}, MESSAGES], ids=["node", "messages"])
def test_who_needs_a_rank_that_has_ended_is_told(tmp_path, settings):
    result = mpirun(3, program(tmp_path, "how = 'ends'\n", CALLS), **settings)
    words = r"rank 1 has ended its program \((after|before) [\w# ]+( at program.py:\d+)?\)"
    for kind in (*KINDS, "receive", "first"):
        check_told(result, (0, 2), kind, words)
    assert result.status == 0, result


def test_who_needs_a_rank_of_its_node_that_has_closed_the_communicator_is_told(tmp_path):
    end = "open(f'told-{comm.rank}', 'w').close()\n"
    file = program(tmp_path, "how = 'closes'\n", CALLS, end)
    result = mpirun(3, file, cwd=tmp_path)
    words = r"rank 1 has closed the communicator \(after \w+ #\d+ at program.py:\d+\)"
    for kind in ("plain", "new", "planned"):
        check_told(result, (0, 2), kind, words)


@pytest.mark.parametrize("settings", [{}, MESSAGES], ids=["node", "messages"])
def test_a_rank_that_ends_early_disturbs_nobody_who_does_not_need_it(tmp_path, settings):
    text = """
        pair = comm.split(0 if comm.rank != 1 else 1)
        comm.reduce(x, 0)
        if comm.rank == 1:
            comm.send(x, 0)
            sys.exit()
        time.sleep(1.5)
        if comm.rank == 0:
            time.sleep(1.5)               # rank 2 waits for long, rank 1 is in its group
            comm.recv(1)                  # sent before the end
        print("sum", pair.allreduce(1, op=cc.SUM), flush=True)
    """
    result = mpirun(3, program(tmp_path, text), **settings)
    assert result.stdout.count("sum 2") == 2, result
    assert result.status == 0, result


def test_a_rank_that_finalizes_mpi_by_itself_waits_for_the_others(tmp_path):
    text = """
        comm.barrier()
        if comm.rank == 0:
            from mpi4py import MPI
            MPI.Finalize()
        else:
            told("barrier", comm.barrier)
    """
    result = mpirun(2, program(tmp_path, text), **MESSAGES)
    check_told(result, (1,), "barrier", "rank 0 has ended its program")
    assert result.status == 0, result


@pytest.mark.parametrize(
    ("leave", "shown", "status"),
    [
        ("sys.exit('no data')", "no data", 1),
        ("sys.exit(3)", "sys.exit(3)", 3),
        ("raise KeyError('here')", "KeyError: 'here'", 1),
        (
            "comm.allredcue(1)",
            "AttributeError: 'Communicator' object has no attribute 'allredcue'. "
            "Did you mean: 'allreduce'?",
            1,
        ),
    ],
)
def test_an_exit_with_an_error_ends_the_job(tmp_path, leave, shown, status):
    text = f"""
        comm.barrier()
        if comm.rank == 1:
            {leave}
        while True:
            time.sleep(0.1)               # busy elsewhere: waits for nobody
    """
    result = mpirun(3, program(tmp_path, text))
    assert f"[1/3] {shown}\n" in result.stderr, result
    assert result.status == status, result


def test_an_exit_that_is_caught_or_ends_a_thread_ends_nothing(tmp_path):
    text = """
        try:
            sys.exit(3)
        except SystemExit as error:
            assert error.code == 3
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start()
        thread.join()
        print("sum", comm.allreduce(1, op=cc.SUM), flush=True)
    """
    result = mpirun(2, program(tmp_path, text))
    assert result.stdout.count("sum 2") == 2, result
    assert result.status == 0, result


@pytest.mark.parametrize("settings", [{}, MESSAGES], ids=["node", "messages"])
def test_the_first_call_names_the_rank_that_has_not_come(tmp_path, settings):
    text = """
        try:
            if comm.rank == 3:
                while not os.path.exists("told"):
                    time.sleep(0.01)
                os._exit(1)
            comm.allreduce(x, timeout=8 if comm.rank == 2 else 30)
        except cc.CollectiveTimeout as error:
            print(error, flush=True)
            open("told", "w").close()
    """
    result = mpirun(4, program(tmp_path, text), cwd=tmp_path, **settings)
    words = (
        r"still waiting for rank 3\b.*; rank 3 has called nothing yet; the limit is 8 s, by "
        r"UNISONO_TIMEOUT or timeout= \(rank 2 of 4\)"
    )
    assert re.search(words, result.stdout), result


# Without shared memory, ranks know of each other what those of different nodes do.
@pytest.mark.parametrize("memory", ["/dev/shm", "off"])
def test_a_timeout_says_that_another_rank_compiles(tmp_path, memory):
    text = """
        from collectives.core import compile_time

        comm.barrier()
        try:
            if comm.rank == 1:
                with compile_time.measure():
                    while not os.path.exists("told"):
                        time.sleep(0.01)
            else:
                comm.allreduce(x, timeout=3)
        except cc.CollectiveTimeout as error:
            print(error, flush=True)
            open("told", "w").close()
    """
    result = mpirun(
        2, program(tmp_path, text), cwd=tmp_path, UNISONO_STALL_WARNING="1",
        UNISONO_SHARED_MEMORY=memory,
    )  # fmt: skip
    words = r"rank 1\b.*; rank 1 has compiled loops for \d+ s"
    assert re.search(rf"has waited \d+ s for {words}", result.stderr), result
    assert re.search(rf"no answer within 3 s, still waiting for {words} \(", result.stdout), result


STRATEGIES = {
    "parameter server": """
        from strategies.cluster.cluster import Cluster
        from strategies.rpc.server import Server
        from strategies.cluster.spec import ClusterSpec
        server = Server(Cluster(ClusterSpec.from_ranks(comm.size, ps=1), comm))
        strategy = strategies.ParameterServerStrategy(server, strategies.SGD(1.0))
        strategy.close = server.close
        """,
    "spare replicas": """
        strategy = strategies.SpareReplicaStrategy(2)
        """,
}
WAYS = {
    "exception": "raise KeyError('here')",
    "sys.exit": "sys.exit(3)",
    "os._exit": "os._exit(1)",
    "segfault": "__import__('ctypes').string_at(0)",
}


ONCE = [("parameter server", way) for way in WAYS] + [("spare replicas", "segfault")]


@pytest.mark.parametrize(
    ("kind", "way"),
    [pair if pair in ONCE else also(*pair) for pair in itertools.product(STRATEGIES, WAYS)],
)
def test_strategies_learn_of_a_rank_that_fails_in_a_job_that_survives_it(tmp_path, kind, way):
    text = f"""
        import strategies
        {STRATEGIES[kind].strip()}
        w = strategy.variable(np.zeros(4), name="w")
        comm.barrier()
        if comm.rank == 2:
            {WAYS[way]}
        strategy.close()
        open(f"closed-{{comm.rank}}", "w").close()
        # MPI_Finalize may wait for the dead, and mpirun ends all when a rank leaves without it.
        while not all(os.path.exists(f"closed-{{rank}}") for rank in (0, 1, 3)):
            time.sleep(0.01)
        os._exit(0)
    """
    file = program(tmp_path, text)
    result = mpirun(4, file, timeout=60, cwd=tmp_path, options=FAULT_TOLERANT)
    closed = sorted(path.name for path in tmp_path.glob("closed-*"))
    assert closed == ["closed-0", "closed-1", "closed-3"], result


# Dead ranks are seen here before MPI reports them.
LATE = """
    import atexit
    pids = comm.allgather_object(os.getpid())

    def is_dead(rank):
        try:
            with open(f"/proc/{pids[rank]}/stat") as file:
                return ") Z " in file.read()
        except OSError:
            return True

    def until(happened, *arguments):
        while not happened(*arguments):
            time.sleep(0.001)
"""
LAST = {
    "after the others' last call": (
        """
        if comm.rank < 2:
            atexit.register(lambda: open(f"ended-{comm.rank}", "w").close())
        else:
            until(lambda: os.path.exists("ended-0") and os.path.exists("ended-1"))
            raise KeyError("here")
        """,
        1,
    ),
    "sys.exit after the others' last call": (
        """
        if comm.rank == 0:
            until(lambda: os.path.exists("ended-1") and os.path.exists("ended-2"))
            sys.exit(3)
        atexit.register(lambda: open(f"ended-{comm.rank}", "w").close())
        """,
        3,
    ),
    "one after the other": (
        """
        if comm.rank > 0:
            until(is_dead, comm.rank - 1)
        raise KeyError(f"on rank {comm.rank}")
        """,
        1,
    ),
    "others have gone on": (
        """
        if comm.rank == 1:
            raise KeyError("here")
        try:
            while True:
                comm.barrier()
        except cc.PeerFailure:
            comm = cc.shrink()
        assert comm.allreduce(1, op=cc.SUM) == 2
        """,
        1,
    ),
}


@pytest.mark.parametrize("settings", [{}, also(MESSAGES)], ids=["node", "messages"])
@pytest.mark.parametrize("when", LAST)
def test_an_error_of_one_rank_is_the_status_of_a_job_that_survives_it(tmp_path, when, settings):
    needs_fault_tolerance()
    text, status = LAST[when]
    file = program(tmp_path, LATE, text)
    result = mpirun(3, file, timeout=60, cwd=tmp_path, options=FAULT_TOLERANT, **settings)
    assert result.status == status, result


def test_the_other_ranks_exit_if_one_hangs_in_mpi_finalize(tmp_path):
    """As if a rank is killed there: on the other ranks MPI_Finalize sometimes never returns."""
    needs_fault_tolerance()
    text = """
        from mpi4py import MPI

        if comm.rank == 1:
            MPI.Finalize = lambda: time.sleep(100)
        comm.barrier()
        print("ends", flush=True)
    """
    result = mpirun(3, program(tmp_path, text), timeout=60, options=FAULT_TOLERANT)
    assert result.stdout.count("ends") == 3, result
    assert result.status == 0, result


def test_exit_handlers_after_mpi_finalize_have_no_limit(tmp_path):
    needs_fault_tolerance()
    text = """
        import atexit, signal

        # Called after the handlers of this package, since it is registered before them.
        atexit.register(lambda: print("alarm in", signal.getitimer(signal.ITIMER_REAL)[0]))
    """
    file = written(tmp_path, text, HEAD, "comm.barrier()")
    result = mpirun(2, file, options=FAULT_TOLERANT)
    assert result.stdout.splitlines() == ["alarm in 0.0"] * 2, result
    assert result.status == 0, result
