"""Replicas of one process beside ranks, TPUStrategy beside JAX alone, tensors beside arrays.

    mpirun -np 2 python benchmarks/devices.py replicas [--json FILE]
    python benchmarks/devices.py program
    mpirun -np 2 python benchmarks/devices.py servers
    mpirun -np 2 python benchmarks/devices.py staged          # ranks may share a GPU
    mpirun -np 2 python benchmarks/devices.py gradients       # likewise
    mpirun -np 2 python benchmarks/devices.py nccl            # a GPU for each rank

`replicas`: a step of a perceptron under PyTorch, by MirroredStrategy with two replicas in one
process, while the other rank sleeps, and with one replica in each of two ranks, in turns.
`program`: a step of a perceptron under JAX, by TPUStrategy on 8 devices of the host and by
`jax.shard_map` as one would write it, in turns. `servers`: a push of gradients to a ps, rank 0, and
a pull of new values, by variables of NumPy and by parameters of PyTorch, in turns, of
which the fastest of 5 counts. `staged`: all-reduces in place of tensors on GPUs, which pass through
the host: by a communicator; by a copy to pinned memory, a plan, or MPI, there, and a copy back; and
by torch.distributed's Gloo. `gradients`: those of ResNet-50 on GPUs, averaged by buckets, which are
packed there, by a call for all, and packed by PyTorch for one call of Gloo, as its DDP does.
`nccl`: all-reduces of tensors on GPUs, by a communicator as it chooses, by its algorithm `nccl`,
and by torch.distributed's NCCL, in turns.

Medians, in milliseconds, and the median of the ratios of all turns: above 1 ours takes longer. With
`--json` a run is added to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

# Of 15 rounds the medians of two runs differed by 30 % on two cores, of 61 by 5 %.
ROUNDS, FIRST, STEPS = 61, 4, 5
ON_GPUS = 21  # rounds, whose machines have cores enough for all ranks
LAYERS = (256, 512, 512, 10)
ROWS = 128  # for each replica
SIZES = {"64 KiB": 1 << 14, "1 MiB": 1 << 18, "16 MiB": 1 << 22, "64 MiB": 1 << 24}
PARAMETERS = 8  # that share these elements, as layers do

found: dict[str, dict[str, float]] = {}


def main() -> None:
    """Measure one of them."""
    measures = {
        "replicas": replicas,
        "program": program,
        "servers": servers,
        "staged": staged,
        "gradients": gradients,
        "nccl": nccl,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=measures)
    parser.add_argument("--json", type=Path, help="file to add the figures to")
    options = parser.parse_args()
    measures[options.what]()
    if options.json and found:  # on the rank that reports
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        for name, figures in found.items():
            known.setdefault(name, []).append(figures)
        options.json.write_text(json.dumps(known, indent=1) + "\n")


def replicas() -> None:
    import torch
    from mpi4py import MPI

    import collectives as cc
    import strategies

    torch.set_num_threads(1)
    world, comm = MPI.COMM_WORLD, cc.init()
    cores = sorted(os.sched_getaffinity(0))
    several = torch_step(
        strategies.MirroredStrategy(["/cpu:0", "/cpu:1"], comm=comm.split(comm.rank))
    )
    single = torch_step(strategies.MirroredStrategy(["/cpu:0"], comm=comm))
    times: dict[str, list[float]] = {"2 replicas": [], "2 ranks": []}
    for number in range(ROUNDS + FIRST):
        for name, step in (("2 replicas", several), ("2 ranks", single)):
            world.Barrier()
            began = time.perf_counter()
            if name == "2 ranks" or world.rank == 0:
                for _ in range(STEPS):
                    step()
            took = (time.perf_counter() - began) / STEPS
            sleep_until_all_come(world)
            if number >= FIRST:
                times[name].append(took)
    if world.rank == 0:
        report(f"PyTorch, {len(cores)} cores", times, "2 replicas", "2 ranks")


def sleep_until_all_come(world) -> None:
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)  # MPI's own waiting would take the core that the other rank needs


def torch_step(strategy):
    import torch

    import strategies

    torch.manual_seed(0)
    pairs = list(zip(LAYERS, LAYERS[1:], strict=False))
    weights = [strategy.variable(torch.randn(n, m) / n**0.5, name=f"{n} {m}") for n, m in pairs]
    optimizer = strategies.Momentum(0.01)
    x, y = torch.randn(ROWS, LAYERS[0]), torch.randn(ROWS, LAYERS[-1])

    def step():
        values = [weight.value.detach().requires_grad_() for weight in weights]
        out = x
        for value in values[:-1]:
            out = torch.relu(out @ value)
        loss = (out @ values[-1] - y).square().mean()
        gradients = torch.autograd.grad(loss, values)
        strategy.apply_gradients(optimizer, zip(gradients, weights, strict=True))

    return lambda: strategy.run(step)


def program() -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax

    steps = {"TPUStrategy": by_strategy(), "shard_map": by_hand()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + FIRST):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                jax.block_until_ready(step())
            if number >= FIRST:
                times[name].append((time.perf_counter() - began) / STEPS)
    report(
        f"JAX, 8 devices, {len(os.sched_getaffinity(0))} cores", times, "TPUStrategy", "shard_map"
    )


def jax_parts():
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(0)
    pairs = list(zip(LAYERS, LAYERS[1:], strict=False))
    weights = [(random.standard_normal(p) / p[0] ** 0.5).astype(np.float32) for p in pairs]
    x = random.standard_normal((8 * ROWS, LAYERS[0])).astype(np.float32)
    y = random.standard_normal((8 * ROWS, LAYERS[-1])).astype(np.float32)

    def loss(values, x, y):
        for value in values[:-1]:
            x = jnp.maximum(x @ value, 0)
        return jnp.mean((x @ values[-1] - y) ** 2)

    return weights, x, y, loss


def by_strategy():
    import jax

    import strategies

    start, x, y, loss = jax_parts()
    strategy = strategies.TPUStrategy()
    weights = [strategy.variable(w, name=f"w{i}") for i, w in enumerate(start)]
    optimizer = strategies.Momentum(0.01)
    (batch,) = strategy.distribute_dataset([(x, y)])

    def step(x, y):
        value, gradients = jax.value_and_grad(loss)([w.value for w in weights], x, y)
        strategy.apply_gradients(optimizer, zip(gradients, weights, strict=True))
        return value

    def run():
        strategy.run(step, args=batch)
        return [w.value for w in weights]

    return run


def by_hand():
    import jax
    import jax.numpy as jnp

    start, x, y, loss = jax_parts()
    mesh = jax.make_mesh((8,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, split = jax.P(), jax.P("r")
    same = jax.NamedSharding(mesh, spec)
    state = [jax.device_put((jnp.array(w), jnp.zeros(w.shape)), same) for w in start]
    x, y = (jax.device_put(jnp.array(a), jax.NamedSharding(mesh, split)) for a in (x, y))

    def step(state, x, y):
        value, gradients = jax.value_and_grad(loss)([w for w, _ in state], x, y)
        gradients = [jax.lax.pmean(g, "r") for g in gradients]
        new = [(w, 0.9 * m + g) for (w, m), g in zip(state, gradients, strict=True)]
        return [(w - 0.01 * m, m) for w, m in new], value[None]

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(spec, split, split), out_specs=(spec, split), check_vma=False
        ),
        donate_argnums=0,
    )

    def once():
        nonlocal state
        state, _ = run(state, x, y)
        return state

    return once


def servers() -> None:
    import torch

    import strategies

    torch.set_num_threads(1)
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=1)
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        calls = {size: by_kind(server, n, size) for size, n in SIZES.items()}
        if cluster.job == "ps":
            server.join()
            return
        for size, kinds in calls.items():
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for number in range(ROUNDS + FIRST):
                for name, call in kinds.items():
                    took = fastest(call)
                    if number >= FIRST:
                        times[name].append(took)
            report(f"push and pull of {size}", times, "PyTorch", "NumPy")


def fastest(call) -> float:
    turns = []
    for _ in range(STEPS):
        began = time.perf_counter()
        call()
        turns.append(time.perf_counter() - began)
    return min(turns)


def by_kind(server, elements: int, size: str):
    import numpy as np
    import torch

    import strategies

    each = elements // PARAMETERS
    arrays = strategies.ParameterServerStrategy(
        server, strategies.SGD(0.1), shared_name=f"NumPy {size}"
    )
    variables = [arrays.variable(np.zeros(each, np.float32)) for _ in range(PARAMETERS)]
    pairs = [(np.ones(each, np.float32), variable) for variable in variables]
    tensors = strategies.ParameterServerStrategy(server, shared_name=f"PyTorch {size}")
    parameters = [torch.nn.Parameter(torch.zeros(each)) for _ in range(PARAMETERS)]
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), strategy=tensors
    )
    for parameter in parameters:
        parameter.grad = torch.ones(each)
    return {
        "NumPy": lambda: arrays.apply_gradients(arrays.optimizer, pairs),
        "PyTorch": optimizer.step,
    }


def staged() -> None:
    import torch
    from mpi4py import MPI
    from torch import distributed

    import collectives as cc

    comm = joined_by("gloo")
    for size, elements in {"4 KiB": 1 << 10, **SIZES, "256 MiB": 1 << 26}.items():
        x = torch.zeros(elements, device="cuda")
        pinned = torch.empty(elements, pin_memory=True)
        host = pinned.numpy()
        plan = comm.plan_allreduce(host, op=cc.SUM)

        def through_host(reduce, x=x, pinned=pinned) -> None:
            pinned.copy_(x)
            reduce()
            x.copy_(pinned)

        calls = {
            "in slices": lambda x=x: comm.allreduce(x, op=cc.SUM, out=x),
            "plan": lambda run=plan: through_host(run),
            "MPI": lambda host=host: through_host(
                lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, host)
            ),
            "Gloo": lambda x=x: distributed.all_reduce(x),
        }
        times = in_turns(comm, calls)
        if comm.rank == 0:
            for other in ("plan", "MPI", "Gloo"):
                report(f"all-reduce {size} on GPUs, {other}", times, "in slices", other)
    distributed.destroy_process_group()


def gradients() -> None:
    import shapes
    import torch
    from torch import distributed

    comm = joined_by("gloo")
    given = [torch.ones(shape, device="cuda") for shape in shapes.resnet50()]
    flat = torch.empty(sum(x.numel() for x in given), device="cuda")

    def by_gloo() -> None:
        torch.cat([x.reshape(-1) for x in given], out=flat)
        distributed.all_reduce(flat)
        flat.div_(comm.size)

    with comm.plan_buckets(given) as buckets:
        calls = {
            "buckets": lambda: buckets.allreduce(given),
            "grouped": lambda: comm.grouped_allreduce(given),
            "Gloo": by_gloo,
        }
        times = in_turns(comm, calls)
    if comm.rank == 0:
        report("gradients of ResNet-50 on GPUs", times, "buckets", "Gloo")
        report("gradients of ResNet-50 on GPUs, a call for all", times, "grouped", "Gloo")
    distributed.destroy_process_group()


def nccl() -> None:
    import torch
    from torch import distributed

    import collectives as cc

    comm = joined_by("nccl")
    for nbytes in (4 << 10, 1 << 20, 64 << 20):
        x = torch.zeros(nbytes // 4, device="cuda")
        calls = {
            "by itself": lambda x=x: comm.allreduce(x, op=cc.SUM, out=x),
            "nccl": lambda x=x: comm.allreduce(x, op=cc.SUM, out=x, algorithm="nccl"),
            "PyTorch": lambda x=x: distributed.all_reduce(x),
        }
        times = in_turns(comm, calls)
        if comm.rank == 0:
            report(f"all-reduce {nbytes >> 10} KiB", times, "by itself", "PyTorch")
            report(f"all-reduce {nbytes >> 10} KiB by NCCL", times, "nccl", "PyTorch")
    distributed.destroy_process_group()


def joined_by(backend: str):
    import torch
    from torch import distributed

    import collectives as cc

    comm = cc.init()
    torch.cuda.set_device(comm.local_rank % torch.cuda.device_count())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = comm.broadcast_object(os.environ.get("MASTER_PORT", "29511"))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(comm.local_size))  # Gloo's shared memory
    distributed.init_process_group(backend, rank=comm.rank, world_size=comm.size)
    return comm


def in_turns(comm, calls) -> dict[str, list[float]]:
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ON_GPUS + FIRST):
        for name, call in calls.items():
            torch.cuda.synchronize()
            comm.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                call()
            torch.cuda.synchronize()
            if number >= FIRST:
                times[name].append((time.perf_counter() - began) / STEPS)
    return times


def report(what, times, ours, other) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    told = "  ".join(f"{name} {seconds * 1e3:8.3f}" for name, seconds in medians.items())
    ratio = statistics.median(a / b for a, b in zip(times[ours], times[other], strict=True))
    print(f"{what}: {told}  ms, {ours}/{other} {ratio:.3f}", flush=True)
    figures = {f"{name}, ms": round(seconds * 1e3, 4) for name, seconds in medians.items()}
    found[what] = {**figures, "ratio": round(ratio, 4)}


if __name__ == "__main__":
    main()
