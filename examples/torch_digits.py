"""Train a small network of PyTorch on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/torch_digits.py
    mpirun -np 2 python examples/torch_digits.py --resume --epochs 48

Three marked lines make it a program of many ranks: they keep all copies of the model in step. The
others are those of a program of one rank, but that each rank takes its share of every batch, and
that all stop together when the batch system asks for it (SIGUSR1).
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch

import collectives as cc
import strategies
from common.digits import PIXELS, table

STOPPED_EARLY = 85  # exit status of a run that was asked to stop; slurm/train.sbatch knows it


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    comm = cc.init()  # 1: who takes part
    torch.manual_seed(comm.rank)
    torch.set_num_threads(1)  # ranks fill the cores

    model = torch.nn.Sequential(
        torch.nn.Linear(64, options.hidden), torch.nn.ReLU(), torch.nn.Linear(options.hidden, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    optimizer = strategies.DistributedOptimizer(optimizer)  # 2: average the gradients
    strategies.broadcast_parameters(model)  # 3: begin alike

    checkpoints = strategies.CheckpointManager(options.checkpoints, comm)
    saver = strategies.training.Saver(checkpoints, model=model, optimizer=optimizer)
    first_epoch = (saver.restore() if options.resume else None) or 0
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    stopping = False

    (pixels, digits), held_out = load()
    for epoch in range(first_epoch, options.epochs):
        order = torch.Generator().manual_seed(options.seed + epoch)  # the same on all ranks
        loss = torch.zeros(())
        for batch in torch.randperm(len(digits), generator=order).split(options.batch_size):
            share = batch[comm.rank :: comm.size]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(pixels[share]), digits[share])
            loss.backward()
            optimizer.step(examples=len(share))
        if comm.rank == 0 and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
        stopping = bool(comm.allreduce(bool(signals), op=cc.MAX))
        if stopping or (epoch + 1) % 10 == 0 or epoch + 1 == options.epochs:
            saver.save(epoch + 1)
        if stopping:
            break

    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    if comm.rank == 0:
        print(f"accuracy on the held-out digits: {right:.4f}")
    checkpoints.close()
    if stopping:
        sys.exit(STOPPED_EARLY)


def load() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return pixels from 0 to 1 and digits, for training and held out."""
    rows = torch.from_numpy(table())
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pixels, digits = rows[:, :PIXELS].float() / 16, rows[:, PIXELS].long()
    return (pixels[300:], digits[300:]), (pixels[:300], digits[:300])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows")
    parser.add_argument("--checkpoints", default="runs/torch-digits", help="where they go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
