"""Fit a line and a ridge by batch, mini-batch and stochastic descent, under every strategy.

    mpirun -np 3 python examples/linear_regression.py

The step is the same under all strategies: a gradient of some rows, and `apply_gradients`. The
strategies differ in the ranks and devices whose gradients they average; the default strategy and
OneDeviceStrategy average nothing. If JAX is installed, TPUStrategy uses two host devices per rank,
and float32. For each strategy and descent the program prints the distance of the weights from the
direct solution, for plain and for ridge regression, and the time of both.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import time

import numpy as np

import collectives as cc
import strategies

ROWS, COLUMNS, RIDGE = 1200, 8, 0.1
# Rows of one gradient (None: all that a worker has), learning rate, steps.
DESCENTS = {"batch": (None, 0.5, 40), "mini-batch": (32, 0.2, 80), "stochastic": (1, 0.04, 200)}


def main() -> None:
    """Fit by all of them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without", nargs="*", choices=RUNS, default=[], help="strategies")
    options = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    comm = cc.init()
    x, y = make_rows()
    if comm.rank == 0:
        print(f"{'':>16} {'':>12} {'plain':>10} {'ridge':>10} {'seconds':>8}")
    for name, run in RUNS.items():
        if name in options.without:
            continue
        run(comm, x, y, "batch", 0.0)  # what is compiled at first is not in the times
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
    """Make steps with the rows that are this worker's, each of its replicas with some of them."""
    size, _, steps = DESCENTS[descent]
    count = len(strategy.devices)
    shares = [slice(part * count + i, None, of * count) for i in range(count)]
    random = np.random.default_rng(part)

    def step(x, y) -> None:
        error = x @ w.value - y
        gradient = x.T @ error / len(error) + ridge * w.value
        strategy.apply_gradients(optimizer, [(gradient, w)])

    for number in itertools.count():
        if getattr(strategy, "local_step", number) >= steps:  # of spare replicas: of all of them
            break
        rows = [np.arange(len(x))[share] for share in shares]
        if size is not None:
            rows = [random.choice(own, size) for own in rows]
        batch = [strategies.replicas.PerReplica(tuple(a[own] for own in rows)) for a in (x, y)]
        strategy.run(step, args=batch)


def alone(make):
    """Fit on rank 0, by a strategy of one replica."""

    def run(comm, x, y, descent, ridge):
        if comm.rank:
            return None
        strategy = make()
        w = strategy.variable(np.zeros(COLUMNS))
        optimizer = strategies.SGD(DESCENTS[descent][1])
        descend(strategy, optimizer, w, x, y, descent, ridge, 0, 1)
        return w.value

    return run


def in_one_program(comm, x, y, descent, ridge):
    """Fit by one program for all devices of JAX on each rank."""
    strategy = strategies.TPUStrategy(devices=devices_of_jax(), comm=comm)
    w = strategy.variable(np.zeros(COLUMNS, np.float32))
    optimizer = strategies.SGD(DESCENTS[descent][1])
    x, y = (a.astype(np.float32) for a in (x, y))
    descend(strategy, optimizer, w, x, y, descent, ridge, comm.rank, comm.size)
    return np.asarray(w.value)


@functools.cache
def devices_of_jax() -> tuple[str, ...]:
    """Ask once for them: where there is no TPU the log says what takes its place."""
    return tuple(strategies.cluster.TPUClusterResolver().devices())


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
    "default": alone(strategies.get_strategy),
    "one device": alone(lambda: strategies.OneDeviceStrategy("/cpu:0")),
    "mirrored": in_step(lambda comm: strategies.MirroredStrategy(comm=comm)),
    "multi-worker": in_step(strategies.MultiWorkerMirroredStrategy),
    "central storage": in_step(lambda comm: strategies.CentralStorageStrategy(comm=comm)),
    "spare replicas": with_spares,
    "server, in step": with_server(synchronous=True),
    "server": with_server(synchronous=False),
}
if importlib.util.find_spec("jax"):
    RUNS["TPU"] = in_one_program

if __name__ == "__main__":
    main()
