"""Dropped and closed groups, arrays and optimizers leave no files, maps, threads or memory."""

from launcher import mpirun
from requirements import needs

PROGRAM = """
import gc, os, sys, threading, time
import numpy as np
import collectives as cc
import strategies

comm = cc.init()
x = np.ones(3, np.float32)

def sub():
    return comm.split(0, comm.rank)

def use(group):
    group.allreduce(x)
    return group

def shared(group):
    array = group.shared_empty(1000, np.float32)
    group.allreduce(array, out=array)
    return group

def buckets():
    made = comm.plan_buckets([((3,), "float32")])
    made.ready(0, x)
    made.wait()
    return made

def of_numpy():
    optimizer = strategies.DistributedOptimizer(strategies.SGD(0.1))
    optimizer.apply_gradients([(np.ones(1000), np.ones(1000))])
    return optimizer

def of_torch(wrap=strategies.DistributedOptimizer, **options):
    import torch
    model = torch.nn.Linear(100, 50)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
    return optimizer

def of_optax():
    import optax
    optimizer = strategies.DistributedOptimizer(optax.sgd(0.1))
    optimizer.update(x, optimizer.init(x), x)

def of_compiled_optax():
    import jax, optax
    optimizer = strategies.DistributedOptimizer(optax.sgd(0.1))
    jax.jit(lambda x: optimizer.update(x, optimizer.init(x), x)[0])(x).block_until_ready()

def of_horovod():
    import strategies.horovod.torch as hvd
    hvd.init()
    of_torch(hvd.DistributedOptimizer)

def process_set():
    import strategies.horovod.numpy as hvd
    hvd.init()
    hvd.remove_process_set(hvd.add_process_set([0]))

ROWS = {
    "a group": lambda: use(sub()),
    "a closed group": lambda: use(sub()).close(),
    "a group of a group": lambda: use(sub().split(0, comm.rank)),
    "a group with a tag": lambda: use(comm.group([1, 0], tag=3)),
    "a closed group with a tag": lambda: use(comm.group([1, 0], tag=3)).close(),
    "a group with a shared array": lambda: shared(sub()),
    "a closed group with a shared array": lambda: shared(sub()).close(),
    "a shared array": lambda: shared(comm),
    "asynchronous operations of a group": lambda: sub().allreduce_async(x).wait(),
    "buckets": buckets,
    "closed buckets": lambda: buckets().close(),
    "an optimizer of NumPy": of_numpy,
    "a closed optimizer of NumPy": lambda: of_numpy().close(),
    "an optimizer of PyTorch": of_torch,
    "an overlapping optimizer of PyTorch": lambda: of_torch(overlap=True),
    "a closed optimizer of PyTorch": lambda: of_torch().close(),
    "an optimizer of Optax": of_optax,
    "a compiled step of Optax": of_compiled_optax,
    "an optimizer by Horovod's names": of_horovod,
    "a process set by Horovod's names": process_set,
}

def requests_threads():
    return sum(thread.name == "unisono-requests" for thread in threading.enumerate())

def state():
    give_up = time.monotonic() + 20
    gc.collect()  # then the threads of dropped objects end
    while requests_threads() and time.monotonic() < give_up:
        time.sleep(0.001)
    gc.collect()
    segments = [line for line in open("/proc/self/maps") if "/unisono-" in line]
    return np.array([
        len(os.listdir("/proc/self/fd")),
        len(segments),
        requests_threads(),
        sys.getallocatedblocks(),
    ])

names = sys.argv[2:]
for name in names:
    ROWS[name]()
for name in names:
    for _ in range(4):
        ROWS[name]()
    before = state()
    for _ in range(int(sys.argv[1])):
        ROWS[name]()
    print(f"{name}, rank {comm.rank}:", *(state() - before), flush=True)
    comm.barrier()
"""

MADE = 20

# Python objects that remain in all, for the last calls and their descriptions. A group has 3,000.
OBJECTS = 2500


def grown(tmp_path, *names):
    """Return the growth on each rank: of files, maps, threads and Python objects."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = mpirun(2, program, str(MADE), *names, timeout=170).checked()
    lines = [line for line in result.stdout.splitlines() if ", rank " in line]
    assert len(lines) == 2 * len(names), result
    return {line.split(":")[0]: [int(n) for n in line.split(":")[1].split()] for line in lines}


def check(found):
    for name, (files, maps, threads, objects) in found.items():
        assert (files, maps, threads) == (0, 0, 0), found
        assert objects < OBJECTS, (name, found)


def test_groups_arrays_buckets_and_optimizers(tmp_path):
    check(
        grown(
            tmp_path, "a group", "a closed group", "a group of a group", "a group with a tag",
            "a closed group with a tag", "a group with a shared array",
            "a closed group with a shared array", "a shared array",
            "asynchronous operations of a group", "buckets", "closed buckets",
            "an optimizer of NumPy", "a closed optimizer of NumPy",
            "a process set by Horovod's names",
        )
    )  # fmt: skip


def test_optimizers_of_torch_and_horovods_names(tmp_path):
    needs("torch")
    check(
        grown(
            tmp_path, "an optimizer of PyTorch", "an overlapping optimizer of PyTorch",
            "a closed optimizer of PyTorch", "an optimizer by Horovod's names",
        )
    )  # fmt: skip


def test_optimizers_of_optax(tmp_path):
    needs("jax")
    check(grown(tmp_path, "an optimizer of Optax"))


def test_compiled_steps_of_optax(tmp_path):
    needs("jax")
    found = grown(tmp_path, "a compiled step of Optax")
    # JAX keeps traces.
    assert all(row[:3] == [0, 0, 0] for row in found.values()), found
