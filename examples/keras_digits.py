"""Train a small network of Keras on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/keras_digits.py
    KERAS_BACKEND=jax mpirun -np 2 python examples/keras_digits.py --resume --epochs 48

Three marked lines make it a program of many ranks: they keep all copies of the model in step. Each
rank takes its share of every batch, and `in_step` weights shares of different sizes. The rest is a
program of one rank. A callback writes checkpoints.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator

os.environ.setdefault("KERAS_BACKEND", "torch")  # read by the import of keras

import keras
import numpy as np

import collectives as cc
import strategies
import strategies.keras
from common.digits import PIXELS, training_and_held_out
from strategies.checkpoint import Saver

Pairs = tuple[np.ndarray, np.ndarray]


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    comm = cc.init()  # 1: who takes part
    keras.utils.set_random_seed(comm.rank)

    model = keras.Sequential(
        [
            keras.Input((PIXELS,)),
            keras.layers.Dense(options.hidden, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.SGD(options.learning_rate, momentum=0.9)
    optimizer = strategies.keras.DistributedOptimizer(optimizer)  # 2: average the gradients
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)

    training, held_out = training_and_held_out()
    with strategies.CheckpointManager(options.checkpoints, comm) as checkpoints:
        saver = Saver(checkpoints, weights=model.weights, optimizer=optimizer.variables)
        first = (saver.restore() or 0) if options.resume else 0

        def save(epoch: int, logs: object) -> None:
            if (epoch + 1) % 10 == 0 or epoch + 1 == options.epochs:
                saver.save(epoch + 1)

        model.fit(
            strategies.keras.in_step(batches(training, first, options, comm)),
            initial_epoch=first,
            epochs=options.epochs,
            steps_per_epoch=-(-len(training[1]) // options.batch_size),
            shuffle=False,
            verbose=2 if comm.rank == 0 else 0,
            callbacks=[
                strategies.keras.BroadcastGlobalVariables(),  # 3: same start
                strategies.keras.MetricAverage(),
                keras.callbacks.LambdaCallback(on_epoch_end=save),
            ],
        )

    right = (model.predict(held_out[0], verbose=0).argmax(1) == held_out[1]).mean()
    if comm.rank == 0:
        print(f"accuracy on the held-out digits: {right:.4f}")


def batches(
    data: Pairs, first: int, options: argparse.Namespace, comm: cc.Communicator
) -> Iterator[Pairs]:
    """Yield this rank's share of each batch, epoch after epoch."""
    pixels, digits = data
    for epoch in itertools.count(first):
        order = np.random.default_rng(options.seed + epoch)  # the same on all ranks
        rows = order.permutation(len(digits))
        for start in range(0, len(rows), options.batch_size):
            share = rows[start : start + options.batch_size][comm.rank :: comm.size]
            yield pixels[share], digits[share]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows")
    parser.add_argument("--checkpoints", default="runs/keras-digits", help="where they go")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
