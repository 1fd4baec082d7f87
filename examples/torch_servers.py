"""Train a model of PyTorch with parameter servers, or with spare replicas, by one more argument.

    mpirun -np 3 python examples/torch_servers.py
    mpirun -np 4 python examples/torch_servers.py --synchronous
    mpirun -np 4 python examples/torch_servers.py --spare 1

With parameter servers, rank 0 holds the parameters and the slots of the optimizer, and no worker
waits for another one; with spare replicas, a step uses the first gradients that arrive.
"""

from __future__ import annotations

import argparse
import itertools

import torch

import collectives as cc
import strategies
from common.digits import batches, load

BATCH = 50


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # ranks share the cores
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.5)
    if options.spare is None:
        with_servers(model, optimizer, options)
    else:
        with_spare_replicas(model, optimizer, options)


def with_servers(model, optimizer, options) -> None:
    """Let workers push their gradients to rank 0 and take new parameters from there."""
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=1)
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        strategy = strategies.ParameterServerStrategy(
            server,
            synchronous=options.synchronous,
            # Of n workers that take turns, a gradient is n - 1 updates late: smaller steps.
            rate_scale=1.0 if options.synchronous else 2 / cluster.comm.size,
        )
        optimizer = strategies.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), strategy=strategy
        )
        if cluster.job == "ps":
            server.join()
            return
        workers = cluster.workers
        steps = options.steps // workers.size
        train(model, optimizer, steps, my_batches(workers.rank))
        strategy.leave()
        workers.barrier()
        if strategy.is_chief:
            optimizer.pull()  # what the others have pushed last
            report(model, f"parameter server, {workers.size} workers")
            print(f"staleness of the last gradients: {strategy.last_push[0].staleness}")


def with_spare_replicas(model, optimizer, options) -> None:
    """Train by steps of the first gradients that arrive."""
    comm = cc.init()
    with strategies.SpareReplicaStrategy(comm.size - options.spare, comm=comm) as strategy:
        optimizer = strategies.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), strategy=strategy
        )
        rows = my_batches(comm.rank)
        while strategy.local_step < options.steps:
            train(model, optimizer, 1, rows)
        if strategy.is_chief:
            report(model, f"{options.spare} of {comm.size} replicas spare")


def train(model, optimizer, steps: int, rows) -> None:
    """Make steps as with any optimizer; `examples` says how many rows a gradient is the mean of."""
    for pixels, digits in itertools.islice(rows, steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), digits).backward()
        optimizer.step(examples=len(digits))


def my_batches(rank: int):
    """Yield images and digits for ever, in an order of this rank's own."""
    pixels, digits = (torch.from_numpy(part) for part in load("training"))
    for epoch in itertools.count():
        for rows in batches(len(digits), BATCH, 1000 * rank + epoch):
            yield pixels[rows].float(), digits[rows]


def report(model, how: str) -> None:
    """Print the accuracy on held-out digits."""
    pixels, digits = (torch.from_numpy(part) for part in load("held out"))
    right = (model(pixels.float()).argmax(1) == digits).double().mean()
    print(f"{how}\naccuracy on the held-out digits: {right:.4f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--synchronous", action="store_true", help="workers wait for each other")
    parser.add_argument("--spare", type=int, help="so many replicas are spare; no servers")
    parser.add_argument("--steps", type=int, default=800, help="of all workers; of the replicas")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
