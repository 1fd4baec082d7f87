"""Clusters of every shape start, train, evaluate, and end."""

import itertools

import numpy as np
import pytest

import collectives as cc
import inprocess
import strategies
from collectives.core.settings import Settings
from strategies.cluster.cluster import Cluster
from strategies.cluster.spec import ClusterSpec
from strategies.parameter_server import ParameterServerStrategy
from strategies.queues.queue_types import FIFOQueue
from strategies.queues.remote import shared_queue
from strategies.rpc.server import Server

SHAPES = [
    {"ps": ps, "worker": workers, "chief": chief, "evaluator": (ps + workers) % 2}
    for ps, workers, chief in itertools.product((1, 2, 3), (1, 2, 3, 4), (0, 1))
]


TARGET = np.linspace(-1, 1, 7, dtype=np.float32)
STEPS = 60


def program(comm, shape):
    """Workers train; then each sends its number through a queue to the evaluator, which looks."""
    counts = {job: n for job, n in shape.items() if n}
    training = shape["worker"] + shape["chief"]
    with (
        Cluster(ClusterSpec.from_ranks(comm, **counts), comm) as cluster,
        Server(cluster) as server,
    ):
        strategy = ParameterServerStrategy(
            server,
            strategies.SGD(0.5 / training),
            synchronous=bool((shape["ps"] + shape["chief"]) % 2),
            partitioner=lambda shape_, dtype: [shape["ps"]],  # so that each ps has to do
        )
        w = strategy.variable(np.zeros_like(TARGET), name="w")
        numbers = shared_queue(
            FIFOQueue, 20, np.int64, [()],
            service=server.service, shared_name="numbers", task="/job:ps/task:0",
        )  # fmt: skip
        if cluster.job == "ps":
            server.join(timeout=20)
        elif cluster.workers is not None:
            assert cluster.workers.allreduce(1, op=cc.SUM) == training
            for _ in range(STEPS):
                strategy.apply_gradients(strategy.optimizer, [(w.value - TARGET, w)])
            numbers.enqueue(cluster.workers.rank)
            cluster.workers.barrier()
            strategy.pull()
        else:
            assert sorted(numbers.dequeue_many(training, timeout=20)) == list(range(training))
            strategy.pull()
        return cluster.device_of(comm.rank), strategy.is_chief, w.value


def check(shape, found):
    """Compare what some tasks, or all, have returned with what their cluster is."""
    chief = "/job:chief/task:0" if shape["chief"] else "/job:worker/task:0"
    for task, is_chief, value in found:
        assert is_chief == (task == chief)
        if task.startswith("/job:ps"):
            continue
        # Each step brings w nearer by a tenth of its distance or more.
        np.testing.assert_allclose(value, TARGET, atol=0.9**STEPS)


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "-".join(f"{n}{job}" for job, n in shape.items() if n)
)
def test_a_cluster_starts_trains_and_ends(shape):
    settings = Settings(timeout=20, shared_memory=None)
    size = sum(shape.values())
    found = inprocess.run_ranks(size, lambda comm: program(comm, shape), settings=settings)
    assert len({task for task, *_ in found}) == size
    check(shape, found)


def test_every_shape_of_this_many_ranks(world):
    for shape in SHAPES:
        if sum(shape.values()) == world.size:
            check(shape, world.run(lambda comm, shape=shape: program(comm, shape)))
