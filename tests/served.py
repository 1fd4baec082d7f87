"""Worlds with ps tasks and workers, for tests of what they do together."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import strategies
from strategies.cluster.cluster import Cluster
from strategies.cluster.spec import ClusterSpec
from strategies.parameter_server import ParameterServerStrategy
from strategies.rpc.server import Server
from tapped import Tapped

LIMIT = 20.0  # seconds after which a test that hangs fails


@contextmanager
def opened(comm, ps=None, chief_timeout=60.0):
    """A server, with two ps where there are ranks for them; see `cluster_test`."""
    count = ps or max(1, min(2, comm.size - 2))
    spec = ClusterSpec.from_ranks(comm.size, ps=count)
    with Cluster(spec, Tapped(comm)) as cluster:
        timeout = chief_timeout if cluster.is_chief else 60.0
        with Server(cluster, timeout=timeout) as server:
            yield server


def cluster_test(body, *, ps=None, chief_timeout=60.0, **options):
    """Run `body(strategy, server)` on all tasks of a world that has a ps and a worker.

    Args:
        body: the test.
        ps: how many ps tasks; as many as `opened` makes if None.
        chief_timeout: seconds of silence after which the chief gives up another task.
        **options: of the strategy; `optimizer` is a function that makes one.
    """

    def test(world):
        if world.size == 1:
            world.run(alone)
            return
        world.run(lambda comm: run(comm))

    def run(comm):
        with opened(comm, ps, chief_timeout) as server:
            made = {name: f() if name == "optimizer" else f for name, f in options.items()}
            strategy = ParameterServerStrategy(
                server, made.pop("optimizer", strategies.SGD(1.0)), **made
            )
            body(strategy, server)

    return test


def alone(comm):
    with (
        Cluster({"worker": ["rank:0"]}, comm) as cluster,
        Server(cluster) as server,
        pytest.raises(ValueError, match="expected at least one ps and one worker, got 0 and 1"),
    ):
        ParameterServerStrategy(server, strategies.SGD(1.0))


def in_turn(server, action):
    """Let one worker after the other do something, while the ps tasks serve."""
    workers = server.cluster.workers
    if workers is None:
        return
    for turn in range(workers.size):
        workers.barrier()
        if turn == workers.rank:
            action()
    workers.barrier()


def training(server):
    return server.cluster.workers is not None


def scenario(**options):
    """Make a test of a function of a strategy and its server."""

    def decorate(body):
        test = cluster_test(body, **options)
        test.__name__ = body.__name__
        return test

    return decorate
