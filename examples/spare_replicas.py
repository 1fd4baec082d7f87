"""Train on the digits without waiting for the slowest ranks.

    mpirun -np 4 python examples/spare_replicas.py --replicas-to-aggregate 3
    mpirun -np 4 python examples/spare_replicas.py --checkpoints run --resume

A step is made of the first three gradients; the fourth rank is a spare. With `--with-ft ulfm` after
`mpirun`, one of them may even die. When the batch system asks one rank to stop, all do, with a
checkpoint to resume from.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools

import numpy as np

import collectives as cc
import strategies
from common.digits import Network, accuracy, batches, load
from strategies.checkpoint import Saver
from strategies.elastic import Preemption
from strategies.errors import OutOfRangeError
from strategies.session import TrainingSession, hooks


def main() -> None:
    """Train, and print the result on rank 0."""
    options = parse_arguments()
    comm = cc.init()
    count = options.replicas_to_aggregate or max(1, comm.size - 1)
    weights = Network.random(options.hidden, options.seed).weights
    step = restored(weights, comm, options.checkpoints) if options.resume else 0
    with (
        Preemption(comm) as preemption,
        strategies.SpareReplicaStrategy(count, comm=comm, global_step=step) as strategy,
    ):
        network = {name: strategy.variable(value, name=name) for name, value in weights.items()}
        optimizer = strategies.Momentum(options.learning_rate, 0.9)
        data = my_batches(options.batch_size, options.seed + comm.rank)
        saver = None
        if strategy.is_chief and options.checkpoints:
            checkpoints = strategies.CheckpointManager(options.checkpoints)
            saver = Saver(checkpoints, model=network, optimizer=optimizer)
        with TrainingSession(  # of this rank alone; the chief saves when all others have left
            saver, in_step=False, restore=options.resume, save_seconds=None,
            hooks=[hooks.StopAtStep(options.steps)],
            global_step=lambda: strategy.local_step, preemption=preemption,
        ) as session:  # fmt: skip
            with contextlib.suppress(OutOfRangeError):  # too few are left for another step
                while not session.should_stop():
                    session.run(train_step, strategy, optimizer, network, data)
            if strategy.is_chief and not session.preempted:
                report(strategy, network)
            strategy.close()


def restored(weights: dict[str, np.ndarray], comm: cc.Communicator, folder: str) -> int:
    """Give the weights the values of the newest checkpoint, on all ranks; returns its step."""
    with strategies.CheckpointManager(folder, comm) as checkpoints:
        return Saver(checkpoints, model=weights).restore() or 0


def train_step(strategy, optimizer, network, data) -> None:
    """Deliver a gradient, which may be among those that make a step."""
    gradients = backward(network, *next(data))
    strategy.apply_gradients(optimizer, [(gradients[name], v) for name, v in network.items()])


def report(strategy: strategies.SpareReplicaStrategy, network) -> None:
    """Print the used and dropped gradients, and the accuracy."""
    said = strategy.report()
    weights = {name: variable.value for name, variable in network.items()}
    pixels, digits = load("held out")
    count, size = strategy.replicas_to_aggregate, strategy.total_num_replicas
    print(f"{count} of {size} gradients make a step")
    for worker in said.used:
        print(f"worker {worker}: {said.used[worker]} used, {said.dropped[worker]} late")
    share = accuracy(Network(weights).predict(pixels), digits)
    print(f"accuracy on the held-out digits: {share:.4f}")


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
    parser.add_argument("--checkpoints", help="a directory, on the chief's machine")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    options = parser.parse_args()
    if options.resume and not options.checkpoints:
        parser.error("--resume needs --checkpoints, the directory to resume from")
    return options


if __name__ == "__main__":
    main()
