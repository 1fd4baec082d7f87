"""Train a network of PyTorch whose layers are on different ranks, as a pipeline.

    OPENBLAS_NUM_THREADS=1 mpirun -np 2 python examples/torch_pipeline.py
    OPENBLAS_NUM_THREADS=1 mpirun -np 4 python examples/torch_pipeline.py --pipelines 2

With several pipelines, each learns from its share of every batch, and the ranks that hold the same
layers average their gradients. The losses are those of one rank, except for rounding.
"""

from __future__ import annotations

import argparse

import torch

import collectives as cc
import strategies
from common.digits import batches, load
from strategies.model_parallel.torch import Stages


def main() -> None:
    """Train, and print the loss of each epoch."""
    options = parse_arguments()
    comm = cc.init()
    if comm.size % options.pipelines:
        raise SystemExit(f"{comm.size} ranks do not form {options.pipelines} equal pipelines")
    torch.set_num_threads(1)  # ranks fill the cores
    torch.manual_seed(options.seed)  # the same layers on all ranks
    number = comm.rank % options.pipelines
    pipeline = comm.split(number)
    stages = Stages(layers(options), parts=options.parts, comm=pipeline)
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(stages.parameters(), lr=options.learning_rate, momentum=0.9),
        comm=comm.split(pipeline.rank),  # ranks with the same layers
    )
    pixels, digits = (torch.from_numpy(array) for array in load("training"))
    for epoch in range(options.epochs):
        losses = []
        for batch in batches(len(digits), options.batch_size, options.seed + epoch):
            rows = batch[number :: options.pipelines]
            optimizer.zero_grad()
            # The first rank of the pipeline uses the pixels, and the last one the digits.
            loss = stages.step(pixels[rows], digits[rows], torch.nn.functional.cross_entropy)
            optimizer.step(examples=len(rows))
            losses.append(loss)
        mean = float(comm.allreduce(sum(losses) / len(losses), op=cc.MEAN))
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
    pixels, digits = (torch.from_numpy(array) for array in load("held out"))
    scores = stages.predict(pixels)
    if scores is not None and number == 0:
        right = (scores.argmax(1) == digits).double().mean().item()
        print(f"accuracy on the held-out digits: {right:.4f}")


def layers(options: argparse.Namespace) -> list[torch.nn.Module]:
    """Return the layers of the whole network; a rank uses a few consecutive ones."""
    widths = [64] + [options.units] * (options.layers - 1)
    hidden = [
        torch.nn.Sequential(torch.nn.Linear(inputs, outputs, dtype=torch.float64), torch.nn.ReLU())
        for inputs, outputs in zip(widths[:-1], widths[1:], strict=True)
    ]
    return [*hidden, torch.nn.Linear(widths[-1], 10, dtype=torch.float64)]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="layers of all ranks of a pipeline")
    parser.add_argument("--units", type=int, default=256, help="units of each hidden layer")
    parser.add_argument("--pipelines", type=int, default=1, help="that divide each batch")
    parser.add_argument("--parts", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training data")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
