"""A coordinator that schedules calls, and workers that make them."""

from contextlib import contextmanager

import numpy as np
import pytest

import strategies
from strategies.cluster.cluster import Cluster
from strategies.cluster.spec import ClusterSpec
from strategies.errors import CancelledError, FailedPreconditionError, OutOfRangeError
from strategies.parameter_server import ClusterCoordinator, ParameterServerStrategy
from strategies.rpc.server import Server

LIMIT = 20.0  # seconds after which a test that hangs fails
NAME = __name__


@contextmanager
def opened(comm, **options):
    spec = ClusterSpec.from_ranks(comm.size, ps=1)
    with Cluster(spec, comm) as cluster, Server(cluster) as server:
        yield ParameterServerStrategy(server, strategies.SGD(1.0), **options)


def coordinated(body):
    """Make a test of a function of the coordinator and the strategy."""

    def run(comm):
        with opened(comm) as strategy:
            strategy.variable(np.zeros(2), name="w")
            with ClusterCoordinator(strategy) as coordinator:
                if coordinator.coordinates:
                    body(coordinator, strategy)
                else:
                    with pytest.raises(FailedPreconditionError, match="only task 1 schedules"):
                        coordinator.schedule(step)
                    coordinator.serve(LIMIT)

    def test(world):
        if world.size > 2:
            world.run(run)

    test.__name__ = body.__name__
    return test


# What workers do.


def step(gradient=1.0, *, twice=False):
    strategy = strategies.get_strategy()
    w = strategy.variables["w"]
    strategy.pull()
    for _ in range(1 + twice):
        strategy.apply_gradients(strategy.optimizer, [(np.full(2, gradient), w)])
    return {"rank": strategy.cluster.comm.rank, "seen": [np.array(w.value), None]}


def fail(text):
    raise KeyError(text)


def numbers(context):
    return np.arange(context.input_pipeline_id * 100, context.input_pipeline_id * 100 + 3)


def broken_dataset(context):
    raise ZeroDivisionError("no data")


def take(batches):
    return int(next(batches))


def total(dataset, factor):
    return int(sum(dataset)) * factor


@coordinated
def test_calls_are_made_and_their_values_come_back(coordinator, strategy):
    results = [
        coordinator.schedule(step, args=(float(i),), kwargs={"twice": i % 2 == 0}) for i in range(6)
    ]
    coordinator.join(LIMIT)
    assert coordinator.done()
    values = coordinator.fetch({"all": results})["all"]
    workers = strategy.cluster.training_ranks[1:]
    assert {value["rank"] for value in values} <= set(workers)
    assert values[0]["seen"][0].shape == (2,)
    assert values[0]["seen"][1] is None
    strategy.pull()
    assert strategy.variables["w"].value.tolist() == [-(0 + 1 + 4 + 3 + 8 + 5)] * 2
    report = strategy.reports()[0]
    assert report.version == 9
    assert report.members == tuple(workers)


@coordinated
def test_an_error_is_raised_once_and_has_the_workers_traceback(coordinator, strategy):
    for use in (coordinator.join, coordinator.done, lambda: coordinator.schedule(step)):
        bad = coordinator.schedule(fail, args=("oh",))
        with pytest.raises(KeyError, match="oh") as caught:
            bad.fetch(LIMIT)
        assert "raise KeyError(text)" in str(caught.value.__cause__)
        with pytest.raises(KeyError, match="oh"):
            use()
        coordinator.join(LIMIT)
        assert coordinator.schedule(step).fetch(LIMIT)["rank"] > 1


@coordinated
def test_each_worker_has_its_own_batches(coordinator, strategy):
    dataset = coordinator.create_per_worker_dataset(numbers)
    batches = iter(dataset)
    with pytest.raises(ValueError, match="these batches are on the workers"):
        next(batches)
    workers = len(strategy.cluster.training_ranks) - 1
    results = [coordinator.schedule(take, args=(batches,)) for _ in range(3 * workers + 1)]
    with pytest.raises(OutOfRangeError):
        coordinator.join(LIMIT)
    seen, errors = [], []
    for result in results:
        try:
            seen.append(result.fetch(LIMIT))
        except (OutOfRangeError, CancelledError) as error:
            errors.append(str(error))
    assert "next: this worker has no more batches" in errors
    assert len(set(seen)) == len(seen) > 0
    for worker in range(workers):
        own = [n for n in seen if n // 100 == worker]
        assert own == list(range(worker * 100, worker * 100 + len(own)))
    sums = {
        coordinator.schedule(total, args=(dataset,), kwargs={"factor": 2}).fetch(LIMIT)
        for _ in range(4)
    }
    assert sums <= {2 * (3 * 100 * worker + 3) for worker in range(workers)}


@coordinated
def test_batches_that_cannot_be_made_are_an_error_of_their_users_alone(coordinator, strategy):
    broken = coordinator.create_per_worker_dataset(broken_dataset)
    assert coordinator.schedule(step).fetch(LIMIT)
    coordinator.join(LIMIT)
    with pytest.raises(ZeroDivisionError, match="no data"):
        coordinator.schedule(take, args=(iter(broken),)).fetch(LIMIT)
    with pytest.raises(ZeroDivisionError):
        coordinator.join(LIMIT)
    assert coordinator.schedule(step).fetch(LIMIT)


@coordinated
def test_wrong_use(coordinator, strategy):
    with pytest.raises(ValueError, match="schedule: another task cannot import this function"):
        coordinator.schedule(lambda: 1)
    value = coordinator.schedule(f"{NAME}:step")
    with pytest.raises(ValueError, match="an argument is the result of a call"):
        coordinator.schedule(step, args=([value],))
    with pytest.raises(FailedPreconditionError, match="serve: this is the coordinator"):
        coordinator.serve()
    coordinator.join(LIMIT)
    bad = coordinator.schedule(step, args=(object(),))
    with pytest.raises(TypeError):
        bad.fetch(LIMIT)
    with pytest.raises(TypeError):
        coordinator.join(LIMIT)
    coordinator.close()
    with pytest.raises(CancelledError, match="the coordinator is closed"):
        coordinator.schedule(step)


@pytest.mark.several
def test_a_coordinator_needs_a_worker_and_an_asynchronous_strategy(comm):
    with opened(comm, synchronous=comm.size > 2) as strategy:
        problem = "asynchronous strategy, got" if comm.size > 2 else "expected a worker beside"
        with pytest.raises(ValueError, match=problem):
            ClusterCoordinator(strategy)
