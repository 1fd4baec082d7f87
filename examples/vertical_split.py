"""Split a network vertically: every rank has some units of each layer.

    OPENBLAS_NUM_THREADS=1 mpirun -np 2 python examples/vertical_split.py

The units of a layer need the outputs of all units of the layer before, so the ranks exchange those
at every boundary. The last layer is divided by its inputs instead: each rank adds its part to the
scores, and gets the scores of its share of the examples. Rank 0 also trains the same network alone,
in turns, to compare the losses and the time.
"""

from __future__ import annotations

import argparse

import numpy as np

import collectives as cc
from common import comparison
from common.digits import DIGITS, PIXELS, batches, cross_entropy, load
from strategies import model_parallel


class SplitNetwork:
    """This rank's units of two hidden layers, and its inputs of the last one.

    Arrays have a row for each unit and a column for each example, so that all-gather joins units.
    """

    def __init__(self, comm: cc.Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        random = np.random.default_rng(options.seed)
        hidden = options.hidden
        own = np.array_split(np.arange(hidden), comm.size)[comm.rank]
        shapes = [(hidden, PIXELS), (hidden, hidden), (DIGITS, hidden)]
        # All ranks draw the whole network, and keep their part of it.
        first, second, last = (
            random.standard_normal(shape) * np.sqrt(2 / shape[1]) for shape in shapes
        )
        self.first, self.second, self.last = first[own], second[own], last[:, own].copy()

    def forward(self, pixels: np.ndarray) -> tuple:
        """Return the scores of this rank's share of the examples, and what the way back needs."""
        x = pixels.T
        own1 = np.maximum(self.first @ x, 0)
        all1, back1 = model_parallel.allgather(own1, comm=self.comm)
        own2 = np.maximum(self.second @ all1, 0)
        part = (self.last @ own2).T
        scores, back2 = model_parallel.reduce_scatter(part, comm=self.comm)
        return scores, (x, own1, all1, back1, own2, back2)

    def step(self, pixels: np.ndarray, digits: np.ndarray) -> float:
        """Learn from some examples; returns this rank's share of the loss."""
        scores, (x, own1, all1, back1, own2, back2) = self.forward(pixels)
        loss, errors = cross_entropy(scores, self.share(digits))
        errors = back2(errors / len(digits)).T
        errors2 = (self.last.T @ errors) * (own2 > 0)
        errors1 = back1(self.second.T @ errors2) * (own1 > 0)
        rate = self.options.learning_rate
        self.last -= rate * errors @ own2.T
        self.second -= rate * errors2 @ all1.T
        self.first -= rate * errors1 @ x.T
        return loss / len(digits)

    def epoch(self, number: int) -> float:
        """Go once through the data; returns this rank's share of the loss."""
        pixels, digits = load("training")
        losses = [
            self.step(pixels[rows], digits[rows])
            for rows in batches(len(digits), self.options.batch_size, self.options.seed + number)
        ]
        return sum(losses) / len(losses)

    def accuracy(self) -> float:
        """Return the share of held-out digits that are recognised."""
        pixels, digits = load("held out")
        scores, _ = self.forward(pixels)
        hits = (scores.argmax(axis=1) == self.share(digits)).sum()
        return float(self.comm.allreduce(hits, op=cc.SUM)) / len(digits)

    def share(self, rows: np.ndarray) -> np.ndarray:
        """Return this rank's share of the examples, as reduce-scatter divides them."""
        return np.array_split(rows, self.comm.size)[self.comm.rank]


def main() -> None:
    """Train split and alone, and say how they compare."""
    options = parse_arguments()
    comparison.compare(cc.init(), lambda comm: SplitNetwork(comm, options), options.epochs)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="units of each hidden layer")
    parser.add_argument("--batch-size", type=int, default=256, help="examples per step")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training data")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
