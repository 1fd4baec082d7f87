"""Several machines as network namespaces: one world, right results, a cable that is pulled."""

import fcntl
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher import ROOT
from limits import Limit
from requirements import needs

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("machines")]

CHECK = Path(__file__).with_name("check_algorithms.py")
RUN_SECONDS = 60.0
POLL_SECONDS = 0.02


def until(what, true, seconds=RUN_SECONDS):
    """Wait until `true()`; fails after `seconds`."""
    limit = Limit(seconds)
    while not true():
        assert limit.left(), f"not after {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)


WHO = """
import platform
import collectives as cc

comm = cc.init()
places = comm.allgather([[comm.rank, comm.node_rank, comm.local_rank, comm.local_size]])
names = comm.allgather_object(platform.node())
if comm.rank == 0:
    print(comm.size, comm.num_nodes, places.tolist(), names)
"""


def test_two_machines_with_two_ranks_are_one_world(two_machines, tmp_path):
    program = tmp_path / "who.py"
    program.write_text(WHO)
    result = two_machines.run(2, program, timeout=RUN_SECONDS)
    places = [[0, 0, 0, 2], [1, 0, 1, 2], [2, 1, 0, 2], [3, 1, 1, 2]]
    assert result.stdout.strip() == f"4 2 {places} ['m1', 'm1', 'm2', 'm2']", result
    result = two_machines.run(2, program, timeout=RUN_SECONDS, by="node")
    assert result.stdout.strip().endswith("['m1', 'm2', 'm1', 'm2']"), result


@pytest.mark.parametrize(
    ("ranks", "by"), [((1, 1), "slot"), ((2, 2), "node"), ((2, 1), "slot"), ((1, 3), "slot")]
)
def test_all_algorithms_are_right_between_machines(two_machines, ranks, by):
    tests = f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = two_machines.run(ranks, CHECK, timeout=RUN_SECONDS, by=by, PYTHONPATH=tests)
    assert result.status == 0, result
    right = sorted(re.findall(r"rank (\d) of \d on node \d of 2: all right", result.stdout))
    assert right == [str(rank) for rank in range(sum(ranks))], result


def test_check_finds_nothing_wrong_with_two_machines(two_machines):
    result = two_machines.run((2, 1), "-m", "collectives", "check", timeout=RUN_SECONDS)
    assert result.status == 0, result
    lines = result.stdout.splitlines()
    assert lines[0] == "ranks: 3, nodes: 2"
    assert lines[-1] == "all well"
    (engine,) = [line for line in lines if line.startswith("node engine")]
    assert "ok      in use inside each of 2 nodes, with messages between them" in engine


def test_bench_measures_between_two_machines(two_machines, tmp_path):
    file = tmp_path / "figures.json"
    command = ("-m", "collectives", "bench", "allreduce", "--sizes", "8,64K", "--json", file)
    result = two_machines.run(2, *command, timeout=RUN_SECONDS)
    assert result.status == 0, result
    assert "4 ranks, 2 nodes" in result.stdout
    assert file.exists()


KILLED = """
import os, signal, sys, time
import numpy as np
import collectives as cc

comm = cc.init()
algorithm = sys.argv[1]
x = comm.shared_empty(100_000, np.float32)
try:
    for step in range(3):
        comm.allreduce(x, out=x, algorithm=algorithm)
    if comm.rank == 3:  # while others may be in the last step still
        print(f"died at {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.allreduce(x, out=x, algorithm=algorithm)
except cc.PeerFailure as error:
    print(f"rank {comm.rank} knew at {time.monotonic()}: {error}", flush=True)
"""


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_a_killed_rank_is_named_by_its_number_on_both_machines(two_machines, tmp_path, algorithm):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    result = two_machines.run(
        2, program, algorithm, timeout=RUN_SECONDS, options=("--with-ft", "ulfm")
    )
    died = float(re.search(r"died at (\S+)", result.stdout)[1])
    for rank in range(3):
        words = rf"rank {rank} knew at (\S+): allreduce: ranks? (?:\d )*3 died \(rank {rank} of 4\)"
        told = re.search(words, result.stdout)
        assert told, result
        assert float(told[1]) - died < 5.0


RATE = """
import time
import numpy as np
import collectives as cc

comm = cc.init()
x = np.ones(1 << 20, np.float32)
comm.barrier()
began = time.perf_counter()
comm.allreduce(x, op=cc.SUM, out=x, algorithm="ring")
if comm.rank == 0:
    print(time.perf_counter() - began)
"""


def test_a_shaped_link_carries_no_more_than_its_rate_in_either_direction(two_machines, tmp_path):
    program = tmp_path / "rate.py"
    program.write_text(RATE)
    before = two_machines.sent_bytes("m1")
    result = two_machines.run(1, program, timeout=RUN_SECONDS, shape="100mbit")
    # Each rank sends 4 MiB and receives as much; a burst may go at once, and one begin earlier.
    assert float(result.stdout) > ((4 << 20) - (256 << 10)) / (100e6 / 8), result
    assert two_machines.sent_bytes("m1") - before > 4 << 20


AFTER_A_PAUSE = """
import time
import numpy as np
import collectives as cc

comm = cc.init()
x = np.ones(256 << 10, np.uint8)
for _ in range(100):
    time.sleep(0.003)
    began = time.perf_counter()
    if comm.rank == 0:
        comm.send(x, dest=1)
        comm.recv(source=1)
        print(time.perf_counter() - began)
    else:
        comm.recv(source=0)
        comm.send(x[:1], dest=0)
"""


def test_an_idle_link_has_saved_no_more_than_two_packets(two_machines, tmp_path):
    program = tmp_path / "pause.py"
    program.write_text(AFTER_A_PAUSE)
    result = two_machines.run(1, program, timeout=RUN_SECONDS, shape="1gbit")
    took = list(map(float, result.stdout.split()))
    assert len(took) == 100
    assert min(took) > ((256 << 10) - (18 << 10)) / (1e9 / 8), result


PULLED = """
import os, sys, time
from pathlib import Path
import numpy as np
import collectives as cc
from collectives.communicator import group_of

comm = cc.init()
folder = Path(sys.argv[1])

def await_file(name):
    deadline = time.monotonic() + 30
    while not (folder / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

comm.barrier()
start_send = group_of(comm).transport._start_send
messages = 0

def pull_the_cable_after_some_messages(data, dest):
    global messages
    messages += 1
    if messages == 10:
        (folder / "in the middle").touch()
        await_file("pulled")
    return start_send(data, dest)

if comm.rank == 1:
    group_of(comm).transport._start_send = pull_the_cable_after_some_messages
try:
    comm.allreduce(np.ones(1 << 24, np.float32), op=cc.SUM, algorithm="ring", timeout=8)
    text = "no error"
except cc.CollectiveTimeout as error:
    text = str(error)
(folder / f"part {comm.rank}").write_text(text)
(folder / f"part {comm.rank}").rename(folder / f"rank {comm.rank}")
await_file(f"rank {1 - comm.rank}")  # the end of one rank ends the other
# What was under way stays under way: MPI could not end in order.
os._exit(0)
"""


def test_a_pulled_cable_is_a_timeout_on_both_sides_that_names_the_other(two_machines, tmp_path):
    program = tmp_path / "pulled.py"
    program.write_text(PULLED)

    def exists(name):
        return (tmp_path / name).exists()

    with ThreadPoolExecutor() as pool:
        job = pool.submit(
            two_machines.run, 1, program, tmp_path, timeout=RUN_SECONDS, shape="1gbit",
            UNISONO_CHECK="off",
        )  # fmt: skip
        try:
            until("ten messages", lambda: exists("in the middle") or job.done())
            two_machines.connect("m2", False)
            (tmp_path / "pulled").touch()
            until("both ranks' errors", lambda: exists("rank 0") and exists("rank 1"))
        finally:
            two_machines.connect("m2", True)
        job.result()
    for rank, other in ((0, 1), (1, 0)):
        text = (tmp_path / f"rank {rank}").read_text()
        assert text.startswith("allreduce: no answer within 8 s, still waiting for"), text
        assert f"waiting for rank {other} to" in text
        assert f"(rank {rank} of 2)" in text


HOLD = """
import fcntl, sys, time

lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_SH)  # alive as long as this is held
print("locked", flush=True)
time.sleep(600)
"""


def is_free(lock):
    """Whether no process holds the lock."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_job_that_takes_too_long_is_killed_on_all_machines(two_machines, tmp_path):
    program = tmp_path / "hold.py"
    program.write_text(HOLD)
    words = r"did not end within 3\.0 s, with \d+ processes left\n(locked\s+){2}"
    with pytest.raises(AssertionError, match=words):
        two_machines.run(1, program, tmp_path / "lock", timeout=3.0)
    until("all processes are gone", lambda: is_free(tmp_path / "lock"))


CLUSTER_OF_KILLED_TESTS = """
import os, sys
from namespaces import NamespaceCluster

with NamespaceCluster(2) as cluster:
    print(os.readlink(f"/proc/{cluster._keeper.pid}/ns/net"), flush=True)
    cluster.run(1, *sys.argv[1:], timeout=600)
"""


@pytest.mark.usefixtures("two_machines")  # for its skip
def test_killed_tests_leave_nothing_behind(tmp_path):
    program, lock = tmp_path / "hold.py", tmp_path / "lock"
    program.write_text(HOLD)
    lock.touch()
    paths = [str(ROOT / "tests"), str(Path(__file__).parent)]
    tests = subprocess.Popen(
        [sys.executable, "-c", CLUSTER_OF_KILLED_TESTS, program, lock],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with tests:
        namespace = tests.stdout.readline().strip()
        assert namespace.startswith("net:[")
        until("the job runs", lambda: not is_free(lock))
        tests.kill()
    until("all processes are gone", lambda: is_free(lock))
    until("the namespace is gone", lambda: namespace not in namespaces_in_use())


def namespaces_in_use():
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:  # it ended just now
            continue
    return found


def test_nothing_of_the_machine_is_changed(two_machines):
    assert not Path("/run/machines").exists()
    assert "10.77.0." not in Path("/etc/hosts").read_text()
    devices = {name for name in os.listdir("/sys/class/net") if name.startswith(("switch", "port"))}
    assert not devices


ENDS = """
import sys, time
import numpy as np
import collectives as cc

comm = cc.init()
comm.allreduce(np.ones(8))
if comm.rank == comm.size - 1:
    sys.exit()
began = time.monotonic()
try:
    comm.allreduce(np.ones(8))
except cc.PeerFailure as error:
    print(f"rank {comm.rank} after {time.monotonic() - began:.2f} s: {error}")
"""


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_a_rank_that_ends_its_program_is_named_on_the_other_machine(two_machines, tmp_path, ranks):
    program = tmp_path / "ends.py"
    program.write_text(ENDS)
    result = two_machines.run(ranks, program, timeout=RUN_SECONDS)
    last = sum(ranks) - 1
    words = rf"rank {last} has ended its program \(after allreduce #1 at ends.py:7\)"
    told = re.findall(rf"rank (\d) after (\S+) s: .*{words}", result.stdout)
    assert sorted(rank for rank, _ in told) == [str(rank) for rank in range(last)], result
    assert max(float(seconds) for _, seconds in told) < 3.0, result


DDP = """
import os, signal
import torch
from torch import distributed, nn

import collectives as cc
import strategies.torch
from strategies.torch import DdpOptions, ddp_hook

torch.set_num_threads(1)
distributed.init_process_group("unisono")
rank, size = distributed.get_rank(), distributed.get_world_size()


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 3))


def rows(rank, step):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(codec):
    model = nn.parallel.DistributedDataParallel(made(), gradient_as_bucket_view=True)
    if codec is not None:
        model.register_comm_hook(DdpOptions(compression=codec.on("network")), ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(rank, step)).square().mean().backward()
        optimizer.step()
    return model, nn.utils.parameters_to_vector(model.parameters()).detach()


alone = made()
optimizer = torch.optim.SGD(alone.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    alone(torch.cat([rows(r, step) for r in range(size)])).square().mean().backward()
    optimizer.step()
wanted = nn.utils.parameters_to_vector(alone.parameters()).detach()
moved = (wanted - nn.utils.parameters_to_vector(made().parameters())).abs().max()
# Each of three steps rounds what moves in it, twice.
for codec, error in ((None, 1e-6), (cc.FP16, 6 * 2**-11), (cc.INT8, 6 * 2**-8)):
    model, own = trained(codec)
    everyones = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(everyones, own)
    assert all(torch.equal(own, other) for other in everyones)
    assert (own - wanted).abs().max() <= error * moved + 1e-6, (codec, (own - wanted).abs().max())
distributed.barrier()
print("equal", rank, flush=True)
if rank == size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        model(rows(rank, 0)).square().mean().backward()
except RuntimeError as error:  # of the hook, or of its future
    print("found", rank, str(error).replace(chr(10), " "), flush=True)
    os._exit(0)
"""


def test_ddp_between_machines(two_machines, tmp_path):
    needs("torch")
    program = tmp_path / "ddp.py"
    program.write_text(DDP)
    options = ("--with-ft", "ulfm")  # so that the launcher does not end the others first
    result = two_machines.run((2, 1), program, timeout=RUN_SECONDS, options=options)
    assert sorted(re.findall(r"equal (\d)", result.stdout)) == ["0", "1", "2"], result
    found = dict(re.findall(r"found (\d) (.*)", result.stdout))
    assert set(found) == {"0", "1"}, result
    assert all(re.search(r"rank 2 died", text) for text in found.values()), found


OUT_OF_REACH = """
import time
from torch import distributed
import collectives as cc
import strategies.torch.rendezvous as rendezvous

rendezvous.addresses = lambda: ["255.255.255.255"]
began = time.monotonic()
try:
    distributed.init_process_group("unisono")
except cc.LaunchError as error:
    assert time.monotonic() - began < 30
    print("told", error, flush=True)
"""


def test_a_store_out_of_reach_is_an_error_on_all_machines(two_machines, tmp_path):
    needs("torch")
    program = tmp_path / "out_of_reach.py"
    program.write_text(OUT_OF_REACH)
    result = two_machines.run(1, program, timeout=RUN_SECONDS)
    words = "told init_process_group: rank 1 cannot reach the store of rank 0: 255.255.255.255"
    assert result.stdout.count(words) == 2, result
