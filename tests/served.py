"""Worlds with ps tasks and workers, for tests of what they do together."""

import inspect
from contextlib import contextmanager, suppress
from functools import partial

import pytest

import strategies
from strategies.cluster.cluster import Cluster
from strategies.cluster.spec import ClusterSpec
from strategies.parameter_server import ParameterServerStrategy
from strategies.rpc.server import Server
from strategies.spare_replica import SpareReplicaStrategy
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
        with opened(comm, ps, chief_timeout) as server, suppress(ServesOthers):
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


class ServesOthers(Exception):
    """Raised where a test goes on with the workers alone."""


def only_workers(server):
    """The communicator of the workers; on a ps task the body of the test ends here."""
    if not training(server):
        raise ServesOthers
    return server.cluster.workers


def _decorator(strategy, run):
    of_strategy = inspect.signature(strategy).parameters

    def decorate(body):
        def test(world, **given):
            own = {name: value for name, value in given.items() if name in of_strategy}
            run(world, partial(body, **given), own)

        first, _, *further = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([first.replace(name="world"), *further])
        test.__name__ = body.__name__
        return test

    return decorate


def scenario(**options):
    """Make a test of a function of a strategy, its server and the parameters of the test.

    A parameter with the name of an option of the strategy is this option.
    """

    def run(world, body, own):
        cluster_test(body, **options, **own)(world)

    return _decorator(ParameterServerStrategy, run)


def on_workers(count, **options):
    """Make a test of a function of a strategy with spare replicas, its ranks and parameters.

    The ranks are so many of the world; a smaller world skips the test.
    """

    def run(world, body, own):
        if world.size < count:
            pytest.skip(f"needs {count} ranks")
        world.run(lambda comm: on_some(comm, body, own))

    def on_some(comm, body, own):
        group = comm.group(list(range(count)))
        if group is not None:
            with SpareReplicaStrategy(comm=group, **options, **own) as strategy:
                body(strategy, group)

    return _decorator(SpareReplicaStrategy, run)
