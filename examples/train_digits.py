"""Train a small network on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/train_digits.py
    mpirun -np 3 python examples/train_digits.py --resume --epochs 60

Everything a real job needs is here in small: files on disk, threads that read and mix them, each
rank its own files, gradients averaged over the ranks, checkpoints, metrics and a clean stop.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import collectives as cc
import strategies

PIXELS, DIGITS = 64, 10
TRAINING_SHARDS = 8

# Exit status of a run that was asked to stop; it goes on with --resume.
STOPPED_EARLY = 85


def main() -> None:
    """Train, evaluate, and say where the results are."""
    options = parse_arguments()
    comm = cc.init()
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    training_files, held_out_file = write_digits(options.data_dir, comm)

    with strategy.scope():
        variables = make_variables(strategy, options.hidden, options.seed)
    rate = options.learning_rate
    optimizer = strategies.DistributedOptimizer(strategies.Momentum(rate, 0.9), comm=comm)

    output = Path(options.output_dir)
    with strategies.CheckpointManager(output / "checkpoints", comm) as checkpoints:
        first_epoch = 0
        if options.resume:
            first_epoch = restore(checkpoints, variables, optimizer)
        metrics = output / "metrics.jsonl"
        resume_step = optimizer.step if first_epoch else None
        writer = None
        if comm.rank == 0:
            writer = strategies.training.MetricsWriter(metrics, resume_step=resume_step)
        stop, stopping = StopRequest(), False
        speed = 0.0
        left = max(0, options.epochs - first_epoch)
        with strategies.training.Progress(
            left, description="epochs", enabled=comm.rank == 0
        ) as progress:
            for epoch in range(first_epoch, options.epochs):
                facts = train_epoch(strategy, optimizer, variables, training_files, epoch, options)
                speed = facts["samples_per_second"]
                if writer is not None:
                    writer.write(step=optimizer.step, epoch=epoch + 1, **facts)
                progress.update(loss=facts["loss"])
                stopping = bool(comm.allreduce(stop.requested, op=cc.MAX))
                last = stopping or epoch + 1 == options.epochs
                if last or (epoch + 1) % options.checkpoint_epochs == 0:
                    save(checkpoints, variables, optimizer, epoch + 1)
                if last:
                    break
        accuracy = evaluate(strategy, variables, held_out_file, options.batch_size)
        newest = checkpoints.latest()
    if comm.rank == 0:
        writer.close()
        strategies.training.loss_curve(metrics, output / "loss.png")
        report(comm, speed, accuracy, output / "loss.png", newest, metrics)
    if stopping:
        sys.exit(STOPPED_EARLY)


def train_epoch(strategy, optimizer, variables, files, epoch, options) -> dict[str, float]:
    """Go once through the training data; returns the facts of the epoch over all ranks."""
    pipeline = {"wait_seconds": 0.0}

    def my_batches(
        context: strategies.replicas.InputContext,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        own = files[context.input_pipeline_id :: context.num_input_pipelines]
        if not own:  # more ranks than files: this one helps with batches of 0 rows
            return
        with strategies.input.csv_batches(
            own,
            RECORD_DEFAULTS,
            batch_size=math.ceil(options.batch_size / context.num_replicas_in_sync),
            transform=pixels_and_digits,
            num_threads=options.readers,
            num_epochs=1,
            seed=options.seed + epoch,
            min_after_dequeue=512,
            skip_header_lines=1,
            allow_smaller_final_batch=True,
        ) as batches:
            yield from batches
            pipeline["wait_seconds"] = batches.wait_seconds

    totals = np.zeros(2)  # sum of the loss over rows, rows
    began = time.perf_counter()
    for pixels, digits in strategy.distribute_datasets_from_function(my_batches):
        loss, gradients = strategy.run(forward_and_backward, args=(variables, pixels, digits))
        optimizer.apply_gradients(zip(gradients, variables, strict=True), examples=len(digits))
        totals += loss, len(digits)
    seconds = time.perf_counter() - began
    loss, rows = strategy.reduce("sum", totals)
    waited = strategy.reduce("mean", pipeline["wait_seconds"])
    return {
        "loss": loss / rows,
        "samples_per_second": rows / seconds,
        "input_wait_share": waited / seconds,
    }


def forward_and_backward(variables, pixels, digits):
    """Return the sum of the cross-entropy over the rows, and the gradients of its mean."""
    w1, b1, w2, b2 = (variable.value for variable in variables)
    rows = max(len(digits), 1)
    hidden = np.maximum(pixels @ w1 + b1, 0)
    probabilities = softmax(hidden @ w2 + b2)
    chosen = probabilities[np.arange(len(digits)), digits]
    loss = -np.log(np.maximum(chosen, 1e-12)).sum()

    errors = probabilities
    errors[np.arange(len(digits)), digits] -= 1
    errors /= rows
    back = (errors @ w2.T) * (hidden > 0)
    return loss, [pixels.T @ back, back.sum(axis=0), hidden.T @ errors, errors.sum(axis=0)]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Turn each row of scores into probabilities."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=1, keepdims=True)


def evaluate(strategy, variables, file: str, batch_size: int) -> float:
    """Return the share of held-out digits that are recognised; the ranks share the work."""
    w1, b1, w2, b2 = (variable.value for variable in variables)

    def correct(pixels, digits):
        scores = np.maximum(pixels @ w1 + b1, 0) @ w2 + b2
        return (scores.argmax(axis=1) == digits).astype(np.float64)

    totals = np.zeros(2)
    with strategies.input.csv_batches(
        [file],
        RECORD_DEFAULTS,
        batch_size=batch_size,
        transform=pixels_and_digits,
        num_epochs=1,
        shuffle=False,
        skip_header_lines=1,
        allow_smaller_final_batch=True,
    ) as batches:
        for pixels, digits in strategy.distribute_dataset(batches):
            hits = strategy.run(correct, args=(pixels, digits))
            totals += hits.sum(), len(digits)
    right, rows = strategy.reduce("sum", totals)
    return right / rows


# A column that is empty in a file counts as a white pixel; a missing digit is an error.
RECORD_DEFAULTS = [np.float32(0)] * PIXELS + [np.empty(0, np.int32)]


def pixels_and_digits(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Turn the columns of a file into images of 64 pixels from 0 to 1, and their digits."""
    return np.stack(columns[:PIXELS], axis=1) / np.float32(16), columns[PIXELS]


def make_variables(strategy, hidden: int, seed: int) -> list[strategies.Variable]:
    """Make the weights of two layers; every rank gets those of rank 0."""
    random = np.random.default_rng(seed)

    def weights(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * np.sqrt(2 / rows)).astype(np.float32)

    return [
        strategy.variable(weights(PIXELS, hidden), name="w1"),
        strategy.variable(np.zeros(hidden, np.float32), name="b1"),
        strategy.variable(weights(hidden, DIGITS), name="w2"),
        strategy.variable(np.zeros(DIGITS, np.float32), name="b2"),
    ]


def save(checkpoints, variables, optimizer, epoch: int) -> None:
    """Write the model, the optimizer and the place in the data."""
    tensors = {f"model/{variable.name}": variable.value for variable in variables}
    tensors |= {f"optimizer/{name}": np.asarray(v) for name, v in optimizer.state_dict().items()}
    checkpoints.save(tensors, step=optimizer.step, metadata={"epoch": epoch})


def restore(checkpoints, variables, optimizer) -> int:
    """Continue from the newest checkpoint, if there is one; returns the number of epochs done."""
    found = checkpoints.restore_or_none()
    if found is None:
        return 0
    for variable in variables:
        variable.assign(found.tensors[f"model/{variable.name}"])
    prefix = "optimizer/"
    state = {k[len(prefix) :]: v for k, v in found.tensors.items() if k.startswith(prefix)}
    optimizer.load_state_dict(state)
    return int(found.metadata["epoch"])


def write_digits(folder: str, comm: cc.Communicator) -> tuple[list[str], str]:
    """Write the digits as CSV files, once; returns the training files and the held-out one."""
    names = [f"train-{i}-of-{TRAINING_SHARDS}.csv" for i in range(TRAINING_SHARDS)]
    paths = [str(Path(folder) / name) for name in names]
    held_out = str(Path(folder) / "held-out.csv")
    if comm.rank == 0 and not all(Path(path).exists() for path in [*paths, held_out]):
        from sklearn.datasets import load_digits

        bunch = load_digits()
        table = np.column_stack([bunch.data, bunch.target]).astype(int)
        np.random.default_rng(0).shuffle(table)
        Path(folder).mkdir(parents=True, exist_ok=True)
        header = ",".join([f"pixel_{i}" for i in range(PIXELS)] + ["digit"])
        parts = np.array_split(table, TRAINING_SHARDS + 1)
        for path, rows in zip([*paths, held_out], parts, strict=True):
            part = Path(f"{path}.part")  # a run that is killed here leaves no half file behind
            np.savetxt(part, rows, fmt="%d", delimiter=",", header=header, comments="")
            part.rename(path)
    comm.barrier()
    return paths, held_out


class StopRequest:
    """Remember that the batch system asked us to stop (SIGUSR1, SIGTERM)."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.requested = True


def report(comm, speed, accuracy, picture, checkpoint, metrics) -> None:
    """Tell people what happened."""
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    ranks = f"{comm.size} {'rank' if comm.size == 1 else 'ranks'}"
    nodes = f"{comm.num_nodes} {'node' if comm.num_nodes == 1 else 'nodes'}"
    print(f"{ranks} on {nodes}, {library}")
    print(f"{speed:.0f} samples per second in the last epoch")
    print(f"accuracy on the held-out digits: {accuracy:.4f}")
    print(f"loss curve: {picture}")
    print(f"checkpoint: {checkpoint}")
    print(f"metrics:    {metrics}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data/digits", help="where the CSV files are")
    parser.add_argument("--output-dir", default="runs/digits", help="where the results go")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=48, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--readers", type=int, default=2, help="reader threads of each rank")
    parser.add_argument("--checkpoint-epochs", type=int, default=10, help="epochs between two")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"argument --epochs: expected at least 1, got {options.epochs}")
    return options


if __name__ == "__main__":
    main()
