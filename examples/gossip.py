"""Train on scanned digits by gossip: each rank averages its network with a few other ranks.

    mpirun -np 4 python examples/gossip.py --graph exponential

In each step a rank learns from its own rows, and then averages its weights with its neighbours'.
The networks of the ranks differ a little; the last line is about their mean.
"""

from __future__ import annotations

import argparse

import numpy as np

import collectives as cc
import strategies
from common.digits import Network, accuracy, batches, load


def main() -> None:
    """Train, and evaluate the network of each rank and their mean."""
    options = parse_arguments()
    comm = cc.init()
    network = Network.random(options.hidden, seed=1)  # the same on all ranks
    variables = {
        name: strategies.Variable(value.astype(np.float32), name=name)
        for name, value in network.weights.items()
    }
    network.weights = {name: variable.value for name, variable in variables.items()}
    optimizer = strategies.DistributedOptimizer(
        strategies.Momentum(options.learning_rate, 0.9), neighbours=options.graph
    )
    pixels, digits = (x[comm.rank :: comm.size] for x in load("training"))
    # Equally many steps on all ranks, although some have one row more.
    count = int(comm.allreduce(len(digits), op=cc.MIN).item())
    for epoch in range(options.epochs):
        for rows in batches(count, options.batch_size, seed=epoch):
            _, gradients = network.gradients(pixels[rows], digits[rows])
            optimizer.apply_gradients([(gradients[name], variables[name]) for name in variables])

    pixels, digits = load("held out")
    own = accuracy(network.predict(pixels), digits)
    each = comm.allgather([own])
    network.weights = {name: comm.allreduce(x) for name, x in network.weights.items()}
    mean = accuracy(network.predict(pixels), digits)
    if comm.rank == 0:
        print(f"accuracy of each rank: {' '.join(f'{x:.4f}' for x in each)}")
        print(f"accuracy of the mean network: {mean:.4f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a network on digits by gossip.")
    parser.add_argument("--graph", default="ring", choices=["ring", "exponential"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of each rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    main()
