"""Train to an accuracy by all-reduce, and asynchronously with a parameter server.

    mpirun -np 3 python examples/time_to_accuracy.py --slow 5

Rank 0 is the parameter server, and idle while the others reduce, so that as many ranks compute in
both ways. The last rank sleeps for `--slow` ms in each step: by all-reduce the others wait for it,
with a parameter server they do not. It is over when a worker sees the accuracy that is asked for.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import NamedTuple

import collectives as cc
import strategies
from common.digits import Network, accuracy, batches, load

GOAL, BATCH, HIDDEN, RATE, MOST_EPOCHS, EVERY = 0.96, 50, 32, 0.3, 400, 5


class Reached(NamedTuple):
    """When a worker has seen the accuracy, if it has, in how many steps of its own."""

    seconds: float
    steps: int


def main() -> None:
    """Train in both ways, and print how long they took on rank 0."""
    slow = parse_arguments().slow / 1000
    comm = cc.init()
    if comm.size < 3:
        raise SystemExit("time to accuracy: expected a server and two workers, got fewer ranks")
    load("training")
    for name, train in (("all-reduce", by_all_reduce), ("server", by_server)):
        found = comm.allgather_object(train(comm, slow if comm.rank == comm.size - 1 else 0.0))
        if comm.rank == 0:
            workers = [one for one in found if one is not None]
            seconds = min(one.seconds for one in workers)
            steps = " ".join(str(one.steps) for one in workers)
            print(f"{name:>10}: {GOAL} within {seconds:.2f} s, steps of the workers: {steps}")


def by_all_reduce(comm: cc.Communicator, pause: float) -> Reached | None:
    """Train on all ranks but the first, in step."""
    workers = comm.group(range(1, comm.size))
    if workers is None:
        return None
    strategy = strategies.MultiWorkerMirroredStrategy(workers)
    return descend(strategy, strategies.SGD(RATE), workers, pause)


def by_server(comm: cc.Communicator, pause: float) -> Reached | None:
    """Train on all ranks but the first, which holds the variables."""
    spec = strategies.cluster.ClusterSpec.from_ranks(comm.size, ps=1)
    with strategies.Cluster(spec, comm) as cluster, strategies.Server(cluster) as server:
        optimizer = strategies.SGD(RATE)
        strategy = strategies.ParameterServerStrategy(server, optimizer)
        if cluster.job == "ps":
            make_variables(strategy)
            server.join()
            return None
        reached = descend(strategy, optimizer, cluster.workers, pause)
        strategy.leave()
        return reached


def make_variables(strategy) -> dict[str, strategies.Variable]:
    """Make the variables of a network that knows nothing, the same on all ranks."""
    weights = Network.random(HIDDEN, seed=1).weights
    return {name: strategy.variable(value, name=name) for name, value in weights.items()}


def descend(strategy, optimizer, workers: cc.Communicator, pause: float) -> Reached:
    """Make steps with this worker's batches until the newest values are good enough."""
    variables = make_variables(strategy)
    pixels, digits = load("training")
    began = time.perf_counter()
    for step, rows in enumerate(my_batches(workers)):
        network = Network({name: variable.value for name, variable in variables.items()})
        if step % EVERY == 0:
            held_out, right = load("held out")
            if accuracy(network.predict(held_out), right) >= GOAL:
                return Reached(time.perf_counter() - began, step)
        time.sleep(pause)
        _, gradients = network.gradients(pixels[rows], digits[rows])
        pairs = [(gradients[name], variable) for name, variable in variables.items()]
        strategy.apply_gradients(optimizer, pairs)
    raise SystemExit(f"time to accuracy: not {GOAL} after {MOST_EPOCHS} epochs")


def my_batches(workers: cc.Communicator):
    """Yield the rows of each of this worker's batches."""
    count = len(load("training")[1])
    for epoch in range(MOST_EPOCHS):
        yield from itertools.islice(batches(count, BATCH, epoch), workers.rank, None, workers.size)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", type=float, default=0.0, help="ms that the last rank sleeps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
