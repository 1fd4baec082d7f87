"""Train a small network on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/train_digits.py
    mpirun -np 3 python examples/train_digits.py --resume --epochs 60

Everything a real job needs is here in small: files on disk, threads that read and mix them, each
rank its own files, gradients averaged over the ranks, and a session that writes checkpoints and
metrics and stops when the batch system asks for it. The network itself, the files and the report
are in `common/`.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from pathlib import Path

import numpy as np

import collectives as cc
import strategies
from common import digits
from common.running import report
from strategies.checkpoint import Saver
from strategies.session import Summaries, TrainingSession, hooks

# Once through CSV files of 64 pixels and a digit per line.
read_digits = functools.partial(
    strategies.input.csv_batches,
    record_defaults=digits.CSV_COLUMNS,
    transform=digits.images_and_labels,
    num_epochs=1,
    skip_header_lines=1,
    allow_smaller_final_batch=True,
)


def main() -> None:
    """Train, evaluate, and say where the results are."""
    options = parse_arguments()
    comm = cc.init()  # no addresses, no ports: mpirun knows
    training_files, held_out_file = digits.write_csv(options.data_dir, comm)

    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    with strategy.scope():  # every rank starts from rank 0's values
        weights = digits.Network.random(options.hidden, options.seed).weights
        variables = {
            name: strategy.variable(value.astype(np.float32), name=name)
            for name, value in weights.items()
        }
    optimizer = strategies.DistributedOptimizer(strategies.Momentum(options.learning_rate, 0.9))

    output = Path(options.output_dir)
    metrics = output / "metrics.jsonl"
    with strategies.CheckpointManager(output / "checkpoints", comm) as checkpoints:
        saver = Saver(checkpoints, model=variables, optimizer=optimizer)
        every_epoch = [
            hooks.StopAtStep(options.epochs),
            hooks.NanGuard("loss"),
            Summaries(metrics=metrics, tensorboard=options.tensorboard, progress="epochs"),
        ]
        with TrainingSession(
            saver, restore=options.resume, save_steps=options.checkpoint_epochs, hooks=every_epoch
        ) as session:  # a step of it is an epoch
            facts = {"samples_per_second": 0.0}
            while not session.should_stop():
                facts = session.run(
                    train_epoch, session, strategy, optimizer, variables, training_files, options
                )
        accuracy = evaluate(strategy, variables, held_out_file, options.batch_size)
        newest = checkpoints.latest()
    report(comm, accuracy, facts["samples_per_second"], newest, metrics)


def train_epoch(session, strategy, optimizer, variables, files, options) -> dict[str, float]:
    """Go once through the training data; returns the facts of the epoch over all ranks."""
    waited = 0.0

    def my_batches(context: strategies.replicas.InputContext):
        nonlocal waited
        own = files[context.input_pipeline_id :: context.num_input_pipelines]
        if not own:  # more ranks than files: this one helps with batches of 0 rows
            return
        size = math.ceil(options.batch_size / context.num_replicas_in_sync)
        mixing = {"seed": options.seed + session.step, "min_after_dequeue": 512}
        with read_digits(own, batch_size=size, num_threads=options.readers, **mixing) as batches:
            yield from batches
            waited = batches.wait_seconds

    totals = np.zeros(2)  # sum of the loss over rows, rows
    began = time.perf_counter()
    for pixels, labels in strategy.distribute_datasets_from_function(my_batches):
        loss, gradients = strategy.run(forward_and_backward, args=(variables, pixels, labels))
        pairs = [(gradients[name], variable) for name, variable in variables.items()]
        optimizer.apply_gradients(pairs, examples=len(labels))  # averaged over all rows
        totals += loss, len(labels)
    seconds = time.perf_counter() - began
    loss, rows = strategy.reduce("sum", totals)
    return {
        "loss": loss / rows,
        "samples_per_second": rows / seconds,
        "input_wait_share": strategy.reduce("mean", waited) / seconds,
    }


def network(variables: dict[str, strategies.Variable]) -> digits.Network:
    """Return the network with the present values of its variables."""
    return digits.Network({name: variable.value for name, variable in variables.items()})


def forward_and_backward(variables, pixels, labels):
    """Return the sum of the cross-entropy over the rows, and the gradients of its mean."""
    return network(variables).gradients(pixels, labels)


def evaluate(strategy, variables, file: str, batch_size: int) -> float:
    """Return the share of held-out digits that are recognised; the ranks share the work."""

    def correct(pixels, labels):
        return (network(variables).predict(pixels).argmax(axis=1) == labels).sum()

    totals = np.zeros(2)  # digits recognised, rows
    with read_digits([file], batch_size=batch_size, shuffle=False) as batches:
        for pixels, labels in strategy.distribute_dataset(batches):
            totals += strategy.run(correct, args=(pixels, labels)), len(labels)
    right, rows = strategy.reduce("sum", totals)
    return right / rows


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data/digits", help="where the CSV files are")
    parser.add_argument("--output-dir", default="runs/digits", help="where the results go")
    parser.add_argument("--tensorboard", help="folder of event files; needs tensorboardX")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=48, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--readers", type=int, default=2, help="reader threads of each rank")
    parser.add_argument("--checkpoint-epochs", type=int, default=10, help="epochs between two")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"argument --epochs: expected at least 1, got {options.epochs}")
    return options


if __name__ == "__main__":
    main()
