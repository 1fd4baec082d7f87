"""Training steps, and all-reduces of torch.distributed: this project beside Gloo, in turns.

    mpirun -np 2 python benchmarks/torch_step.py [--only steps|calls] [--keep-memory] [--json FILE]

Prints medians, in milliseconds and microseconds, and how many times as long DDP, or `all_reduce`,
takes over Gloo, which gets `LOCAL_WORLD_SIZE` as `torchrun` sets it: its shared memory. All ways
take turns, every other round backwards; a ratio is the median of the rounds', with its quartiles.
Short steps are timed several at a time. `alone` is the same step without any exchange, `hook` DDP
with `strategies.torch.ddp_hook`; `tensor` and `array` are `comm.allreduce` of either. The rate at
which 512 KiB pass from core to core is printed before and after; `--json` adds a run to the file.

PyTorch gives the memory of large gradients back to the system, and each step waits for new pages;
with `--keep-memory` it is kept (`strategies.torch.keep_memory`), for all ways alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from shapes import resnet50
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from turns import Handover, machine

import collectives as cc
import strategies
import strategies.torch  # the backend

ROUNDS, FIRST = 15, 4

# Of the small model: rounds, and steps of a turn.
SMALL_ROUNDS, SMALL_STEPS = 60, 10

# Calls that are timed together: one alone would mostly be the wait for the other rank.
CALLS = {4 << 10: 100, 1 << 20: 10, 64 << 20: 1}


def main() -> None:
    """Measure what was asked for; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["steps", "calls"])
    parser.add_argument("--keep-memory", action="store_true", help="of what is freed")
    parser.add_argument("--json", type=Path, help="file to add the figures to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = cc.init()
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(comm.local_size))
    handover = Handover(comm.to_mpi())
    kept = options.keep_memory and strategies.torch.keep_memory()
    found = {
        "machine": machine(),
        "memory is kept": kept,
        "GB/s from core to core": [handover.rate()],
    }
    distributed.init_process_group("unisono")
    groups = {
        "unisono": distributed.group.WORLD,
        "Gloo": distributed.new_group(backend="gloo"),
    }
    if options.only != "calls":
        rows = torch.randn(8, 2048)
        for name, make, x, rounds, count in (
            ("161 tensors of ResNet-50", Gradients, torch.ones(1), ROUNDS, 1),
            ("perceptron 25 M", perceptron, rows, ROUNDS, 1),
            ("small CNN", cnn, torch.randn(16, 1, 28, 28), SMALL_ROUNDS, SMALL_STEPS),
        ):
            ways = {"alone": in_step(make(), x, None), "optimizer": in_step(make(), x, "auto")}
            ways["overlap"] = in_step(make(), x, True)
            ways["unisono, hook"] = step(make(), x, groups["unisono"], True, hook=True)
            for group_name, group in groups.items():
                ways[group_name] = step(make(), x, group, False)
                ways[f"{group_name}, views"] = step(make(), x, group, True)
            turns = {way: repeated(run, count) for way, run in ways.items()}
            report(found, name, "ms", measure(turns, rounds, count))
    if options.only != "steps":
        for nbytes, count in CALLS.items():
            x = torch.zeros(nbytes // 4)
            ways = {g: call(x, group) for g, group in groups.items()}
            ways["tensor"], ways["array"] = plain(comm, x), plain(comm, x.numpy())
            calls = {way: repeated(run, count) for way, run in ways.items()}
            name = f"all_reduce {nbytes >> 10} KiB"
            report(found, name, "us", measure(calls, 2 * ROUNDS, count))
    found["GB/s from core to core"].append(handover.rate())
    if comm.rank == 0:
        print(f"{found['machine']}, GB/s from core to core: {found['GB/s from core to core']}")
        if options.json:
            known = json.loads(options.json.read_text()) if options.json.exists() else []
            options.json.write_text(json.dumps([*known, found], indent=1) + "\n")
    distributed.destroy_process_group()


class Gradients(nn.Module):
    """The parameters of ResNet-50, and hardly anything to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in resnet50()])

    def forward(self, x):
        """Read every parameter once."""
        return sum((w * x).sum() for w in self.weights)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def cnn() -> nn.Module:
    torch.manual_seed(0)
    features = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def step(module, x, group, view, hook=False):
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=view)
    if hook:
        model.register_comm_hook(None, strategies.torch.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def run():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


def in_step(module, x, overlap):
    """A step by `DistributedOptimizer`; without any exchange if `overlap` is None."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    if overlap is not None:
        optimizer = strategies.DistributedOptimizer(optimizer, overlap=overlap)

    def run():
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    return run


def call(x, group):
    return lambda: distributed.all_reduce(x, group=group)


def plain(comm, x):
    return lambda: comm.allreduce(x, op=cc.SUM, out=x)


def repeated(run, count):
    def several():
        for _ in range(count):
            run()

    return several


def measure(runs, rounds, count=1):
    """Return the seconds of each in each round, taken in turns; the first rounds do not count."""
    times = {name: [] for name in runs}
    for number in range(rounds + FIRST):
        for name in list(runs)[:: -1 if number % 2 else 1]:  # none is always the one after Gloo
            run = runs[name]
            distributed.barrier()
            began = time.perf_counter()
            run()
            if number >= FIRST:
                times[name].append((time.perf_counter() - began) / count)
    return times


def report(found, what, unit, times):
    """Add medians in `unit`, and Gloo's time over each, to what was found; rank 0 prints them."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    medians, ratios = {}, {}
    for name, seconds in times.items():
        medians[name] = round(statistics.median(seconds) * factor, 3)
        rounds = [gloo / own for gloo, own in zip(times["Gloo"], seconds, strict=True)]
        ratios[name] = [round(cut, 3) for cut in statistics.quantiles(rounds)]
    found[what], found[f"{what}: Gloo's time over it, quartiles"] = medians, ratios
    if distributed.get_rank() == 0:
        print(f"{what}, {unit}")
        for name, (low, median, high) in ratios.items():
            said = f"Gloo is {median:5.2f} ({low:.2f} to {high:.2f})"
            print(f"    {name:16} {medians[name]:9.2f}   {said}", flush=True)


if __name__ == "__main__":
    main()
