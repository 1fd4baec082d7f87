"""Spare replicas: the numbers of every step, whose gradients are used, and how training ends."""

import threading
from collections import Counter

import numpy as np
import pytest
from calls import LIMIT, in_thread, until

import collectives as cc
from served import on_workers
from strategies.accumulators.accumulators import ConditionalAccumulator, shared_accumulator
from strategies.accumulators.gradient_sum import GradientSpec
from strategies.accumulators.remote import open_accumulation
from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError, OpError, OutOfRangeError, UnavailableError
from strategies.optimizers import SGD, Momentum
from strategies.rpc.service import Service
from strategies.spare_replica import SpareReplicaStrategy
from strategies.spare_replica.token_queue import open_rounds


class Golden:
    """Two dense variables and a sparse one, with gradients that say whose they are."""

    def __init__(self, strategy):
        self.strategy = strategy
        worker = strategy.first_replica_id
        self.v0 = strategy.variable(np.float32(0), name="v0")
        self.v1 = strategy.variable(np.float32(1), name="v1")
        self.table = strategy.variable(np.float32([[3], [4]]), name="table")
        self.optimizer = SGD(2.0)
        self.gradients = [
            np.float32(0.1 + 0.2 * worker),
            np.float32(0.9 + 0.2 * worker),
            Rows([1], np.float32([[0.1 + 0.2 * worker]])),
        ]

    def step(self):
        pairs = zip(self.gradients, [self.v0, self.v1, self.table], strict=True)
        self.strategy.apply_gradients(self.optimizer, pairs)

    def check(self, step, v0, v1, row):
        assert self.strategy.local_step == step
        np.testing.assert_allclose(self.v0.value, v0, rtol=1e-6)
        np.testing.assert_allclose(self.v1.value, v1, rtol=1e-6)
        np.testing.assert_allclose(self.table.value, [[3], [row]], rtol=1e-6)


@pytest.mark.parametrize("tasks", [(0,), (1,), (0, 1)])
@on_workers(2)
def test_two_workers_none_spare(strategy, comm, tasks):
    golden = Golden(strategy)
    golden.step()  # the first round counts
    golden.check(1, -0.4, -1.0, 4 - 0.4)
    golden.step()
    golden.check(2, -0.8, -3.0, 4 - 0.8)
    comm.barrier()
    report = strategy.report()
    assert report.global_step == 2
    assert report.used == {0: 2, 1: 2}
    assert report.dropped == {0: 0, 1: 0}
    assert report.lost == {}


@pytest.mark.parametrize("tasks", [(0,), (1, 2)])
@on_workers(3, replicas_to_aggregate=2)
def test_three_workers_one_spare(strategy, comm, tasks):
    golden = Golden(strategy)
    worker = strategy.first_replica_id
    if worker != 1:
        golden.step()
        golden.check(1, -0.6, -1.2, 4 - 0.6)
    comm.barrier()
    if worker == 1:
        golden.step()  # late: dropped, and the newest values at once
        golden.check(1, -0.6, -1.2, 4 - 0.6)
    comm.barrier()
    assert strategy.report().dropped == {0: 0, 1: 1, 2: 0}
    comm.barrier()
    blocked = in_thread(golden.step) if worker == 0 else None
    until(lambda: strategy.report().used[0] == 2)
    comm.barrier()
    assert strategy.report().global_step == 1
    assert blocked is None or not blocked.done()
    comm.barrier()
    if worker == 1:
        golden.step()
    if blocked is not None:
        blocked.result(LIMIT)
    if worker != 2:
        golden.check(2, -1.0, -3.2, 4 - 1.0)
    comm.barrier()
    assert strategy.report().used == {0: 2, 1: 1, 2: 1}
    comm.barrier()


@on_workers(2, replicas_to_aggregate=5)
def test_fewer_workers_than_gradients(strategy, comm):
    """Two workers deliver five gradients for each step, however they share them."""
    steps, aggregate = 3, 5
    v = strategy.variable(np.zeros(1), name="v")
    optimizer = SGD(1.0)
    delivered = 0
    while strategy.local_step < steps:
        strategy.apply_gradients(optimizer, [(np.ones(1), v)])
        delivered += 1
    total = comm.allreduce(np.array([delivered]), op=cc.SUM)
    report = strategy.report()
    assert sum(report.used.values()) == steps * aggregate == total[0]
    assert sum(report.dropped.values()) == 0
    assert v.value == -steps
    comm.barrier()


class CountingSteps:
    """An optimizer that counts; the mean says whether all gradients came from the newest values."""

    def apply_gradients(self, pairs):
        for mean, variable in pairs:
            np.testing.assert_array_equal(mean, variable.value)
            variable.value[...] += 1


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_step_has_as_many_gradients_as_it_needs_all_of_the_newest_values(comm, spare):
    if comm.size <= spare:
        pytest.skip("needs a worker that is not spare")
    steps, aggregate = 20, comm.size - spare
    with SpareReplicaStrategy(aggregate, comm=comm) as strategy:
        w = strategy.variable(np.zeros(2), name="w")
        delivered, counts = Counter(), CountingSteps()
        while strategy.local_step < steps:
            assert w.value.tolist() == [strategy.local_step] * 2
            delivered[strategy.local_step] += 1
            strategy.apply_gradients(counts, [(w.value.copy(), w)])
        assert set(delivered.values()) == {1}  # once for each step
        comm.barrier()
        report = strategy.report()
        assert report.global_step == steps
        assert sum(report.used.values()) == steps * aggregate
        total = comm.allreduce(np.array([sum(delivered.values())]), op=cc.SUM)
        assert sum(report.used.values()) + sum(report.dropped.values()) == total[0]
        comm.barrier()


@pytest.mark.several
def test_gradients_that_come_before_the_chief_are_the_first_ones(comm):
    """The first step has as many as it needs, and not all that are in when the chief comes."""
    aggregate = max(comm.size - 2, 1)
    with SpareReplicaStrategy(aggregate, comm=comm) as strategy:
        w = strategy.variable(np.zeros(2), name="w")
        if comm.rank == 0:
            part = GradientSpec("variable 'w', position 0", "float64", (2,))
            accumulation = open_accumulation(
                strategy.service, [part], mean=True, name="spare replicas: gradients",
                most=aggregate, task=0,
            )  # fmt: skip
            until(lambda: sum(map(sum, accumulation.state()[2].values())) == comm.size - 1)
        strategy.apply_gradients(SGD(1.0), [(np.ones(2), w)])
        assert w.value.tolist() == [-1, -1]
        comm.barrier()
        report = strategy.report()
        assert (report.used[0], report.dropped[0]) == (0, 1)
        assert sum(report.used.values()) == aggregate
        assert sum(report.dropped.values()) == comm.size - aggregate
        comm.barrier()


def test_a_first_step_that_is_not_0(comm):
    with SpareReplicaStrategy(comm=comm, global_step=7) as strategy:
        w = strategy.variable([1.0], name="w")
        strategy.apply_gradients(SGD(1.0), [(np.ones(1), w)])
        assert (strategy.local_step, w.value.tolist()) == (8, [0])
        assert strategy.report().global_step == 8


def test_the_surface_of_a_strategy(comm):
    with SpareReplicaStrategy(comm=comm) as strategy, strategy.scope():
        w = strategy.variable(lambda: np.full(2, 5.0 + comm.rank), name="w")
        assert w.value.tolist() == [5, 5]  # the chief's
        optimizer = Momentum(0.5, 0.9)
        batch = np.arange(3 * comm.size, dtype=np.float64)

        def step(rows):
            strategy.apply_gradients(optimizer, [(np.full(2, rows.mean()), w)])
            return len(rows)

        for rows in strategy.distribute_dataset([batch]):
            assert strategy.run(step, args=(rows,)) == 3
        np.testing.assert_allclose(w.value, 5 - 0.5 * batch.mean())
        assert strategy.is_chief == (comm.rank == 0)
        assert strategy.num_replicas_in_sync == strategy.total_num_replicas == comm.size
        seen = []

        def dataset(context):
            seen.append(context)
            return [np.ones(1)] * comm.rank  # each has another number of batches

        taken = list(strategy.distribute_datasets_from_function(dataset))
        assert len(taken) == comm.rank
        (context,) = seen
        assert (context.num_input_pipelines, context.input_pipeline_id) == (comm.size, comm.rank)
        with pytest.raises(ValueError, match="expected policy 'data', got 'off'"):
            strategy.distribute_dataset([batch], policy="off")


def test_gradients_that_are_none_count_as_zero(comm):
    with SpareReplicaStrategy(comm=comm) as strategy:
        some, none = (strategy.variable(np.zeros(1), name=name) for name in ("some", "none"))
        mine = np.ones(1) if comm.rank == 0 else None
        strategy.apply_gradients(SGD(1.0), [(mine, some), (None, none)])
        np.testing.assert_allclose(some.value, -1 / comm.size)
        assert none.value == 0


@on_workers(3, tasks=(0, 1))
def test_all_gradients_of_a_step_travel_in_one_message_per_task(strategy, comm):
    variables = [strategy.variable(np.zeros(n), name=f"v{n}") for n in range(1, 101)]
    service, asked, sizes = strategy.service, Counter(), Counter()
    start = service.start

    def counted(place, operation, on_answer, arguments=None, values=()):
        asked[place.task, operation] += 1
        sizes[place.task, operation] += sum(np.size(value) for value in values)
        return start(place, operation, on_answer, arguments, values)

    pairs = [(np.ones(v.shape), v) for v in variables]
    optimizer = SGD(1.0)
    strategy.apply_gradients(optimizer, pairs)
    service.start = counted
    strategy.apply_gradients(optimizer, pairs)
    service.start = start
    own = Counter({(task, "apply"): 1 for task in (0, 1) if task != comm.rank})
    if comm.rank:
        own[0, "turn"] = 1
    else:
        asked.pop((1, "take"), None)  # of the chief's thread
    assert asked == own
    assert all(np.all(v.value == -2) for v in variables)
    for to in own:
        assert sizes[to] == (2525 if to[1] == "apply" else 0)  # both tasks average as many
    comm.barrier()


def test_an_update_that_fails_is_an_error_on_all_workers(comm):
    error = None
    try:
        with SpareReplicaStrategy(comm=comm) as strategy:
            w = strategy.variable(np.zeros(1), name="w")
            optimizer = SGD(lambda step: -1.0 if step else 1.0)
            strategy.apply_gradients(optimizer, [(np.ones(1), w)])
            assert w.value == -1
            try:
                strategy.apply_gradients(optimizer, [(np.ones(1), w)])
            except OpError as caught:
                error = caught
    except OpError as caught:
        error = caught
    assert type(error) is InvalidArgumentError
    assert "bad learning rate" in str(error)


def test_a_worker_that_fails_is_one_spare_less(comm):
    failed = None
    try:
        with SpareReplicaStrategy(comm.size - 1 or 1, comm=comm) as strategy:
            w = strategy.variable(np.zeros(1), name="w")
            optimizer = SGD(1.0)
            strategy.apply_gradients(optimizer, [(np.ones(1), w)])
            if comm.size > 1 and comm.rank == comm.size - 1:
                raise KeyError("bad data")
            while strategy.local_step < 5:
                strategy.apply_gradients(optimizer, [(np.ones(1), w)])
            assert w.value == -5
            if comm.size > 1:
                until(lambda: strategy.report().lost)
                lost = strategy.report().lost
                assert list(lost) == [comm.size - 1]
                assert lost[comm.size - 1] == "KeyError: 'bad data'"
    except KeyError as error:
        failed = error
    assert (failed is None) == (comm.size == 1 or comm.rank != comm.size - 1)


def test_too_few_workers_that_have_not_failed_are_an_error_with_the_reason(comm):
    error = None
    try:
        with SpareReplicaStrategy(comm=comm) as strategy:
            w = strategy.variable(np.zeros(1), name="w")
            optimizer = SGD(1.0)
            strategy.apply_gradients(optimizer, [(np.ones(1), w)])
            if comm.rank == comm.size - 1:
                raise KeyError("bad data")
            strategy.apply_gradients(optimizer, [(np.ones(1), w)])
    except (KeyError, OpError) as caught:
        error = caught
    if comm.rank == comm.size - 1:
        assert type(error) is KeyError
    else:
        assert type(error) is UnavailableError
        assert f"worker {comm.size - 1}: KeyError: 'bad data'" in str(error)


@on_workers(2)
def test_a_worker_that_is_lost_during_an_update_is_the_end_after_it(strategy, comm):
    rounds = open_rounds(strategy.service, aggregate=2, total=2, step=0, name="spare replicas")
    updates = []

    class Losing:
        def apply_gradients(self, pairs):
            updates.append(pairs)
            assert len(updates) == 1
            until(lambda: not rounds.active_workers())  # all have delivered, and wait
            rounds.lose(1, "of a test")

    w = strategy.variable(np.zeros(1), name="w")
    with pytest.raises(UnavailableError, match="worker 1: of a test"):
        strategy.apply_gradients(Losing(), [(np.ones(1), w)])
    strategy.close()
    assert len(updates) == (comm.rank == 0)


@on_workers(2)
def test_workers_that_have_left_in_order_are_the_end_of_training(strategy, comm):
    w = strategy.variable(np.zeros(1), name="w")
    optimizer, ended = SGD(1.0), None
    while comm.rank == 0 or strategy.local_step < 2:
        try:
            strategy.apply_gradients(optimizer, [(np.ones(1), w)])
        except OutOfRangeError as error:
            ended = error
            break
    assert w.value == -2
    if comm.rank == 0:
        assert "too few workers are left, expected at least 2, got 1 of 2" in str(ended)


@on_workers(3, replicas_to_aggregate=2)
def test_a_chief_that_has_no_more_data_still_makes_steps(strategy, comm):
    w = strategy.variable(np.zeros(1), name="w")
    optimizer = SGD(1.0)
    while strategy.local_step < (20 if comm.rank else 1):
        strategy.apply_gradients(optimizer, [(np.ones(1), w)])
    assert w.value == (-strategy.local_step)


@on_workers(3, replicas_to_aggregate=2)
def test_a_chief_that_leaves_before_it_has_begun_is_an_error_for_the_others(strategy, comm):
    w = strategy.variable(np.zeros(1), name="w")
    if comm.rank:
        with pytest.raises(UnavailableError, match="the chief has left without a gradient"):
            strategy.apply_gradients(SGD(1.0), [(np.ones(1), w)])


def test_wrong_use_is_an_error_on_all_ranks(comm):
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="replicas_to_aggregate, expected an integer >= 1"):
            SpareReplicaStrategy(wrong if comm.rank == 0 else 1, comm=comm)
    for tasks in ((), (0, 0), (comm.size,)):
        with pytest.raises(ValueError, match="bad tasks"):
            SpareReplicaStrategy(comm=comm, tasks=tasks)
    with pytest.raises(ValueError, match="global_step, expected an integer >= 0"):
        SpareReplicaStrategy(comm=comm, global_step=-1)
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match="replicas_to_aggregate=1.* on rank 0"):
            SpareReplicaStrategy(1 if comm.rank == 0 else 2, comm=comm)
    with SpareReplicaStrategy(comm=comm) as strategy:
        w, b = (strategy.variable(np.zeros(2), name=name) for name in "wb")
        sgd = SGD(1.0)
        for pairs, message in [
            ([], "at least one"),
            ([(np.ones(3), w)], "gradient does not fit"),
            ([(np.ones(2, np.float32), w)], "gradient does not fit"),
            ([(Rows([2], np.ones(1)), w)], "index is out of range"),
        ]:
            with pytest.raises(ValueError, match=message):
                strategy.apply_gradients(sgd, pairs)
        with pytest.raises(ValueError, match="bad examples, expected >= 0, got -1"):
            strategy.apply_gradients(sgd, [(np.ones(2), w)], examples=-1)
        strategy.apply_gradients(sgd, [(np.ones(2), w), (None, b)])  # works all the same
        with pytest.raises(ValueError, match="the same variables in all calls"):
            strategy.apply_gradients(sgd, [(np.ones(2), w)])
        with pytest.raises(ValueError, match="expected the optimizer of the first call"):
            strategy.apply_gradients(SGD(1.0), [(np.ones(2), w), (None, b)])
        assert w.value.tolist() == [-1, -1]


@pytest.mark.parametrize("tasks", [(0,), (0, 1)])
@on_workers(2)
def test_a_step_is_the_mean_over_the_rows_of_its_gradients(strategy, comm, tasks):
    w = strategy.variable(np.zeros(2), name="w")
    table = strategy.variable(np.zeros((2, 1)), name="table")
    half = strategy.variable(np.zeros(2, np.float16), name="half")
    sgd = SGD(1.0)
    for rows in ([1, 3], [0, 2], [0, 0]):  # of each worker; a mean over no rows may be NaN
        own = rows[comm.rank]
        gradient = np.full(2, comm.rank + 1.0 if own else np.nan)
        pairs = [
            (gradient, w),
            (Rows([comm.rank], gradient[:1, None]), table),
            (gradient.astype(np.float16), half),
        ]
        strategy.apply_gradients(sgd, pairs, examples=own)
    first, second = (1 * 1 + 3 * 2) / 4, 2  # of 4 rows, of 2
    np.testing.assert_allclose(w.value, -first - second)
    # Each row over the gradients that had it.
    np.testing.assert_allclose(table.value, [[-1], [-2 - 2]])
    np.testing.assert_allclose(half.value, -first - second)
    comm.barrier()
    assert strategy.report().used == {0: 3, 1: 3}
    comm.barrier()


def test_only_some_workers_say_how_many_rows(comm):
    if comm.size == 1:
        pytest.skip("needs two workers")
    with SpareReplicaStrategy(comm=comm) as strategy:
        w = strategy.variable(np.zeros(2), name="w")
        sgd = SGD(1.0)

        def deliver(examples):
            strategy.apply_gradients(sgd, [(np.ones(2), w)], examples=examples)

        if comm.rank == 0:
            blocked = in_thread(deliver, 2)
            until(lambda: strategy.report().used[0] == 1)
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(InvalidArgumentError, match="only some gradients of a step"):
                deliver(None)
        comm.barrier()
        if comm.rank:
            deliver(1)
        else:
            blocked.result(LIMIT)
        assert w.value.tolist() == [-1, -1]
        comm.barrier()


def test_nothing_is_left_behind(comm):
    before = threading.active_count()
    for _ in range(2):
        with SpareReplicaStrategy(comm=comm) as strategy:
            w = strategy.variable(np.zeros(1), name="w")
            strategy.apply_gradients(SGD(1.0), [(np.ones(1), w)])
        strategy.close()
    comm.barrier()
    until(lambda: threading.active_count() <= before)


def test_an_accumulator_that_all_ranks_share(comm):
    with Service(comm) as service:
        losses = shared_accumulator(
            ConditionalAccumulator, "float64", (2,), service=service, shared_name="losses",
            task=comm.size - 1,
        )  # fmt: skip
        assert losses.apply_grad([comm.rank, 1.0])
        comm.barrier()
        assert losses.num_accumulated() == comm.size
        comm.barrier()
        if comm.rank == 0:
            assert losses.take_grad(comm.size).tolist() == [(comm.size - 1) / 2, 1]
        comm.barrier()
        assert losses.global_step() == 1
        assert not losses.apply_grad([1.0, 1.0])
