"""Train a small network of PyTorch on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/torch_digits.py
    mpirun -np 2 python examples/torch_digits.py --resume --epochs 48

Three marked lines make it a program of many ranks: they keep all copies of the model in step. The
others are those of a program of one rank, but that each rank takes its share of every batch. The
session writes checkpoints, and stops all ranks together when the batch system asks for it.
"""

from __future__ import annotations

import argparse

import torch

import collectives as cc
import strategies
from common.digits import PIXELS, table
from strategies.checkpoint import Saver
from strategies.session import Summaries, TrainingSession, hooks


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    comm = cc.init()  # 1: who takes part
    torch.manual_seed(comm.rank)
    torch.set_num_threads(1)  # ranks fill the cores
    device = torch.device("cuda", comm.local_rank) if torch.cuda.is_available() else "cpu"

    model = torch.nn.Sequential(
        torch.nn.Linear(64, options.hidden), torch.nn.ReLU(), torch.nn.Linear(options.hidden, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    optimizer = strategies.DistributedOptimizer(optimizer)  # 2: average the gradients
    strategies.broadcast_parameters(model)  # 3: same start

    (pixels, digits), held_out = load(device)

    def train_epoch() -> dict[str, float]:
        order = torch.Generator().manual_seed(options.seed + session.step)  # the same on all ranks
        loss = torch.zeros(())
        for batch in torch.randperm(len(digits), generator=order).split(options.batch_size):
            share = batch[comm.rank :: comm.size]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(pixels[share]), digits[share])
            loss.backward()
            optimizer.step(examples=len(share))
        return {"loss": loss.item()}

    checkpoints = strategies.CheckpointManager(options.checkpoints, comm)
    saver = Saver(checkpoints, model=model, optimizer=optimizer)
    every_epoch = [hooks.StopAtStep(options.epochs), Summaries(progress="epochs")]
    with (
        checkpoints,
        TrainingSession(saver, restore=options.resume, save_steps=10, hooks=every_epoch) as session,
    ):
        while not session.should_stop():
            session.run(train_epoch)

    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    if comm.rank == 0:
        print(f"accuracy on the held-out digits: {right:.4f}")


def load(device) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return pixels from 0 to 1 and digits, for training and held out."""
    rows = torch.from_numpy(table())
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))].to(device)
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
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
