"""Training steps by DDP, and all-reduces of torch.distributed: this backend beside Gloo, in turns.

    mpirun -np 2 python benchmarks/torch_step.py

Prints medians, in milliseconds and microseconds, and how many times as long Gloo takes.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import strategies.torch  # noqa: F401  (the backend)

ROUNDS, FIRST = 15, 4


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("unisono")
    groups = {
        "unisono": distributed.group.WORLD,
        "Gloo": distributed.new_group(backend="gloo"),
    }
    images, rows = torch.randn(16, 1, 28, 28), torch.randn(8, 2048)
    for view in (False, True):
        for name, make, x in (("perceptron 25 M", perceptron, rows), ("small CNN", cnn, images)):
            steps = {g: step(make(), x, group, view) for g, group in groups.items()}
            report(f"{name}{', bucket views' if view else ''}", "ms", measure(steps, ROUNDS))
    for nbytes in (4 << 10, 1 << 20, 64 << 20):
        x = torch.zeros(nbytes // 4)
        calls = {g: call(x, group) for g, group in groups.items()}
        report(f"all_reduce {nbytes >> 10} KiB", "us", measure(calls, 20 if nbytes > 1e7 else 300))
    distributed.destroy_process_group()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def cnn() -> nn.Module:
    torch.manual_seed(0)
    features = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def step(module, x, group, view):
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def run():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


def call(x, group):
    return lambda: distributed.all_reduce(x, group=group)


def measure(runs, rounds):
    """Return the median seconds of each, taken in turns; the first rounds do not count."""
    times = {name: [] for name in runs}
    for number in range(rounds + FIRST):
        for name, run in runs.items():
            distributed.barrier()
            began = time.perf_counter()
            run()
            if number >= FIRST:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def report(what, unit, medians):
    if distributed.get_rank() == 0:
        factor = {"ms": 1e3, "us": 1e6}[unit]
        told = "  ".join(f"{name} {t * factor:9.2f}" for name, t in medians.items())
        ratio = medians["Gloo"] / medians["unisono"]
        print(f"{what:32} {unit}  {told}  Gloo/unisono {ratio:5.2f}", flush=True)


if __name__ == "__main__":
    main()
