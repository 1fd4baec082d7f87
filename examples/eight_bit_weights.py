"""Serve a network with weights of 8 bits: its size, speed and accuracy beside those of float32.

    python examples/eight_bit_weights.py --hidden 65536

Each weight becomes the nearest multiple of a step, -127 to 127 of them; the weights of one unit
have a step of their own. A single query is a product of matrix and vector: where the matrix is in
no cache, it takes as long as reading it. The products of both kinds are compiled from one function;
NumPy's, which calls a BLAS that knows no 8 bits, is measured beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numba
import numpy as np

from common.digits import Network, accuracy, load
from strategies.quantization import quantize

EPOCHS, QUERIES = 2, 100
Answer = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    """Train a wide network, and serve it in three ways."""
    hidden = parse_arguments().hidden
    network = Network.random(hidden, seed=1)
    network.train(80 / hidden, 0.5, EPOCHS, seed=1)
    wide = [unit_by_unit(network.weights[name]) for name in ("w1", "w2")]
    biases = [network.weights[name].astype(np.float32) for name in ("b1", "b2")]
    narrow = [quantize(matrix) for matrix in wide]
    ones = [np.ones(len(matrix), np.float32) for matrix in wide]
    codes, steps = zip(*narrow, strict=True)
    ways: dict[str, tuple[int, Answer]] = {
        "float32, NumPy": (sum(m.nbytes for m in wide), lambda x: by_numpy(x, *wide, *biases)),
        "float32": (sum(m.nbytes for m in wide), lambda x: compiled(x, *wide, *ones, *biases)),
        "8 bits": (
            sum(c.nbytes + s.nbytes for c, s in narrow),
            lambda x: compiled(x, *codes, *steps, *biases),
        ),
    }
    pixels, digits = load("held out")
    pixels = pixels.astype(np.float32)
    answers = {name: np.array([answer(x) for x in pixels]) for name, (_, answer) in ways.items()}
    took = seconds({name: answer for name, (_, answer) in ways.items()}, pixels)
    for name, (nbytes, _) in ways.items():
        print(
            f"{name:>14}: {nbytes / 2**20:.2f} MiB, {1e6 * took[name]:.0f} us a query, "
            f"accuracy {accuracy(answers[name], digits):.4f}"
        )


def unit_by_unit(weights: np.ndarray) -> np.ndarray:
    """Return the weights with those of one unit side by side, shape (units, inputs), float32."""
    return np.ascontiguousarray(weights.T, np.float32)


def by_numpy(x: np.ndarray, w1: np.ndarray, w2: np.ndarray, b1: np.ndarray, b2: np.ndarray):
    """Return the scores of one query."""
    return w2 @ np.maximum(w1 @ x + b1, 0) + b2


def compiled(x, w1, w2, step1, step2, b1, b2) -> np.ndarray:
    """Return the scores of one query, from weights of any kind and their steps."""
    hidden = np.maximum(product(w1, x) * step1 + b1, 0)
    return product(w2, hidden) * step2 + b2


@numba.njit(fastmath=True)
def product(matrix, vector):
    """Multiply; each weight becomes a float32 in a register."""
    out = np.empty(len(matrix), np.float32)
    for unit in range(len(matrix)):
        total = np.float32(0)
        for place in range(len(vector)):
            total += np.float32(matrix[unit, place]) * vector[place]
        out[unit] = total
    return out


def seconds(ways: dict[str, Answer], pixels: np.ndarray) -> dict[str, float]:
    """Return the median time of a query in each way, asked in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for x in pixels[:QUERIES]:
        for name, answer in ways.items():
            began = time.perf_counter()
            answer(x)
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(some)) for name, some in times.items()}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=16384, help="units of the hidden layer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
