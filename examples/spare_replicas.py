"""Train on the digits without waiting for the slowest ranks.

    mpirun -np 4 python examples/spare_replicas.py --replicas-to-aggregate 3

A step is made of the first three gradients; the fourth rank is a spare. With `--with-ft ulfm` after
`mpirun`, one of them may even die.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

import numpy as np

import collectives as cc
import strategies
from common.digits import Network, accuracy, batches, load


def main() -> None:
    """Train, and print on rank 0 what became of it."""
    options = parse_arguments()
    comm = cc.init()
    count = options.replicas_to_aggregate or max(1, comm.size - 1)
    with strategies.SpareReplicaStrategy(count, comm=comm) as strategy:
        network = make_network(strategy, options.hidden, options.seed)
        optimizer = strategies.Momentum(options.learning_rate, 0.9)
        for pixels, digits in my_batches(options.batch_size, options.seed + comm.rank):
            if strategy.local_step >= options.steps:
                break
            gradients = backward(network, pixels, digits)
            pairs = [(gradients[name], variable) for name, variable in network.items()]
            strategy.apply_gradients(optimizer, pairs)
        report = strategy.report()
        if strategy.is_chief:
            weights = {name: variable.value for name, variable in network.items()}
            pixels, digits = load("held out")
            share = accuracy(Network(weights).predict(pixels), digits)
            print(f"{count} of {comm.size} gradients make a step")
            for worker in report.used:
                print(f"worker {worker}: {report.used[worker]} used, {report.dropped[worker]} late")
            print(f"accuracy on the held-out digits: {share:.4f}")
    if report.lost:
        sys.stdout.flush()
        os._exit(0)  # MPI's own end may wait for the dead


def make_network(strategy, hidden: int, seed: int) -> dict[str, strategies.Variable]:
    """Make the variables of a network; all ranks get those of rank 0."""
    weights = Network.random(hidden, seed).weights
    return {name: strategy.variable(value, name=name) for name, value in weights.items()}


def my_batches(batch_size: int, seed: int):
    """Yield images and digits for ever, in an order of this rank's own."""
    pixels, digits = load("training")
    for epoch in itertools.count():
        for rows in batches(len(digits), batch_size, 1000 * seed + epoch):
            yield pixels[rows], digits[rows]


def backward(network, pixels: np.ndarray, digits: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gradient of the mean cross-entropy for each variable."""
    weights = {name: variable.value for name, variable in network.items()}
    return Network(weights).gradients(pixels, digits)[1]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--replicas-to-aggregate",
        type=int,
        help="gradients per step; all ranks but one if not given",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=50, help="rows of each gradient")
    parser.add_argument("--hidden", type=int, default=64, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
