"""Train a deep recurrent network whose layers are on different ranks, as a pipeline.

    OPENBLAS_NUM_THREADS=1 mpirun -np 2 python examples/pipelined_rnn.py

The network reads a digit row by row. Rank k holds the layers of stage k: it starts when the stage
before has done its first row, and then all stages work at the same time, each on another row:

    rank 0   row 0   row 1   row 2   row 3
    rank 1           row 0   row 1   row 2   row 3

A batch goes through in several parts one after the other, so that the pipeline stays full, and the
gradients come back in the opposite order. Rank 0 also trains the same network alone, in turns, to
compare the losses and the time.
"""

from __future__ import annotations

import argparse

import numpy as np

import collectives as cc
from common import comparison
from common.digits import DIGITS, batches, cross_entropy, load
from strategies import model_parallel

STEPS, WIDTH = 8, 8  # rows of an image, and pixels in a row


class Cell:
    """One recurrent layer: `state = tanh(x @ w + state @ u)`."""

    def __init__(self, inputs: int, units: int, random: np.random.Generator) -> None:
        self.w = random.standard_normal((inputs, units)) / np.sqrt(inputs)
        self.u = random.standard_normal((units, units)) / np.sqrt(2 * units)
        self.dw, self.du = np.zeros_like(self.w), np.zeros_like(self.u)

    def forward(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Return the next state."""
        return np.tanh(x @ self.w + state @ self.u)

    def backward(
        self, x: np.ndarray, before: np.ndarray, after: np.ndarray, gradient: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of the input and of the state before."""
        back = gradient * (1 - after**2)
        self.dw += x.T @ back
        self.du += before.T @ back
        return back @ self.w.T, back @ self.u.T


class Stage:
    """The layers of this rank."""

    def __init__(self, comm: cc.Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        random = np.random.default_rng(options.seed)
        # All ranks draw the whole network, and keep their layers of it.
        widths = [WIDTH] + [options.units] * options.layers
        cells = [Cell(*pair, random) for pair in zip(widths[:-1], widths[1:], strict=True)]
        self.cells = [cells[i] for i in np.array_split(range(options.layers), comm.size)[comm.rank]]
        self.out = random.standard_normal((options.units, DIGITS)) / np.sqrt(options.units)
        self.dout = np.zeros_like(self.out)

    def forward(self, images: np.ndarray) -> tuple[list[list], list]:
        """Read some images row by row; returns all states, and what the way back needs."""
        states = [[np.zeros((len(images), self.options.units))] for _ in self.cells]
        tape = []
        for step in range(STEPS):
            x, give_back, take_back = images[:, step], None, None
            if not self.is_first:
                x, give_back = model_parallel.recv(self.comm.rank - 1, comm=self.comm)
            inputs = []
            for cell, history in zip(self.cells, states, strict=True):
                inputs.append(x)
                x = cell.forward(x, history[-1])
                history.append(x)
            if not self.is_last:
                _, take_back = model_parallel.send(x, self.comm.rank + 1, comm=self.comm)
            tape.append((inputs, give_back, take_back))
        return states, tape

    def backward(self, states: list[list], tape: list, gradient: np.ndarray | None) -> None:
        """Go back; `gradient` is that of the last output, on the last rank."""
        carried = [0.0] * len(self.cells)  # the gradients that go back in time
        for step in reversed(range(STEPS)):
            inputs, give_back, take_back = tape[step]
            if take_back is not None:
                back = take_back()
            else:
                back = gradient if step == STEPS - 1 else np.zeros_like(gradient)
            for i in reversed(range(len(self.cells))):
                before, after = states[i][step : step + 2]
                total = back + carried[i]
                back, carried[i] = self.cells[i].backward(inputs[i], before, after, total)
            if give_back is not None:
                give_back(back)

    def step(self, images: np.ndarray, digits: np.ndarray) -> float:
        """Learn from some images; returns the loss on the last rank, elsewhere 0."""
        parts = self.options.parts
        pieces = list(
            zip(np.array_split(images, parts), np.array_split(digits, parts), strict=True)
        )
        forward = [self.forward(piece) for piece, _ in pieces]
        loss = 0.0
        for (states, tape), (_, labels) in reversed(list(zip(forward, pieces, strict=True))):
            gradient = None
            if self.is_last:
                top = states[-1][-1]
                part, errors = cross_entropy(top @ self.out, labels)
                loss += part / len(digits)
                errors /= len(digits)
                self.dout += top.T @ errors
                gradient = errors @ self.out.T
            self.backward(states, tape, gradient)
        for weights, gradients in self.weights():
            weights -= self.options.learning_rate * gradients
            gradients[...] = 0
        return loss

    def epoch(self, number: int) -> float:
        """Go once through the data; returns the loss on the last rank, elsewhere 0."""
        pixels, digits = load("training")
        images = pixels.reshape(-1, STEPS, WIDTH)
        losses = [
            self.step(images[rows], digits[rows])
            for rows in batches(len(digits), self.options.batch_size, self.options.seed + number)
        ]
        return sum(losses) / len(losses)

    def accuracy(self) -> float:
        """Return the share of held-out digits that are recognised."""
        pixels, digits = load("held out")
        states, _ = self.forward(pixels.reshape(-1, STEPS, WIDTH))
        hits = 0.0
        if self.is_last:
            hits = float(((states[-1][-1] @ self.out).argmax(axis=1) == digits).sum())
        return float(self.comm.allreduce(hits, op=cc.SUM)) / len(digits)

    def weights(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return all weights of this rank with their gradients."""
        pairs = [p for cell in self.cells for p in ((cell.w, cell.dw), (cell.u, cell.du))]
        return [*pairs, (self.out, self.dout)] if self.is_last else pairs


def main() -> None:
    """Train as a pipeline and alone, and say how they compare."""
    options = parse_arguments()
    comm = cc.init()
    if options.layers < comm.size:
        raise SystemExit(f"{comm.size} ranks need at least as many layers, got {options.layers}")
    comparison.compare(comm, lambda ranks: Stage(ranks, options), options.epochs)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="recurrent layers, of all ranks")
    parser.add_argument("--units", type=int, default=192, help="units of each layer")
    parser.add_argument("--batch-size", type=int, default=250, help="images per step")
    parser.add_argument("--parts", type=int, default=2, help="in which a batch goes through")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training data")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
