"""Train on scanned digits in several ways to send fewer bytes, side by side.

    mpirun --host m1,m2 -np 2 python examples/compare_compression.py

For each way rank 0 prints the accuracy on the held-out digits, the bytes that its machine sends in
a step, and the time of a step. The bytes are counted by the network interfaces, so that those of
other programs count as well. On one machine the ranks share memory, and nothing is compressed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import collectives as cc
import strategies
import strategies.torch  # noqa: F401  (not needed where the project is installed)
from common.digits import training_and_held_out

# Way -> options of `DistributedOptimizer`. Feedback keeps residuals, so each training has its own.
WAYS = {
    "float32": lambda: {},
    "16 bits": lambda: {"compression": cc.BF16},
    "8 bits, feedback": lambda: {"compression": cc.INT8.with_feedback()},
    "top-k 1 %, feedback": lambda: {"compression": cc.TOPK(0.01).with_feedback()},
    "post-local SGD": lambda: {"sync_every": lambda step: 1 if step < 100 else 16},
    "PowerSGD": None,
}


class Figures(NamedTuple):
    """Results of one training."""

    accuracy: float
    bytes_per_step: float
    seconds_per_step: float


def main() -> None:
    """Train in each way, and print the means over the seeds on rank 0."""
    options = parse_arguments()
    torch.set_num_threads(1)  # ranks fill the cores
    comm = cc.init()
    distributed.init_process_group("unisono")
    for name in options.ways:
        found = [train(comm, WAYS[name], options, seed) for seed in range(options.seeds)]
        means = Figures(*(statistics.mean(figures) for figures in zip(*found, strict=True)))
        if comm.rank == 0:
            print(
                f"{name:>20}: {100 * means.accuracy:6.2f} %  {means.bytes_per_step:9,.0f} bytes  "
                f"{1000 * means.seconds_per_step:7.2f} ms",
                flush=True,
            )
    distributed.destroy_process_group()


def train(comm: cc.Communicator, make: Any, options: argparse.Namespace, seed: int) -> Figures:
    """Train a network, and return the figures of this rank."""
    torch.manual_seed(seed)  # the same start on all ranks
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, options.hidden), torch.nn.ReLU(), torch.nn.Linear(options.hidden, 10)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    if make is None:
        model = DistributedDataParallel(model)
        # DDP forms its buckets in the first two steps, which are not compressed.
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        optimizer = strategies.DistributedOptimizer(optimizer, **make())
    (pixels, digits), held_out = (map(torch.from_numpy, part) for part in training_and_held_out())
    order = torch.Generator().manual_seed(seed)
    steps, sent, began = 0, sent_bytes(), time.perf_counter()
    for _ in range(options.epochs):
        for batch in torch.randperm(len(digits), generator=order).split(options.batch_size)[:-1]:
            share = batch[comm.rank :: comm.size]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[share]), digits[share]).backward()
            optimizer.step()
            steps += 1
    comm.barrier()
    seconds, sent = time.perf_counter() - began, sent_bytes() - sent
    for parameter in model.parameters():  # they differ in the middle of local steps
        comm.allreduce(parameter.data, out=parameter.data)
    images, labels = held_out
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    return Figures(accuracy, sent / steps, seconds / steps)


def sent_bytes() -> int:
    """Return the bytes that this machine has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    rows = [line.replace(":", " ").split() for line in lines]
    return sum(int(row[9]) for row in rows if row[0] != "lo")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=2048, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
