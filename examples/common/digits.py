"""Scanned handwritten digits, and a small network for them, which several examples share."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import collectives as cc
import strategies

PIXELS, DIGITS = 64, 10
CSV_FILES = 8
# A column that is empty in a file counts as a white pixel; a missing digit is an error.
CSV_COLUMNS = [np.float32(0)] * PIXELS + [np.empty(0, np.int32)]
PARTS = {"training": slice(0, 1250), "validation": slice(1250, 1500), "held out": slice(1500, None)}


@functools.cache
def load(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of one part of the data, shape (n, 64), from 0 to 1, and their digits."""
    digits = table()
    rows = np.random.default_rng(0).permutation(len(digits))[PARTS[part]]
    return digits[rows, :PIXELS] / 16, digits[rows, PIXELS].astype(int)


def training_and_held_out() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return images, float32 of shape (n, 64), from 0 to 1, and digits: 1497 and 300 of them."""
    rows = np.random.default_rng(0).permutation(table())
    pixels, digits = rows[:, :PIXELS].astype(np.float32) / 16, rows[:, PIXELS].astype(int)
    return (pixels[300:], digits[300:]), (pixels[:300], digits[:300])


def table() -> np.ndarray:
    """Return the digits that come with scikit-learn, shape (1797, 65): pixels from 0 to 16, digit.

    Its file is read here: importing the library would take every rank 2 s.
    """
    library = importlib.util.find_spec("sklearn")
    if library is None or library.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    return np.loadtxt(Path(library.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")


def write_csv(folder: str, comm: cc.Communicator) -> tuple[list[str], str]:
    """Write the digits as CSV files, once; returns the training files and the held-out one."""
    names = [f"train-{i}-of-{CSV_FILES}.csv" for i in range(CSV_FILES)]
    paths = [Path(folder) / name for name in [*names, "held-out.csv"]]
    if comm.rank == 0 and not all(path.exists() for path in paths):
        rows = table().astype(int)
        np.random.default_rng(0).shuffle(rows)
        Path(folder).mkdir(parents=True, exist_ok=True)
        header = ",".join([f"pixel_{i}" for i in range(PIXELS)] + ["digit"])
        for path, share in zip(paths, np.array_split(rows, len(paths)), strict=True):
            part = Path(f"{path}.part")  # a run that is killed here leaves no half file behind
            np.savetxt(part, share, fmt="%d", delimiter=",", header=header, comments="")
            part.rename(path)
    comm.barrier()
    *training, held_out = map(str, paths)
    return training, held_out


def images_and_labels(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Turn the columns of a file into images of 64 pixels from 0 to 1, and their digits."""
    return np.stack(columns[:PIXELS], axis=1) / np.float32(16), columns[PIXELS]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Turn each row of scores into probabilities."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=1, keepdims=True)


def cross_entropy(scores: np.ndarray, digits: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the sum of the cross-entropy over the rows, and its gradient."""
    errors = softmax(scores)
    rows = np.arange(len(digits))
    loss = -np.log(np.maximum(errors[rows, digits], 1e-12)).sum()
    errors[rows, digits] -= 1
    return float(loss), errors


class Network:
    """One hidden layer.

    Args:
        weights: "w1", "b1", "w2" and "b2".
    """

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights

    @classmethod
    def random(cls, hidden: int, seed: int) -> Network:
        """Make a network that knows nothing."""
        random = np.random.default_rng(seed)
        w1 = random.standard_normal((PIXELS, hidden)) * np.sqrt(2 / PIXELS)
        w2 = random.standard_normal((hidden, DIGITS)) * np.sqrt(2 / hidden)
        return cls({"w1": w1, "b1": np.zeros(hidden), "w2": w2, "b2": np.zeros(DIGITS)})

    def train(self, rate: float, momentum: float, epochs: int, seed: int) -> None:
        """Learn the training data."""
        pixels, digits = load("training")
        optimizer = strategies.Momentum(rate, momentum)
        for rows in (r for n in range(epochs) for r in batches(len(digits), 50, seed + n)):
            _, gradients = self.gradients(pixels[rows], digits[rows])
            pairs = [(gradients[name], weight) for name, weight in self.weights.items()]
            optimizer.apply_gradients(pairs)

    def gradients(
        self, pixels: np.ndarray, digits: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the sum of the cross-entropy over the rows, and the gradients of its mean."""
        w = self.weights
        hidden = np.maximum(pixels @ w["w1"] + w["b1"], 0)
        loss, errors = cross_entropy(hidden @ w["w2"] + w["b2"], digits)
        errors /= max(len(digits), 1)  # a rank without rows has gradients of zeros
        back = (errors @ w["w2"].T) * (hidden > 0)
        gradients = {"w1": pixels.T @ back, "b1": back.sum(axis=0)}
        return loss, gradients | {"w2": hidden.T @ errors, "b2": errors.sum(axis=0)}

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the probability of each digit, shape (n, 10)."""
        w = self.weights
        hidden = np.maximum(pixels @ w["w1"] + w["b1"], 0)
        return softmax(hidden @ w["w2"] + w["b2"])


def batches(count: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of each batch of one epoch; what does not fill a batch is left out."""
    order = np.random.default_rng(seed).permutation(count)
    for start in range(0, count - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def accuracy(probabilities: np.ndarray, digits: np.ndarray) -> float:
    """Return the share of digits that are recognised."""
    return float((probabilities.argmax(axis=1) == digits).mean())
