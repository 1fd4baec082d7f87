"""Train a table larger than a worker's memory: its rows are on ps tasks, and looked up by row.

    mpirun -np 4 python examples/large_table.py
    mpirun -np 4 python examples/large_table.py --rows 100000000        # 6.4 GB on 2 ps tasks
    mpirun -np 4 python examples/large_table.py --checkpoint run        # twice: the second resumes

Every ps creates its own rows, which are the same for any number of ps tasks. A worker looks up the
rows of a batch and pushes gradients of these rows only, until the sum of each row is 1. Each task
prints its peak memory.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

import strategies
from strategies.variables import initializers, partition

WIDTH, BATCH = 16, 512
TRAINED = 2000  # rows that are trained, spread over the table


def main() -> None:
    """Train some rows, and print times, losses and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of 16 float32 numbers")
    parser.add_argument("--steps", type=int, default=60, help="steps of each worker")
    parser.add_argument("--checkpoint", help="directory where each ps saves and restores its rows")
    options = parser.parse_args()
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=2)
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        strategy = strategies.ParameterServerStrategy(
            server, strategies.SGD(2.0), partitioner=partition.fixed_shards(2)
        )
        began = time.perf_counter()
        table = strategy.variable(
            initializers.normal(0.1, seed=1),
            shape=(options.rows, WIDTH),
            dtype="float32",
            name="table",
            resident=False,
        )
        seconds = {"created": time.perf_counter() - began}
        checkpoints, before = None, 0
        if options.checkpoint:
            checkpoints = strategies.CheckpointManager(
                options.checkpoint, cluster.comm, sharded=True
            )
            before, seconds["read"] = restore(strategy, checkpoints)
        if cluster.job == "worker":
            losses = learn(strategy, table, cluster.workers.rank, options)
        cluster.comm.barrier()  # all workers are done
        if checkpoints is not None:
            began = time.perf_counter()
            checkpoints.save(strategy.state_slices(), step=before + options.steps)
            seconds["written"] = time.perf_counter() - began
            checkpoints.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if cluster.job == "worker" and cluster.workers.rank == 0:
            size = options.rows * WIDTH * 4 / 1e6
            times = ", ".join(f"{what} in {took:.1f} s" for what, took in seconds.items() if took)
            print(f"table of {size:.0f} MB: {times}")
            print(f"loss {losses[0]:.3f} at first, {losses[-1]:.5f} in the end")
        task = cluster.device_of(cluster.comm.rank)
        for line in cluster.comm.gather_object(f"{task}: {peak:.0f} MiB at most") or []:
            print(line)
        if cluster.job == "ps":
            server.join()


def restore(strategy, checkpoints) -> tuple[int, float]:
    """Restore each ps's rows of the newest checkpoint; returns its step and the seconds."""
    began = time.perf_counter()
    found = checkpoints.restore_or_none(slices=strategy.state_boxes())
    if found is None:
        return 0, 0.0
    strategy.load_state_slices(found.tensors)
    strategy.cluster.comm.barrier()  # no worker reads rows before
    return found.step, time.perf_counter() - began


def learn(strategy, table, worker: int, options) -> list[float]:
    """Train the sums of some rows to be 1; returns the loss of each step."""
    trained = np.linspace(0, options.rows - 1, TRAINED, dtype=np.int64)
    random = np.random.default_rng(worker)
    losses = []
    for step in range(options.steps):
        ids = random.choice(trained, BATCH)
        rows = strategy.look_up(table, ids)
        if step == 0:
            strategy.cluster.workers.barrier()  # the first loss is from before all updates
        errors = rows.sum(axis=1, keepdims=True) - np.float32(1)
        gradient = np.broadcast_to(errors, rows.shape) / WIDTH / 4
        pairs = [(strategies.Rows(ids, gradient), table)]
        strategy.apply_gradients(strategy.optimizer, pairs, examples=len(ids))
        losses.append(float((errors**2).mean()))
    return losses


if __name__ == "__main__":
    main()
