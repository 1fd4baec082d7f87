"""Clusters of every shape start, exchange something, and end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.settings import Settings
from strategies.cluster.cluster import Cluster
from strategies.cluster.server import Server
from strategies.cluster.spec import ClusterSpec
from strategies.input.queues import FIFOQueue
from strategies.input.shared import shared_queue

SHAPES = [
    {"ps": ps, "worker": workers, "chief": chief, "evaluator": (ps + workers) % 2}
    for ps, workers, chief in itertools.product((1, 2, 3), (1, 2, 3, 4), (0, 1))
]


def program(comm, shape):
    """Every task that trains sends its number through a queue on each ps to the evaluator."""
    counts = {job: n for job, n in shape.items() if n}
    with (
        Cluster(ClusterSpec.from_ranks(comm, **counts), comm) as cluster,
        Server(cluster) as server,
    ):

        def queue(ps):
            return shared_queue(
                FIFOQueue, 20, np.int64, [()],
                service=server.service, shared_name="numbers", task=f"/job:ps/task:{ps}",
            )  # fmt: skip

        if cluster.job == "ps":
            server.join(timeout=20)
            return cluster.device_of(comm.rank), queue(cluster.task_index).size()
        training = shape["worker"] + shape["chief"]
        if cluster.workers is not None:
            assert cluster.workers.allreduce(1, op=cc.SUM) == training
            for ps in range(shape["ps"]):
                queue(ps).enqueue(cluster.workers.rank)
            return cluster.device_of(comm.rank), cluster.is_chief
        assert not cluster.is_chief
        taken = [queue(ps).dequeue_many(training, timeout=20) for ps in range(shape["ps"])]
        return cluster.device_of(comm.rank), [sorted(numbers.tolist()) for numbers in taken]


def check(shape, found):
    """Compare what some tasks, or all, have returned with what their cluster is."""
    training = shape["worker"] + shape["chief"]
    chief = "/job:chief/task:0" if shape["chief"] else "/job:worker/task:0"
    for task, result in found:
        if task.startswith("/job:ps"):
            # `join` does not wait for the evaluator, which may have taken the numbers or not yet.
            assert result == training or (shape["evaluator"] and 0 <= result < training)
        elif task == "/job:evaluator/task:0":
            assert result == [list(range(training))] * shape["ps"]
        else:
            assert result == (task == chief)


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "-".join(f"{n}{job}" for job, n in shape.items() if n)
)
def test_a_cluster_starts_exchanges_and_ends(shape):
    settings = Settings(timeout=20, shared_memory=None)
    size = sum(shape.values())
    found = inprocess.run_ranks(size, lambda comm: program(comm, shape), settings=settings)
    assert len(dict(found)) == size
    check(shape, found)


def test_every_shape_of_this_many_ranks(world):
    for shape in SHAPES:
        if sum(shape.values()) == world.size:
            check(shape, world.run(lambda comm, shape=shape: program(comm, shape)))
