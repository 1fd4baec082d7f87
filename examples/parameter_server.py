"""Learn the digits with parameter servers: workers that wait for each other, or do not.

    mpirun -np 3 python examples/parameter_server.py
    mpirun -np 5 python examples/parameter_server.py --ps 2 --synchronous
    mpirun -np 4 python examples/parameter_server.py --coordinator
    mpirun -np 3 python examples/parameter_server.py --checkpoints run --resume

All ranks run this program: the first ones hold the variables, the others compute. When the batch
system asks one of them to stop, all stop, with a checkpoint to resume from.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import strategies
from common.digits import Network, accuracy, batches, load
from strategies.checkpoint import Saver
from strategies.elastic import Preemption
from strategies.parameter_server import Drop, Scale, WorkerStats
from strategies.session import TrainingSession, hooks

BATCH = 50


def main() -> None:
    """Train, and say how well, how fast, and with how stale gradients."""
    options = parse_arguments()
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=options.ps)
    with (
        strategies.Cluster(spec) as cluster,
        Preemption(cluster.comm) as preemption,
        strategies.Server(cluster) as server,
    ):
        workers = spec.num_tasks("worker") - options.coordinator
        updates = options.epochs * len(load("training")[1]) // BATCH
        rate = strategies.schedules.linear(0.6, 0.05, steps=updates)
        strategy = strategies.ParameterServerStrategy(
            server,
            # Workers that do not wait for each other bring a momentum of their own.
            strategies.Momentum(0.1, 0.9) if options.synchronous else strategies.SGD(rate),
            synchronous=options.synchronous,
            staleness=options.staleness,
            warmup_steps=options.warmup_steps,
            rate_scale=rate_scale(workers, options),
        )
        for name, value in Network.random(96, seed=1).weights.items():
            strategy.variable(value, name=name)
        began = time.perf_counter()
        if options.coordinator:
            with strategies.parameter_server.ClusterCoordinator(strategy) as coordinator:
                if coordinator.coordinates:
                    schedule(coordinator, options.epochs)
                else:
                    coordinator.serve()
        elif cluster.job == "worker":
            train(strategy, cluster.workers, preemption, options)
        if cluster.job == "ps":
            server.join()
        elif not options.coordinator:
            cluster.workers.barrier()
        if strategy.is_chief:
            report(strategy, workers, time.perf_counter() - began)


def rate_scale(workers: int, options: argparse.Namespace) -> float:
    """Return how much smaller steps are to be where a gradient is `workers` - 1 updates late."""
    if options.synchronous or isinstance(options.staleness, Scale):  # not late, or seen to
        return 1.0
    return 2 / (1 + workers)


def train(strategy, workers, preemption, options) -> None:
    """Do this worker's part of all epochs that have not been done."""
    saver = None
    if options.checkpoints:
        saver = Saver(strategies.CheckpointManager(options.checkpoints), model=strategy)
    with TrainingSession(  # a step of it is an epoch; the chief saves what the ps tasks hold
        saver,
        workers,
        in_step=options.synchronous,
        restore=options.resume,
        save_steps=1,
        hooks=[hooks.StopAtStep(options.epochs)],
        preemption=preemption,
    ) as session:
        strategy.pull()  # what the chief has restored
        while not session.should_stop():
            session.run(train_epoch, session, strategy, workers)
        strategy.leave()  # before the others are waited for: none of them waits for this one


def train_epoch(session, strategy, workers) -> None:
    """Push the gradients of this worker's batches."""
    for rows in own_batches(session.step, workers.rank, workers.size):
        step(strategy, rows)


def own_batches(epoch: int, worker: int, workers: int) -> list[np.ndarray]:
    """Return the rows of each batch of one worker, as many for all."""
    everything = list(batches(len(load("training")[1]), BATCH, epoch))
    return everything[worker::workers][: len(everything) // workers]


def step(strategy: strategies.ParameterServerStrategy, rows: np.ndarray) -> float:
    """Push the gradients of one batch; returns the loss."""
    pixels, digits = (part[rows] for part in load("training"))
    weights = {name: variable.value for name, variable in strategy.variables.items()}
    loss, gradients = Network(weights).gradients(pixels, digits)
    pairs = [(gradients[name], variable) for name, variable in strategy.variables.items()]
    strategy.apply_gradients(strategy.optimizer, pairs, examples=len(rows))
    return loss / len(rows)


def schedule(coordinator: strategies.parameter_server.ClusterCoordinator, epochs: int) -> None:
    """Let the workers take whichever batch is next."""
    for epoch in range(epochs):
        for rows in batches(len(load("training")[1]), BATCH, epoch):
            coordinator.schedule(scheduled_step, args=(rows,))
    coordinator.join()


def scheduled_step(rows: np.ndarray) -> float:
    """Do a step on a worker."""
    return step(strategies.get_strategy(), rows)


def report(strategy: strategies.ParameterServerStrategy, workers: int, seconds: float) -> None:
    """Print accuracy and staleness."""
    strategy.pull()
    weights = {name: np.array(variable.value) for name, variable in strategy.variables.items()}
    pixels, digits = load("held out")
    how = "synchronous" if strategy.synchronous else "asynchronous"
    total = sum((sum(r.records.values(), WorkerStats()) for r in strategy.reports()), WorkerStats())
    print(f"{how}, {workers} workers, {seconds:.2f} s")
    print(
        f"mean staleness {total.mean_staleness:.2f}, at most {total.most_staleness}, "
        f"{total.dropped} dropped"
    )
    print(
        f"accuracy on the held-out digits: {accuracy(Network(weights).predict(pixels), digits):.4f}"
    )


def drop(most: str) -> Drop:
    """Read the rule of `--drop`."""
    return Drop(int(most))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ps", type=int, default=1, help="ranks that hold variables")
    parser.add_argument("--synchronous", action="store_true", help="workers wait for each other")
    parser.add_argument("--coordinator", action="store_true", help="worker 0 gives work to others")
    parser.add_argument(
        "--scale",
        action="store_const",
        const=Scale(),
        dest="staleness",
        help="smaller steps for stale gradients",
    )
    parser.add_argument(
        "--drop",
        type=drop,
        metavar="MOST",
        dest="staleness",
        help="leave out gradients that are staler than MOST updates",
    )
    parser.add_argument(
        "--warmup-steps", type=int, help="of one worker alone; 20 where workers do not wait"
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--checkpoints", help="a directory, on the chief's machine")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    options = parser.parse_args()
    if options.warmup_steps is None:
        options.warmup_steps = 0 if options.coordinator or options.synchronous else 20
    if options.synchronous and options.warmup_steps:
        parser.error("--synchronous keeps workers in step from the beginning: no --warmup-steps")
    if options.coordinator and options.synchronous:
        parser.error("--coordinator schedules steps that do not wait for each other")
    if options.coordinator and options.checkpoints:
        parser.error("--coordinator has no epochs of its own: --checkpoints is for workers")
    return options


if __name__ == "__main__":
    main()
