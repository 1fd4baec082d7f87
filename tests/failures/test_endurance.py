"""Memory stays as it is, however many calls are made, and however large a table in parts is."""

import re

import pytest

from launcher import mpirun

PROGRAM = """
import gc, os, re, sys, threading
import numpy as np
import collectives as cc

comm = cc.init()
x, out = np.ones((64, 16), np.float32), np.empty((64, 16), np.float32)
shared = comm.shared_empty(1024, np.float32)
plan, shared_plan = comm.plan_allreduce(x.copy()), comm.plan_allreduce(shared)
strided = np.ones((64, 32), np.float32)[:, ::2]
even = comm.size * [64 // comm.size]
even[0] += 64 - sum(even)

def cycle(step):
    plan()
    shared_plan()
    comm.allreduce(x)
    comm.allreduce(x, out=out)
    comm.allreduce(shared, out=shared)
    comm.allreduce(strided)
    comm.allreduce(np.ones(step % 7, np.float32), op=cc.SUM)
    comm.allreduce(x, compression=cc.FP16)
    comm.reduce(x, step % comm.size)
    comm.reduce_scatter(x)
    comm.broadcast(x, step % comm.size)
    comm.gather(x)
    comm.allgather(x)
    comm.scatter(x, counts=even)
    comm.alltoall(x, counts=even)
    comm.barrier()
    comm.grouped_allreduce([x, out])
    comm.grouped_allreduce([x, out], op=cc.SUM, prescale=0.5, out=[x, out])
    comm.grouped_reduce_scatter(comm.grouped_broadcast([x, out]), op=cc.MAX)
    comm.grouped_allgather([x[: step % 3], out[:1]])
    comm.allgather(x[:64 // comm.size], out=out[: 64 // comm.size * comm.size])
    comm.allreduce(x > 0, op=cc.LOGICAL_AND)
    comm.allreduce((x, x.astype(int)), op=cc.MINLOC)
    comm.broadcast_object({"step": step})
    try:
        comm.allreduce(x, op=cc.MAX if comm.rank else cc.MIN)
    except cc.MismatchError:
        pass
    requests = [
        comm.allreduce_async(x), comm.allgather_async(x), comm.broadcast_async(x),
        comm.barrier_async(),
    ]
    for request in requests:
        request.wait()
    return 27 + len(requests)

def memory():
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    segments = re.findall(r"^(\\w+)-(\\w+) .*/unisono-", open("/proc/self/maps").read(), re.M)
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "shared": sum(int(stop, 16) - int(start, 16) for start, stop in segments),
        "objects": sys.getallocatedblocks(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }

def run(calls):
    step = made = 0
    while made < calls:
        made += cycle(step)
        step += 1

run(int(sys.argv[1]))
memory()  # which itself takes some the first time
before = memory()
run(10_000)
after = memory()
grown = {name: after[name] - before[name] for name in before}
words = [f"{name} {n}" for name, n in grown.items()]
print("rank", comm.rank, *words, before["shared"], flush=True)
"""

# Calls after which everything that is kept has been made: buckets, records, remembered calls.
WARM = 3000

# One object of Python in ten calls. What is kept changes by some hundred objects: the last records,
# and the last 1,024 descriptions whose hashes are remembered.
OBJECTS = 1000

# Python takes memory in pieces of 1 MiB, each for objects of one size or another. One array of 4
# KiB kept in ten calls would be 4 MB.
RESIDENT = 1 << 20


@pytest.mark.parametrize("memory", ["/dev/shm", "off"])
def test_memory_is_flat_over_10000_calls_of_all_kinds(tmp_path, memory):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = mpirun(2, program, str(WARM), timeout=170, UNISONO_SHARED_MEMORY=memory).checked()
    for rank in range(2):
        (line,) = [t for t in result.stdout.splitlines() if t.startswith(f"rank {rank} ")]
        words = line.split()
        grown = dict(zip(words[2:-1:2], map(int, words[3:-1:2]), strict=True))
        assert grown["shared"] == grown["files"] == grown["threads"] == 0, line
        assert (int(words[-1]) > 0) == (memory == "/dev/shm"), line
        assert grown["objects"] <= OBJECTS, line
        assert grown["resident"] <= RESIDENT, line


TABLE = """
import resource
import numpy as np
import collectives as cc
from strategies.rpc import Service
from strategies.variables import initializers, partition, shared_partitioned_variable

rows, width = 6_000_000, 16                               # 366 MiB of float32
comm = cc.init()

def own(first, last, shape, dtype):                       # which no other task can import
    return np.full((last - first, *shape[1:]), first, dtype)

with Service(comm) as service:
    for name, initializer in (("normal", initializers.normal(seed=5)), ("own", own)):
        if comm.rank == 2:                                # which has no part
            table = shared_partitioned_variable(
                initializer, partitioner=partition.fixed_size(24), service=service,
                shared_name=name, tasks=[0, 1], shape=(rows, width),
            )
            few = np.array([5_999_999, 0, 250_000])
            expected = [[n // 250_000 * 250_000] * width for n in few]
            if name == "normal":
                expected = [initializer(n, n + 1, (rows, width), "float32")[0] for n in few]
            np.testing.assert_array_equal(table.gather(few).value, expected)
        comm.barrier()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        peaks = comm.gather_object(peak)
        if comm.rank == 0:
            print("peaks", name, *peaks, flush=True)
"""


def test_no_task_needs_the_memory_of_a_table_in_parts(tmp_path):
    file = tmp_path / "table.py"
    file.write_text(TABLE)
    result = mpirun(3, file, timeout=100).checked()
    found = dict(re.findall(r"^peaks (\w+) (.*)$", result.stdout, re.M))
    for name, held in (("normal", 183), ("own", 366)):  # MiB on each of two tasks so far
        first, second, maker = map(int, found[name].split())
        assert max(first, second) < held + 300, result
        assert maker < 300, result  # where the whole would be 366 or more
