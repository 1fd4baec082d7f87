"""A training step of a pipeline: `Stages` beside torch.distributed.pipelining, in turns.

    mpirun -np 2 python benchmarks/pipelines.py [--json FILE]

All ways run the 1F1B schedule on the same modules and micro-batches, and have equal gradients,
which is checked first. PyTorch's `Schedule1F1B` runs over this project's backend and over Gloo.
`one rank` is the same step on rank 0 alone, with all modules and micro-batches. Prints medians of
the rounds in ms, and the median ratio to `Stages` with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from turns import Handover, machine

import collectives as cc
import strategies.torch  # noqa: F401  # the backend
from strategies.model_parallel.torch import Stages

ROUNDS, FIRST, LAYERS = 15, 3, 4

# Name -> units of each layer, rows of a step, and micro-batches.
CASES = {
    "1,024 units, 8 x 64 rows": (1024, 512, 8),
    "1,024 units, 32 x 16 rows": (1024, 512, 32),
    "128 units, 8 x 64 rows": (128, 512, 8),
    "128 units, 32 x 16 rows": (128, 512, 32),
}


def main() -> None:
    """Measure all cases; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = cc.init()
    handover = Handover(comm.to_mpi())
    alone = comm.split(comm.rank)
    distributed.init_process_group("unisono")
    groups = {
        "Schedule1F1B, unisono": distributed.group.WORLD,
        "Schedule1F1B, Gloo": distributed.new_group(backend="gloo"),
    }
    found = {"machine": machine(), "ranks": comm.size, "GB/s from core to core": [handover.rate()]}
    for name, (units, rows, parts) in CASES.items():
        random = torch.Generator().manual_seed(0)
        x, target = (torch.randn(rows, units, generator=random) for _ in range(2))
        whole = Stages(layers(units), parts=parts, comm=alone)
        stages = Stages(layers(units), parts=parts, comm=comm)
        ways = {"Stages": (stages.module, stepped(stages, x, target))}
        for group_name, group in groups.items():
            own = Stages(layers(units), parts=parts, comm=comm).module
            ways[group_name] = own, scheduled(own, parts, group, x, target)
        expected = dict(whole.module.named_parameters())
        whole.step(x, target, mse)
        for way, (module, step) in ways.items():
            step()
            for parameter_name, parameter in module.named_parameters():
                torch.testing.assert_close(
                    parameter.grad, expected[parameter_name].grad, msg=f"{name}, {way}"
                )
        runs = {way: zeroed(module, step) for way, (module, step) in ways.items()}
        step = zeroed(whole.module, stepped(whole, x, target))
        runs["one rank"] = step if comm.rank == 0 else lambda: None
        report(comm, found, name, measure(comm, runs))
    found["GB/s from core to core"].append(handover.rate())
    if comm.rank == 0:
        print(f"{found['machine']}, GB/s from core to core: {found['GB/s from core to core']}")
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    distributed.destroy_process_group()


def layers(units: int) -> list[nn.Module]:
    """Return the same layers on all ranks."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(units, units), nn.Tanh()) for _ in range(LAYERS)]


def mse(output, target):
    return nn.functional.mse_loss(output, target)


def stepped(stages, x, target):
    return lambda: stages.step(x, target, mse)


def scheduled(module, parts, group, x, target):
    """A step by PyTorch's schedule."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    stage = PipelineStage(module, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, parts, loss_fn=mse)

    def step():
        # The first rank passes the input, and the last one the target.
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": target, "losses": []} if rank == size - 1 else {}))

    return step


def zeroed(module, step):
    def run():
        module.zero_grad(set_to_none=False)
        step()

    return run


def measure(comm, runs):
    """Return the slowest rank's seconds of each in each round, taken in turns."""
    times = {name: [] for name in runs}
    for number in range(ROUNDS + FIRST):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            comm.barrier()
            began = time.perf_counter()
            runs[name]()
            took = float(comm.allreduce(time.perf_counter() - began, op=cc.MAX))
            if number >= FIRST:
                times[name].append(took)
    return times


def report(comm, found, what, times):
    """Add medians, and the ratio to `Stages`; rank 0 prints them."""
    found[what] = {name: round(1e3 * statistics.median(own), 3) for name, own in times.items()}
    if comm.rank == 0:
        print(f"{what}, ms")
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["Stages"], strict=True)]
        low, median, high = (round(cut, 3) for cut in statistics.quantiles(ratios))
        found[what][f"{name}, ratio to Stages, quartiles"] = [low, median, high]
        if comm.rank == 0:
            spread = f"{median:5.2f} ({low:.2f} to {high:.2f})"
            print(f"    {name:24} {found[what][name]:9.2f}   {spread}", flush=True)


if __name__ == "__main__":
    main()
