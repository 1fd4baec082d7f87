"""Train on scanned digits while ranks die: the survivors continue, and the job can be resumed.

    mpirun --with-ft ulfm -np 4 python examples/elastic_digits.py
    UNISONO_FAULT="step=40,rank=0,kind=kill" mpirun --with-ft ulfm -np 4 python ...
    mpirun --with-ft ulfm -np 5 python examples/elastic_digits.py --max-ranks 4

Every few steps all ranks copy weights, optimizer, input position and generators in memory. When
ranks have died (here: on purpose), the others go back to that, share the rows that are left, and
train on. With `--max-ranks 4` a fifth rank is spare, and trains in the place of a dead one. With
any other MPI, or without `--with-ft ulfm`, a dead rank ends the job as usual.

A session also writes them to files, less often, and when the batch system asks the job to stop: the
program ends with status 85 then, and `--resume` continues with any number of ranks.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

import collectives as cc
import strategies
from common import digits
from strategies import elastic
from strategies.checkpoint import Saver
from strategies.session import Summaries, TrainingSession


def main() -> None:
    """Train although ranks die, and print the accuracy."""
    options = parse_arguments()
    comm = cc.init()
    pixels, labels = digits.load("training")
    weights = digits.Network.random(options.hidden, seed=1).weights  # equal on all ranks
    rows = strategies.input.ShardedInput(  # numbers of rows, in another order in each epoch
        range(len(labels)), lambda row: (row,), rank=comm.rank, size=comm.size,
        policy="file", num_epochs=options.epochs, seed=1,
    )  # fmt: skip
    things = {
        "weights": weights,
        "optimizer": strategies.Momentum(options.learning_rate, 0.9),
        "rows": rows,
        "used": np.zeros(len(labels), int),
        "rng": np.random.default_rng(comm.rank),
    }
    state = elastic.State(comm, step=0, **things)

    def train_step(optimizer: strategies.DistributedOptimizer) -> dict[str, float]:
        comm = state.comm
        mine = list(itertools.islice(rows, options.batch_size // comm.size))
        used = np.zeros(len(labels), int)
        np.add.at(used, mine, 1)
        used = comm.allreduce(used, op=cc.SUM)
        if not used.any():
            raise StopIteration  # all ranks are through
        things["used"][:] += used
        noise = 0.05 * things["rng"].standard_normal((len(mine), pixels.shape[1]))
        loss, gradients = digits.Network(weights).gradients(pixels[mine] + noise, labels[mine])
        pairs = [(gradients[name], weights[name]) for name in weights]
        optimizer.apply_gradients(pairs, examples=len(mine))  # averaged over all rows
        return {"loss": loss / max(1, len(mine))}

    def train(state: elastic.State) -> None:
        comm = state.comm  # a smaller one after ranks have died, as is what is made of it
        optimizer = strategies.DistributedOptimizer(things["optimizer"], comm=comm)
        with (
            strategies.CheckpointManager(options.checkpoints, comm) as manager,
            TrainingSession(
                Saver(manager, **things), state=state, restore=options.resume,
                commit_steps=options.commit_steps, save_steps=options.save_steps,
                hooks=[Summaries(metrics=f"{options.checkpoints}.jsonl")],
                preemption=preemption,
            ) as session,
        ):  # fmt: skip
            while not session.should_stop():
                session.run(train_step, optimizer)

    with elastic.Preemption(comm) as preemption:  # also while surviving ranks synchronize
        elastic.run_elastic(train, state, min_ranks=options.min_ranks, max_ranks=options.max_ranks)
    if state.comm.rank == 0:
        pixels, labels = digits.load("held out")
        accuracy = digits.accuracy(digits.Network(weights).predict(pixels), labels)
        used = things["used"]
        print(f"{state.comm.size} of {comm.size} ranks; each row was used {used.min()} to", end=" ")
        print(f"{used.max()} times; accuracy on the held-out digits: {accuracy:.4f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=48, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--commit-steps", type=int, default=5, help="steps between two commits")
    parser.add_argument("--checkpoints", default="runs/elastic", help="directory of files")
    parser.add_argument("--save-steps", type=int, default=100, help="steps between two files")
    parser.add_argument("--resume", action="store_true", help="resume from the newest file")
    parser.add_argument("--min-ranks", type=int, default=1, help="least ranks that may continue")
    parser.add_argument("--max-ranks", type=int, help="how many train; the others are spare")
    return parser.parse_args()


if __name__ == "__main__":
    main()
