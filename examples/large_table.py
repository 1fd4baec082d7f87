"""A table that no worker has the memory for: rows on ps tasks, looked up and learnt by row.

    mpirun -np 4 python examples/large_table.py
    mpirun -np 4 python examples/large_table.py --rows 100000000        # 6.4 GB on 2 ps tasks
    mpirun -np 4 python examples/large_table.py --checkpoint run        # twice: the second goes on

Every ps draws its own rows, the same whatever the number of ps tasks. A worker looks up the rows of
a batch, and pushes gradients for these alone, until each row's sum is what it should be. Each task
says how much memory it has needed at most.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

import strategies
from strategies.variables import initializers, partition

WIDTH, BATCH = 16, 512
LEARNT = 2000  # rows that this lesson is about, from all over the table


def main() -> None:
    """Learn some rows, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="of 16 numbers of float32")
    parser.add_argument("--steps", type=int, default=60, help="of each worker")
    parser.add_argument(
        "--checkpoint", help="a directory; each ps writes its own rows there, and reads them again"
    )
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
        seconds = {"made": time.perf_counter() - began}
        checkpoints, before = None, 0
        if options.checkpoint:
            checkpoints = strategies.CheckpointManager(
                options.checkpoint, cluster.comm, sharded=True
            )
            before, seconds["read"] = restore(strategy, checkpoints)
        if cluster.job == "worker":
            losses = learn(strategy, table, cluster.workers.rank, options)
        cluster.comm.barrier()  # all have learnt
        if checkpoints is not None:
            began = time.perf_counter()
            checkpoints.save(strategy.state_slices(), step=before + options.steps)
            seconds["written"] = time.perf_counter() - began
            checkpoints.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if cluster.job == "worker" and cluster.workers.rank == 0:
            size = options.rows * WIDTH * 4 / 1e6
            told = ", ".join(f"{what} in {took:.1f} s" for what, took in seconds.items() if took)
            print(f"table of {size:.0f} MB: {told}")
            print(f"loss {losses[0]:.3f} at first, {losses[-1]:.5f} in the end")
        task = cluster.device_of(cluster.comm.rank)
        for line in cluster.comm.gather_object(f"{task}: {peak:.0f} MiB at most") or []:
            print(line)
        if cluster.job == "ps":
            server.join()


def restore(strategy, checkpoints) -> tuple[int, float]:
    """Let each ps go on from its rows of the newest checkpoint; returns its step, and the time."""
    began = time.perf_counter()
    found = checkpoints.restore_or_none(slices=strategy.state_boxes())
    if found is None:
        return 0, 0.0
    strategy.load_state_slices(found.tensors)
    strategy.cluster.comm.barrier()  # no worker asks for rows before
    return found.step, time.perf_counter() - began


def learn(strategy, table, worker: int, options) -> list[float]:
    """Bring the sums of some rows to 1; returns the loss of each step."""
    lesson = np.linspace(0, options.rows - 1, LEARNT, dtype=np.int64)
    random = np.random.default_rng(worker)
    losses = []
    for _ in range(options.steps):
        ids = random.choice(lesson, BATCH)
        rows = strategy.look_up(table, ids)
        errors = rows.sum(axis=1, keepdims=True) - np.float32(1)
        gradient = np.broadcast_to(errors, rows.shape) / WIDTH / 4
        pairs = [(strategies.Rows(ids, gradient), table)]
        strategy.apply_gradients(strategy.optimizer, pairs, examples=len(ids))
        losses.append(float((errors**2).mean()))
    return losses


if __name__ == "__main__":
    main()
