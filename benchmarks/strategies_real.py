"""Four strategies with 2 to 8 real workers that sleep, held against their simulation.

    for n in 3 5 7 9; do mpirun -np $n python benchmarks/strategies_real.py --json FILE; done

Rank 0 is a ps, the others are workers. For a gradient each sleeps, so that more ranks than cores
are fine, for the delays of `spare_replicas.py`: a log-normal time, and in every 20th step one
worker takes ten times as long. The same delays go into `collectives.simulation.training`. Compared
are steps per second (asynchronous: gradients), the share of its time for which a worker does not
sleep, and how stale gradients are. The array is short: what the lines take is not the question.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from spare_replicas import delays

import collectives as cc
import strategies
from collectives.simulation import training

# Seconds in which an array of this length passes the line that the ranks do not have.
ELEMENTS, LINE = 1000, 1e-6

# Steps in which code is loaded and ranks are connected.
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures, beside earlier ones")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--median", type=float, default=40.0, help="of a delay, ms")
    options = parser.parse_args()
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=1)
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        workers = spec.num_tasks("worker")
        spare = max(1, workers // 4)
        drawn = delays(options.steps, workers, options.median / 1e3, 0)
        for rows in (drawn[:WARM_UP], drawn):  # what the first steps load and connect is not asked
            measured = {
                "all-reduce": on_workers(cluster, rows, all_reduce),
                f"{spare} spare": on_workers(cluster, rows, lambda *how: spares(*how, spare)),
                "synchronous ps": served(cluster, server, rows, synchronous=True),
                "asynchronous ps": served(cluster, server, rows, synchronous=False),
            }
        simulated = {
            "all-reduce": training.all_reduce(drawn, [(1.0, 0.0)]),
            f"{spare} spare": training.spare_replicas(drawn, workers - spare, 0.0),
            "synchronous ps": training.servers(drawn, 1, LINE),
            "asynchronous ps": training.asynchronous(drawn, 1, LINE),
        }
        if cluster.comm.rank == 0:
            found = {
                way: {"measured": measured[way], "simulated": said(outcome)}
                for way, outcome in simulated.items()
            }
            for way, both in found.items():
                print(f"{workers} workers, {way}: {json.dumps(both)}", flush=True)
            if options.json:
                written = json.loads(options.json.read_text()) if options.json.exists() else {}
                written[str(workers)] = found
                options.json.write_text(json.dumps(written, indent=1) + "\n")


def said(outcome: training.TrainingResult) -> dict[str, float]:
    return {
        "per second": outcome.steps_per_second,
        "waiting": outcome.waiting,
        "stale": outcome.stale,
    }


def summed(cluster: Any, rate: float, waiting: float, *, alone: bool) -> dict[str, float]:
    """Return the figures of all workers; *collective* over all ranks.

    Args:
        cluster: of the ranks.
        rate: steps per second of this worker; 0 on a ps.
        waiting: the share of its time for which it did not sleep.
        alone: whether workers make steps of their own, so that rates add up.
    """
    number = cluster.comm.size - 1
    total = cluster.comm.allreduce(np.array([rate, waiting]), op=cc.SUM)
    return {
        "per second": float(total[0]) / (1 if alone else number),
        "waiting": float(total[1]) / number,
        "stale": 0.0,
    }


def on_workers(
    cluster: Any, drawn: np.ndarray, train: Callable[[Any, np.ndarray], tuple[float, float]]
) -> dict[str, float]:
    """Train without the ps; `train(workers, drawn)` returns seconds of it all, and slept."""
    rate = waiting = 0.0
    if cluster.job == "worker":
        cluster.workers.barrier()
        took, slept = train(cluster.workers, drawn)
        rate, waiting = len(drawn) / took, 1 - slept / took
    return summed(cluster, rate, waiting, alone=False)


def all_reduce(workers: Any, drawn: np.ndarray) -> tuple[float, float]:
    gradient = np.ones(ELEMENTS, np.float32)
    began, slept = time.perf_counter(), 0.0
    for delay in drawn[:, workers.rank]:
        slept += sleep(delay)
        workers.allreduce(gradient, op=cc.SUM, out=gradient)
    return time.perf_counter() - began, slept


def spares(workers: Any, drawn: np.ndarray, spare: int) -> tuple[float, float]:
    with strategies.SpareReplicaStrategy(workers.size - spare, comm=workers) as strategy:
        w = strategy.variable(np.zeros(ELEMENTS, np.float32), name="w")
        gradient, optimizer = np.ones(ELEMENTS, np.float32), strategies.SGD(0.1)
        workers.barrier()
        began, slept = time.perf_counter(), 0.0
        while strategy.local_step < len(drawn):
            slept += sleep(drawn[strategy.local_step, workers.rank])
            strategy.apply_gradients(optimizer, [(gradient, w)])
        return time.perf_counter() - began, slept


def served(cluster: Any, server: Any, drawn: np.ndarray, *, synchronous: bool) -> dict[str, float]:
    """Train through the ps."""
    strategy = strategies.ParameterServerStrategy(
        server,
        strategies.SGD(0.1),
        synchronous=synchronous,
        shared_name=f"synchronous={synchronous}, {len(drawn)} steps",
    )
    w = strategy.variable(np.zeros(ELEMENTS, np.float32), name="w")
    gradient = np.ones(ELEMENTS, np.float32)
    rate = waiting = 0.0
    cluster.comm.barrier()
    if cluster.job == "worker":
        strategy.pull()
        began, slept = time.perf_counter(), 0.0
        for delay in drawn[:, cluster.workers.rank]:
            slept += sleep(delay)
            strategy.apply_gradients(strategy.optimizer, [(gradient, w)])
        took = time.perf_counter() - began
        rate, waiting = len(drawn) / took, 1 - slept / took
    found = summed(cluster, rate, waiting, alone=not synchronous)
    stale = 0.0
    if strategy.is_chief:
        records = strategy.reports()[0].records.values()
        applied = sum(record.applied for record in records)
        stale = sum(record.total_staleness for record in records) / applied
    found["stale"] = float(cluster.comm.allreduce(stale, op=cc.SUM))
    return found


def sleep(seconds: float) -> float:
    """Sleep, and return for how long it was."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
