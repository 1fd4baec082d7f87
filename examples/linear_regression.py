"""Fit a line and a ridge by batch, mini-batch and stochastic descent, under every strategy.

    mpirun -np 3 python examples/linear_regression.py

The step is the same everywhere: a gradient of some rows, and `apply_gradients`. What differs is who
averages it with whom. Rank 0 prints, for each strategy and each descent, how far the weights are in
the end from those that a direct solution has, for plain and for ridge regression, and the time.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

import collectives as cc
import strategies

ROWS, COLUMNS, RIDGE = 1200, 8, 0.1
# Rows of one gradient (None: all that a worker has), learning rate, steps.
DESCENTS = {"batch": (None, 0.5, 40), "mini-batch": (32, 0.2, 80), "stochastic": (1, 0.04, 200)}


def main() -> None:
    """Fit by all of them, and print a table on rank 0."""
    comm = cc.init()
    x, y = make_rows()
    if comm.rank == 0:
        print(f"{'':>16} {'':>12} {'plain':>10} {'ridge':>10} {'seconds':>8}")
    for name, run in RUNS.items():
        for descent in DESCENTS:
            began = time.perf_counter()
            weights = [run(comm, x, y, descent, ridge) for ridge in (0.0, RIDGE)]
            took = time.perf_counter() - began
            if weights[0] is not None and comm.rank == reporter(name):
                off = [
                    float(np.abs(found - exact(x, y, ridge)).max())
                    for found, ridge in zip(weights, (0.0, RIDGE), strict=True)
                ]
                print(f"{name:>16} {descent:>12} {off[0]:10.2e} {off[1]:10.2e} {took:8.2f}")
            comm.barrier()


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return all rows, the same on every rank."""
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, COLUMNS))
    return x, x @ np.arange(COLUMNS) + random.normal(scale=0.1, size=ROWS)


def exact(x: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Return the weights that make the mean of error^2 / 2, and ridge weights^2 / 2, least."""
    return np.linalg.solve(x.T @ x / len(x) + ridge * np.eye(COLUMNS), x.T @ y / len(x))


def descend(strategy, optimizer, w, x, y, descent: str, ridge: float, part: int, of: int) -> None:
    """Make steps with the rows that are this worker's."""
    size, _, steps = DESCENTS[descent]
    x, y = x[part::of], y[part::of]
    random = np.random.default_rng(part)

    def step() -> None:
        rows = slice(None) if size is None else random.integers(len(x), size=size)
        error = x[rows] @ w.value - y[rows]
        gradient = x[rows].T @ error / len(error) + ridge * w.value
        strategy.apply_gradients(optimizer, [(gradient, w)])

    for number in itertools.count():
        if getattr(strategy, "local_step", number) >= steps:  # of spare replicas: of all of them
            break
        strategy.run(step)


def in_step(make):
    """Fit by a strategy whose replicas are in step."""

    def run(comm, x, y, descent, ridge):
        strategy = make(comm)
        w = strategy.variable(np.zeros(COLUMNS), name="w")
        optimizer = strategies.SGD(DESCENTS[descent][1])
        descend(strategy, optimizer, w, x, y, descent, ridge, comm.rank, comm.size)
        return w.value

    return run


def with_spares(comm, x, y, descent, ridge):
    """Fit by the first gradients of each step, all but one."""
    with strategies.SpareReplicaStrategy(max(1, comm.size - 1), comm=comm) as strategy:
        w = strategy.variable(np.zeros(COLUMNS), name="w")
        optimizer = strategies.SGD(DESCENTS[descent][1])
        descend(strategy, optimizer, w, x, y, descent, ridge, comm.rank, comm.size)
        return w.value.copy()


def with_server(synchronous: bool):
    """Fit by a parameter server, rank 0, and workers."""

    def run(comm, x, y, descent, ridge):
        if comm.size == 1:
            return None
        spec = strategies.cluster.ClusterSpec.from_ranks(comm.size, ps=1)
        with strategies.Cluster(spec, comm) as cluster, strategies.Server(cluster) as server:
            optimizer = strategies.SGD(DESCENTS[descent][1])
            strategy = strategies.ParameterServerStrategy(
                server, optimizer, synchronous=synchronous
            )
            w = strategy.variable(np.zeros(COLUMNS), name="w")
            if cluster.job == "ps":
                server.join()
                return np.zeros(COLUMNS)
            workers = cluster.workers
            descend(strategy, optimizer, w, x, y, descent, ridge, workers.rank, workers.size)
            strategy.leave()
            workers.barrier()
            strategy.pull()
            return w.value.copy()

    return run


def reporter(name: str) -> int:
    """Return the rank that has the weights in the end."""
    return 1 if "server" in name else 0


RUNS = {
    "mirrored": in_step(lambda comm: strategies.MirroredStrategy(comm=comm)),
    "multi-worker": in_step(strategies.MultiWorkerMirroredStrategy),
    "central storage": in_step(lambda comm: strategies.CentralStorageStrategy(comm=comm)),
    "spare replicas": with_spares,
    "server, in step": with_server(synchronous=True),
    "server": with_server(synchronous=False),
}

if __name__ == "__main__":
    main()
