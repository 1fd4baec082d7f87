"""A training step of PyTorch between machines: with and without overlap, and DDP.

    python benchmarks/overlap.py [--json FILE] [--rounds 3] [--mbit 1000] [--width 1024]

Needs root, iproute2, Open MPI and PyTorch. The machines are network namespaces on this one
(`tests/netns/namespaces.py`), a rank on each, their links shaped. A perceptron trains on batches of
random numbers. `alone` is the step of one rank without any exchange, `line` the time in which the
link carries the gradients: a step takes at least the longer of both, and their sum where nothing
overlaps. While it goes forward a model has no gradients: `forward + line` is the least where the
line is the longer one. Within a job the ways take turns; figures are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

MACHINES = 2
LAYERS = 8
BATCH = 512
STEPS = 6  # of each way in a job, after two that are not counted
JOB_SECONDS = 180.0
PORT = 29511


def main() -> int:
    """Measure, and print a line per way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the links, Mbit/s")
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.width)

    from namespaces import NamespaceCluster, why_not

    reason = why_not()
    if reason is not None:
        print(f"benchmarks/overlap.py: {reason}", file=sys.stderr)
        return 1
    times: dict[str, list[float]] = {}
    with NamespaceCluster(MACHINES) as cluster:
        for _ in range(options.rounds):
            job = cluster.run(
                1, __file__, "--rank", "--width", str(options.width),
                timeout=JOB_SECONDS, shape=f"{options.mbit}mbit", GLOO_SOCKET_IFNAME="eth0",
            )  # fmt: skip
            if job.status != 0:
                print(job.stdout + job.stderr, file=sys.stderr)
                return 1
            for way, seconds in json.loads(job.stdout.splitlines()[-1]).items():
                times.setdefault(way, []).extend(seconds)
    figures = {way: statistics.median(found) for way, found in times.items()}
    nbytes = 4 * LAYERS * options.width * (options.width + 1)
    facts = {"mbit": options.mbit, "bytes": nbytes, "machines": MACHINES}
    figures["line"] = 2 * (MACHINES - 1) / MACHINES * nbytes / (options.mbit * 1e6 / 8)
    figures["forward + line"] = figures.pop("forward") + figures["line"]
    print(f"{MACHINES} machines, {nbytes / 1e6:.1f} MB of gradients, {options.mbit} Mbit/s")
    for way, seconds in sorted(figures.items(), key=lambda item: item[1]):
        print(f"{way:16} {1e3 * seconds:8.1f} ms  {seconds / figures['overlap']:5.2f} x overlap")
    if options.json:
        options.json.write_text(json.dumps(facts | {"seconds": figures}, indent=1) + "\n")
    return 0


def rank_main(width: int) -> int:
    """Train in each of the ways, in turns; rank 0 prints the slowest ranks' times."""
    import torch

    import collectives as cc
    import strategies
    import strategies.torch  # the backend

    comm = cc.init()
    address = f"tcp://10.77.0.1:{PORT}"
    torch.distributed.init_process_group("gloo", address, rank=comm.rank, world_size=comm.size)
    torch.set_num_threads(1)

    def made(wrap):
        torch.manual_seed(0)
        layers = [
            m for _ in range(LAYERS) for m in (torch.nn.Linear(width, width), torch.nn.Tanh())
        ]
        model = torch.nn.Sequential(*layers)
        return wrap(model, torch.optim.SGD(model.parameters(), 0.01))

    def distributed(**options):
        return lambda model, optimizer: (
            model, strategies.DistributedOptimizer(optimizer, **options)
        )  # fmt: skip

    def ddp(group):
        return lambda model, optimizer: (
            torch.nn.parallel.DistributedDataParallel(model, process_group=group), optimizer
        )  # fmt: skip

    ways = {
        "alone": made(lambda model, optimizer: (model, optimizer)),
        "in the step": made(distributed(overlap=False)),
        "overlap": made(distributed()),
        "overlap, FP16": made(distributed(compression=cc.FP16)),
        "DDP, unisono": made(ddp(torch.distributed.new_group(backend="unisono"))),
        "DDP, Gloo": made(ddp(torch.distributed.group.WORLD)),
    }
    x = torch.randn(BATCH, width)
    times: dict[str, list[float]] = {way: [] for way in [*ways, "forward"]}
    for step in range(STEPS + 2):
        for way, (model, optimizer) in ways.items():
            optimizer.zero_grad()
            comm.barrier()
            began = time.perf_counter()
            loss = model(x).square().mean()
            forward = time.perf_counter() - began
            loss.backward()
            optimizer.step()
            took = float(comm.allreduce(time.perf_counter() - began, op=cc.MAX))
            if step >= 2:
                times[way].append(took)
                if way == "alone":
                    times["forward"].append(forward)
    if comm.rank == 0:
        print(json.dumps(times), flush=True)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
