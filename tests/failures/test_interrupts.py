"""A rank that waits is interrupted, by Ctrl-C or a signal handler: the error comes out as it is."""

import pytest

from launcher import mpirun
from pairwise import also

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import collectives as cc
from collectives.communicator import group_of

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
        record = group_of(comm).recorder.records[-1]
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
    group_of(comm).transport.mpi.Barrier()
    try:
        comm.barrier()
    except cc.CollectiveError as error:
        tell(f"then {error}")
else:
    group_of(comm).transport.mpi.Barrier()
    began = time.monotonic()
    try:
        for _ in range(9):  # rank 0 may have given to the first what it had to give
            comm.allreduce(x, op=cc.SUM, out=x, timeout=1)
    except cc.CollectiveError as error:
        tell(f"after {time.monotonic() - began:.3f} s {type(error).__name__}: {error}")
group_of(comm).transport.mpi.Barrier()
"""


# Interrupted while it still polls, and while it sleeps between two looks.
@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("a plan", 0.0), also("a plan", 0.3), also("a call", 0.0), ("a call", 0.3),
        ("a known call", 0.0), ("a known call", 0.3),
    ],
)  # fmt: skip
def test_a_rank_that_is_interrupted_stops_and_the_others_name_it(tmp_path, what, seconds):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = mpirun(
        3, program, what, str(seconds), timeout=60, UNISONO_RECORDER_DIR=str(tmp_path / "records")
    )
    lines = result.stdout.splitlines()
    (stopped,) = [line for line in lines if line.startswith("rank 0 stopped")]
    assert float(stopped.split()[4]) < 20, result
    (then,) = [line for line in lines if line.startswith("rank 0 then")]
    assert "not usable any more" in then
    assert "failed: KeyboardInterrupt" in then
    for rank in (1, 2):
        (line,) = [line for line in lines if line.startswith(f"rank {rank} after")]
        if what == "a known call":  # in which all three meet, up to where rank 0 left
            assert "CollectiveTimeout: allreduce: no answer within 1 s, still waiting for" in line
        else:
            assert "CollectiveTimeout" in line or "MismatchError" in line
        assert float(line.split()[3]) < 30, result
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


HANDLER = """
import os, signal, sys, threading, time
import numpy as np
import collectives as cc
from strategies.averaging.overlap import Overlap
from strategies.averaging.accumulation import LocalGradient

world = cc.init()
ONES = np.ones(2, np.float32)

class Stop(TimeoutError, ValueError):
    "What a program may raise when its time is over; of all kinds that somebody might look for."

def stop(*_):
    raise Stop("the time is over")

def stop_inside(functions):
    "Send the signal when the main thread has been in one of them for 20 looks."
    looks = 0
    while looks < 20:
        time.sleep(0.005)
        frame, names = sys._current_frames()[threading.main_thread().ident], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        looks = looks + 1 if functions & names else 0
    os.kill(os.getpid(), signal.SIGALRM)

# Each returns what rank 0 does first, and what it then waits for, until rank 1 does the same.
def buckets(comm, timeout=None):
    made = comm.plan_buckets([((2,), "float32")] * 4)
    return lambda: [made.ready(i, ONES) for i in range(4)], lambda: made.wait(timeout)

def early(comm):
    begin, wait = buckets(comm)
    begin()
    made = wait.__closure__[0].cell_contents
    wait()
    like = LocalGradient([ONES] * 4)
    mine = Overlap(made, range(4), 1.0, like)
    return lambda: [mine.ready(i, ONES) for i in range(4)], mine.finish

def fail_step(comm):
    made = comm.plan_buckets([((2,), "float32")] * 4)
    return lambda: made.ready(0, ONES), lambda: made.fail(ValueError("no gradient"))

def request(comm, timeout=None):
    comm.barrier_async().wait()
    started = []
    return lambda: started.append(comm.barrier_async()), lambda: started[0].wait(timeout)

def call(function):
    def case(comm):
        comm.barrier()
        return lambda: None, lambda: function(comm)
    return case

def plan(comm):
    return lambda: None, comm.plan_allreduce(np.ones(2))

# Inside of which functions the signal comes, and whether one may wait again.
MEETING = {"run", "_wait_long"}
CASES = {
    "buckets": (buckets, {"complete"}, True),
    "buckets with a limit": (lambda comm: buckets(comm, 50.0), {"complete"}, True),
    "early": (early, {"complete"}, False),
    "fail": (fail_step, {"complete"}, False),
    "request": (request, {"complete"}, True),
    "request with a limit": (lambda comm: request(comm, 50.0), {"complete"}, True),
    "call": (call(lambda comm: comm.allreduce(ONES)), MEETING, False),
    "plan": (plan, MEETING, False),
    "refusal": (call(lambda comm: comm.allreduce("text")), MEETING, False),
    "recv": (call(lambda comm: comm.recv(1)), MEETING, False),
}
signal.signal(signal.SIGALRM, stop)
for name, (case, functions, again) in CASES.items():
    comm = world.split(0)
    begin, wait = case(comm)
    world.barrier()
    if comm.rank == 0:
        begin()
        threading.Thread(target=stop_inside, args=(functions,), daemon=True).start()
        try:
            outcome = wait()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        print(f"{name}: {outcome}", flush=True)
        world.send(ONES, 1)
    else:
        world.recv(0)
        if again:
            begin()
    if again:
        wait()
        print(f"{name}: rank {comm.rank} has waited again", flush=True)
    elif functions == MEETING and comm.rank == 0:
        try:
            comm.barrier()
        except cc.CollectiveError as error:
            print(f"{name} then: {error}", flush=True)
world.barrier()
os._exit(0)  # what was left behind would be waited for
"""


@pytest.mark.parametrize("memory", ["/dev/shm", "off"])
def test_what_a_handler_raises_comes_out_of_every_wait(tmp_path, memory):
    program = tmp_path / "program.py"
    program.write_text(HANDLER)
    result = mpirun(2, program, timeout=60, UNISONO_SHARED_MEMORY=memory)
    lines = result.stdout.splitlines()
    again = ["buckets", "buckets with a limit", "request", "request with a limit"]
    unusable = ["call", "plan", "refusal", "recv"]
    for name in [*again, *unusable, "early", "fail"]:
        assert f"{name}: Stop: the time is over" in lines, result
    for name in again:
        for rank in (0, 1):
            assert f"{name}: rank {rank} has waited again" in lines, result
    for name in unusable:
        (then,) = [line for line in lines if line.startswith(f"{name} then: barrier: ")]
        assert "not usable any more" in then
        assert "failed: Stop: the time is over" in then
