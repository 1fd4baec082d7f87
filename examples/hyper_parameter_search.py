"""Search for good hyper-parameters: one network per rank at a time, the best three are kept.

    mpirun -np 4 python examples/hyper_parameter_search.py
    python examples/ensemble.py

Rank 0 hands out the trials, the other ranks carry them out, one that is free takes the next. Each
rank may use a device of its own: its local rank is the number. Trials are drawn from the seed, so
that the result does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py.futures import MPICommExecutor
from safetensors.numpy import save_file

import collectives as cc
from common.digits import Network, accuracy, load

BEST = 3


class Trial(NamedTuple):
    """What one network is trained with."""

    number: int
    hidden: int
    learning_rate: float
    momentum: float
    epochs: int


class Result(NamedTuple):
    """What became of a trial."""

    accuracy: float
    trial: Trial
    rank: int
    weights: dict[str, np.ndarray]


def draw(count: int, epochs: int, seed: int) -> list[Trial]:
    """Draw hyper-parameters at random, the rates from a logarithmic scale."""
    random = np.random.default_rng(seed)
    return [
        Trial(
            number=number,
            hidden=int(random.integers(8, 65)),
            learning_rate=float(10 ** random.uniform(-3, -0.3)),
            momentum=float(random.choice([0.0, 0.5, 0.9])),
            epochs=epochs,
        )
        for number in range(count)
    ]


def carry_out(trial: Trial) -> Result:
    """Train one network, and see how well it does; runs on any rank."""
    network = Network.random(trial.hidden, seed=trial.number)
    network.train(trial.learning_rate, trial.momentum, trial.epochs, seed=trial.number)
    pixels, digits = load("validation")
    return Result(accuracy(network.predict(pixels), digits), trial, cc.rank(), network.weights)


def keep(results: list[Result], folder: Path) -> None:
    """Write the best networks, `best-1.safetensors` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, result in enumerate(results[:BEST], 1):
        facts = {name: str(value) for name, value in result.trial._asdict().items()}
        part = folder / f"best-{place}.part"  # a run that is killed here leaves no half file behind
        save_file(result.weights, part, metadata={"accuracy": str(result.accuracy), **facts})
        part.rename(folder / f"best-{place}.safetensors")


def main() -> None:
    """Carry out all trials, and keep the best."""
    options = parse_arguments()
    cc.init()  # before MPI is used
    from mpi4py import MPI

    trials = draw(options.trials, options.epochs, options.seed)
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is None:  # this rank has worked for rank 0
            return
        results = list(executor.map(carry_out, trials))
    results.sort(key=lambda result: -result.accuracy)
    keep(results, Path(options.output_dir))
    print(f"{len(results)} trials on ranks {sorted({result.rank for result in results})}")
    for result in results[:BEST]:
        trial = result.trial
        print(
            f"accuracy {result.accuracy:.4f}: trial {trial.number}, {trial.hidden} hidden units, "
            f"learning rate {trial.learning_rate:.4f}, momentum {trial.momentum}"
        )
    print(f"kept in {options.output_dir}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=24, help="networks to train")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data")
    parser.add_argument("--output-dir", default="runs/search", help="where the best are kept")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
