"""Train a small network of PyTorch on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/torch_digits.py

Three marked lines make it a program of many ranks: they keep all copies of the model in step. The
others are those of a program of one rank, but that each rank takes its share of every batch.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

import collectives as cc
import strategies


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
    strategies.broadcast_parameters(model.state_dict())  # 3: begin alike

    (pixels, digits), held_out = load()
    order = torch.Generator().manual_seed(options.seed)  # the same on all ranks
    for epoch in range(options.epochs):
        loss = torch.zeros(())
        for batch in torch.randperm(len(digits), generator=order).split(options.batch_size):
            share = batch[comm.rank :: comm.size]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(pixels[share]), digits[share])
            loss.backward()
            optimizer.step(examples=len(share))
        if comm.rank == 0 and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    if comm.rank == 0:
        print(f"accuracy on the held-out digits: {right:.4f}")


def load() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return pixels from 0 to 1 and digits, for training and held out."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
    digits = torch.tensor(bunch.target)[order]
    return (pixels[300:], digits[300:]), (pixels[:300], digits[:300])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
