"""Local steps and sharded optimizer state: accuracy and bytes, memory and time.

    python benchmarks/local_steps.py [--ranks 2 4] [--epochs 20] [--json FILE]
    python benchmarks/local_steps.py --network [--ranks 2 4] [--json FILE]
    mpirun -np 2 python benchmarks/local_steps.py --sharded [--keep-memory] [--json FILE]

The first trains the digits of scikit-learn with ranks that are threads and exchange messages. It
prints the accuracy on the held-out rows, the mean of some seeds, and the bytes that a rank sends in
a step, which are counted and do not depend on the machine.

The second trains on machines that are network namespaces with links of 1 Gbit/s, one rank on each,
and needs root: the network of the digits, and one of 25.2 million parameters. It prints accuracy,
ms per step of the optimizer, and how much of it is the exchange: the rest is the time of steps
without any.

The third runs steps of Adam on a perceptron of 25 million parameters: with whole state, with
`shard_state=True`, and by PyTorch's `ZeroRedundancyOptimizer` over this backend and over Gloo. All
ways take turns. It prints medians in ms, and the bytes of the states of one rank. PyTorch gives the
memory of large tensors back to the system; with `--keep-memory` it is kept, for all ways alike
(`strategies.torch.keep_memory`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import collectives as cc
import strategies
from collectives.testing import run_ranks
from collectives.testing.thread_transport import ThreadTransport
from strategies.optimizers import Momentum, Nesterov

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
HIDDEN, BATCH, RATE = 64, 16, 0.1
SEEDS, ROUNDS, FIRST = 3, 9, 2

# Trained between machines: 4,810 and 25.2 million parameters.
NETWORKS = {
    "digits": {"epochs": 20, "seeds": 3},
    "25 M": {"epochs": 4, "seeds": 1, "hidden": 336_000, "rate": 2e-5},
}

WAYS = {
    "every step": lambda: {},
    "every step, 16 bits": lambda: {"compression": cc.FP16},
    "every step, 8 bits": lambda: {"compression": cc.INT8.with_feedback()},
    "every step, top-k 1 %": lambda: {"compression": cc.TOPK(0.01).with_feedback()},
    "local, k = 4": lambda: {"sync_every": 4},
    "local, k = 16": lambda: {"sync_every": 16},
    "post-local, 1 then 16": lambda: {"sync_every": lambda step: 1 if step < 100 else 16},
    "DiLoCo, k = 16": lambda: {"sync_every": 16, "outer": Nesterov(0.7, 0.6)},
    "DiLoCo, k = 16, 16 bits": lambda: {
        "sync_every": 16, "outer": Nesterov(0.7, 0.6), "compression": cc.FP16.with_feedback(),
    },
    "DiLoCo, k = 16, 8 bits": lambda: {
        "sync_every": 16, "outer": Nesterov(0.7, 0.6), "compression": cc.INT8.with_feedback(),
    },
    "a step late": lambda: {"delay": 1},
}  # fmt: skip


def main() -> None:
    """Measure what was asked for; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--network", action="store_true", help="time exchanges between machines")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help="time steps with sharded state")
    parser.add_argument("--keep-memory", action="store_true", help="of what is freed")
    parser.add_argument("--json", type=Path, help="file to add the figures to")
    options = parser.parse_args()
    if options.worker:
        found = worker()
    elif options.network:
        found = between_machines(options.ranks)
    elif options.sharded:
        found = sharded_steps(options.keep_memory)
    else:
        found = digits(options.ranks, options.epochs)
    if options.json and found:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(known | found, indent=1) + "\n")


def digits(sizes: list[int], epochs: int) -> dict[str, dict[str, list[float]]]:
    """Train in each way; returns accuracy in % and bytes of a step by ranks and way."""
    sys.path.insert(0, str(EXAMPLES))
    sent = count_bytes()
    found: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        rows = found[f"digits, {size} ranks"] = {}
        for way, make in WAYS.items():
            sent[0], right, steps = 0, [], 0
            for seed in range(SEEDS):
                results = run_ranks(train, size, args=(make, epochs, seed), timeout=60.0)
                right.append(100 * results[0][0])
                steps += results[0][1]
            rows[way] = [round(statistics.mean(right), 2), round(sent[0] / size / steps)]
            print(
                f"{size} ranks  {way:24} {rows[way][0]:6.2f} %  {rows[way][1]:7} bytes", flush=True
            )
    return found


def between_machines(sizes: list[int]) -> dict[str, dict[str, list[float]]]:
    """Train on namespaces; returns accuracy in %, ms of a step, and ms of its exchange."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]
    from namespaces import NamespaceCluster

    found: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        with NamespaceCluster(size) as cluster:
            job = cluster.run(1, __file__, "--worker", timeout=1800, shape="1gbit")
        if job.status != 0:
            raise SystemExit(job.stdout + job.stderr)
        for model, rows in json.loads(job.stdout.splitlines()[-1]).items():
            alone = rows["no exchange"][1]
            found[f"{model}, {size} machines"] = table = {
                way: [right, round(took, 2), round(took - alone, 2)]
                for way, (right, took) in rows.items()
            }
            for way, (right, took, exchange) in table.items():
                print(f"{size} machines  {model:12} {way:24} {right:6.2f} %  {took:8.2f} ms  "
                      f"{exchange:8.2f} ms of exchange", flush=True)  # fmt: skip
    return found


def worker() -> dict[str, Any]:
    """Train both networks on this rank in each way; rank 0 prints accuracy and ms of a step."""
    sys.path.insert(0, str(EXAMPLES))
    comm = cc.init()
    found: dict[str, dict[str, list[float]]] = {}
    for model, options in NETWORKS.items():
        rows = found[model] = {}
        for way in ("no exchange", "every step", "local, k = 16", "DiLoCo, k = 16, 8 bits"):
            make = WAYS.get(way, lambda: {"sync_every": 10**9})
            results = [train(make, seed=seed, **options) for seed in range(options["seeds"])]
            right = 100 * statistics.mean(result[0] for result in results)
            rows[way] = [round(right, 2), 1000 * statistics.mean(r[2] / r[1] for r in results)]
    if comm.rank == 0:
        print(json.dumps(found))
    return found


def train(
    make, epochs: int, seed: int, hidden: int = HIDDEN, rate: float = RATE, seeds: int = 0
) -> tuple[float, int, float]:
    """Train on one rank; returns accuracy on held-out rows, steps, and the optimizer's seconds."""
    from common.digits import Network, accuracy, batches, load

    comm = cc.init()
    pixels, labels = (part[comm.rank :: comm.size] for part in load("training"))
    if hidden != HIDDEN:  # else the products would be of float64
        pixels = pixels.astype(np.float32)
    network = Network.random(hidden, seed)
    network.weights = {name: x.astype(np.float32) for name, x in network.weights.items()}
    optimizer = strategies.DistributedOptimizer(Momentum(rate, 0.9), **make())
    # As many steps on all ranks: rows are left out where one has more.
    count, steps, seconds = 1250 // comm.size, 0, 0.0
    for epoch in range(epochs):
        for own in batches(count, BATCH, 1000 * seed + epoch):
            _, gradients = network.gradients(pixels[own], labels[own])
            pairs = [(gradients[name], x) for name, x in network.weights.items()]
            began = time.perf_counter()
            optimizer.apply_gradients(pairs)
            seconds += time.perf_counter() - began
            steps += 1
    optimizer.close()
    mean = {name: comm.allreduce(x) for name, x in network.weights.items()}
    pixels, labels = load("held out")
    return accuracy(Network(mean).predict(pixels), labels), steps, seconds


def count_bytes() -> list[int]:
    """Count the bytes of all messages between ranks that are threads, in the only element."""
    total, lock, send = [0], threading.Lock(), ThreadTransport._send

    def counted(self, kind, data, dest):
        with lock:
            total[0] += data.nbytes
        return send(self, kind, data, dest)

    ThreadTransport._send = counted
    return total


def sharded_steps(kept: bool) -> dict[str, dict[str, list[float]]]:
    """Time steps with whole and sharded state in turns; returns ms and bytes of the states."""
    import torch
    from torch import distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    import strategies.torch  # the backend

    torch.set_num_threads(1)
    comm = cc.init()
    if kept:
        strategies.torch.keep_memory()
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(comm.local_size))
    distributed.init_process_group("unisono")
    gloo = distributed.new_group(backend="gloo")
    x = torch.randn(8, 2048)

    def model():
        torch.manual_seed(0)
        layers = [(2048, 4096), (4096, 4096)]
        return torch.nn.Sequential(*itertools.chain.from_iterable(
            (torch.nn.Linear(*shape), torch.nn.ReLU()) for shape in layers
        ))  # fmt: skip

    def ours(**options):
        net = model()
        own = torch.optim.Adam(net.parameters(), 1e-3)
        return net, strategies.DistributedOptimizer(own, **options)

    def zero(group):
        net = DistributedDataParallel(model(), process_group=group, gradient_as_bucket_view=True)
        return net, ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.Adam, process_group=group, lr=1e-3
        )

    ways = {
        "whole": ours(), "shard_state": ours(shard_state=True),
        "ZeRO, this backend": zero(None), "ZeRO, Gloo": zero(gloo),
    }  # fmt: skip
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(FIRST + ROUNDS):
        for way, (net, optimizer) in list(ways.items())[:: 1 if turn % 2 else -1]:
            comm.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            comm.barrier()
            if turn >= FIRST:
                times[way].append(1000 * (time.perf_counter() - began))
    found = {
        way: [round(statistics.median(times[way]), 1), bytes_of(optimizer)]
        for way, (_, optimizer) in ways.items()
    }
    for way, (median, nbytes) in found.items() if comm.rank == 0 else ():
        print(f"{way:20} {median:8.1f} ms  {nbytes / 2**20:7.1f} MiB of state")
    name = f"sharded, {comm.size} ranks" + (", memory is kept" if kept else "")
    return {name: found} if comm.rank == 0 else {}


def bytes_of(optimizer) -> int:
    """Return the bytes of the states of one rank."""
    inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer: its own part
    states = inner.state_dict()["state"].values()
    arrays = [getattr(x, "array", x) for state in states for x in state.values()]
    return sum(x.nbytes for x in arrays)


if __name__ == "__main__":
    main()
