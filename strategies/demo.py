"""`python -m strategies demo`: trains a digits model on two ranks to verify an installation.

Each rank runs `train`, which is written like a user's program. `run` does the steps of a user at
the prompt: create a folder, call mpirun, plot the loss.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import collectives as cc
from strategies import errors
from strategies.averaging.broadcast import broadcast_parameters
from strategies.core import mpirun, validation
from strategies.distributed_optimizer import DistributedOptimizer
from strategies.optimizers import Momentum
from strategies.session.metrics_writer import MetricsWriter, loss_curve

__all__ = ["run", "train"]

_SECONDS = 300  # for the whole run; on a busy machine, compiling the first calls dominates


def run(ranks: int = 2, folder: Path | None = None) -> int:
    """Train on several ranks of this machine; return the exit status of mpirun.

    Args:
        ranks: number of processes.
        folder: folder for metrics and plot; None for a new temporary folder.

    Raises:
        ValueError: fewer than one rank.
        NotFoundError: mpirun, or scikit-learn with its digits dataset, is missing.
        DeadlineExceededError: the run took more than five minutes.
    """
    validation.integer("demo", "number of ranks", ranks)
    launcher = mpirun.find_mpirun("demo")
    # Checked here, because each rank would report a missing file.
    _digits_file()
    place = folder or Path(tempfile.mkdtemp(prefix="unisono-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    command = [launcher, "-np", str(ranks), sys.executable, "-m", "strategies.demo", str(place)]
    try:
        # The exit status is mpirun's, which is that of a failed rank.
        return subprocess.run(
            command, env=mpirun.job_environment(), timeout=_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        raise errors.DeadlineExceededError(
            f"demo: {ranks} ranks have not finished within {_SECONDS} s"
        ) from None


def train(folder: Path, epochs: int = 30) -> float:
    """Train on the digits together with all other ranks; return the accuracy on held-out rows.

    Args:
        folder: folder in which rank 0 writes `metrics.jsonl` and, with matplotlib, `loss.png`.
        epochs: number of passes over the data.
    """
    comm = cc.init()
    images, digits = _digits()
    # All ranks shuffle with one seed, so they hold out the same rows.
    held_out, training = slice(0, 297), slice(297 + comm.rank, None, comm.size)  # every size-th row
    x, y = images[training], np.eye(10)[digits[training]]

    random = np.random.default_rng(comm.rank)  # differs per rank; the broadcast makes weights equal
    weights = {"w": random.normal(size=(64, 10)) * 0.01, "b": np.zeros(10)}
    broadcast_parameters(weights)
    optimizer = DistributedOptimizer(Momentum(0.5, 0.9))

    metrics = MetricsWriter(folder / "metrics.jsonl") if comm.rank == 0 else None
    for epoch in range(epochs):
        scores = np.exp(x @ weights["w"] + weights["b"])
        errors = scores / scores.sum(axis=1, keepdims=True) - y
        gradients = {"w": x.T @ errors / len(x), "b": errors.mean(axis=0)}
        pairs = [(gradients[name], weights[name]) for name in weights]
        # Ranks have different numbers of rows, so each gradient is weighted by its rows.
        optimizer.apply_gradients(pairs, examples=len(x))  # the mean over all rows of all ranks
        # The same bits on all ranks, though only rank 0 writes them.
        loss = comm.allreduce(np.array(-np.log((y * (errors + y)).sum(axis=1)).mean()))
        if metrics is not None:
            metrics.write(step=epoch, loss=float(loss))
    guesses = (images[held_out] @ weights["w"] + weights["b"]).argmax(axis=1)
    accuracy = float((guesses == digits[held_out]).mean())
    # Only rank 0 has a writer, and prints once for all ranks.
    if metrics is not None:
        metrics.close()
        print(f"{comm.size} ranks, accuracy on held-out digits: {accuracy:.3f}")
        _draw(folder)
    return accuracy


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return shuffled images, shape (1797, 64), values 0 .. 1, and their digits."""
    table = np.loadtxt(_digits_file(), delimiter=",")
    np.random.default_rng(0).shuffle(table)
    return table[:, :64] / 16, table[:, 64].astype(int)


def _digits_file() -> Path:
    """Return scikit-learn's digits file, without the import of the library, which takes seconds."""
    # The path alone: an import would take most of the time of a small run.
    library = importlib.util.find_spec("sklearn")
    if library is None or library.origin is None:
        raise errors.NotFoundError(
            "demo: scikit-learn, which contains the digits, is missing; pip install scikit-learn"
        )
    return Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _draw(folder: Path) -> None:
    print(f"metrics:    {folder / 'metrics.jsonl'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("loss curve: needs matplotlib; pip install matplotlib")
        return
    loss_curve(folder / "metrics.jsonl", folder / "loss.png")
    print(f"loss curve: {folder / 'loss.png'}")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
