"""Variables on ps tasks: where they are, what pushes do to them, and who waits for whom."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from calls import in_thread, together, until

import strategies
from served import LIMIT, in_turn, only_workers, opened, scenario, training
from strategies.cluster.device_setter import GreedyLoadBalancing
from strategies.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from strategies.parameter_server import ParameterServerStrategy
from strategies.parameter_server.server import PARAMETERS
from strategies.parameter_server.staleness import Decision, Drop, Scale, WorkerStats
from strategies.rpc.message import Kind
from tapped import silence


def parameters_of_first_ps(strategy):
    """The address that a worker asks, for a test that asks something else."""
    first = strategy.cluster.ranks_of("ps")[0]
    return strategy.service.open(PARAMETERS, {}, name=strategy.shared_name, task=first)[0]


@scenario(staleness=None)
def test_each_push_is_applied_when_it_arrives(strategy, server):
    w = strategy.variable(np.zeros(3, np.float32), name="w")
    b = strategy.variable(np.float64(1.0), name="b")
    assert (w.value.tolist(), b.value.tolist()) == ([0, 0, 0], 1.0)
    workers = only_workers(server)
    seen = []

    def push():
        g = np.full(3, workers.rank + 1, np.float32)
        strategy.apply_gradients(strategy.optimizer, [(g, w), (np.float64(0.5), b)])
        seen.append((w.value.copy(), float(b.value)))

    in_turn(server, push)
    done = workers.rank + 1
    np.testing.assert_array_equal(seen[0][0], -sum(range(1, done + 1)))
    assert seen[0][1] == 1 - 0.5 * done
    assert w.value.dtype == np.float32
    # The copy is that of the last push; others' updates come with a pull.
    strategy.pull()
    total = -workers.size * (workers.size + 1) / 2
    np.testing.assert_array_equal(w.value, total)
    workers.barrier()
    reports = strategy.reports()
    for report in reports:
        # Nobody had pulled since the start.
        assert report.version == workers.size
        ranks = server.cluster.training_ranks
        assert report.records == {r: WorkerStats(1, 0, i, i) for i, r in enumerate(ranks)}
        assert report.members == tuple(ranks)
    workers.barrier()


@scenario()
def test_workers_that_take_turns_are_workers_minus_one_behind(strategy, server):
    w = strategy.variable(np.zeros(2))
    workers = only_workers(server)
    stale = []

    def push():
        strategy.apply_gradients(strategy.optimizer, [(np.ones(2), w)])
        stale.append(strategy.last_push[w.parts[0].task].staleness)

    for _ in range(5):
        in_turn(server, push)
    assert stale == [workers.rank] + [workers.size - 1] * 4


@scenario(staleness=Drop(1))
def test_too_stale_gradients_are_dropped_and_bring_new_values(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    in_turn(server, lambda: strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)]))
    # The third and later ones have missed two updates and more.
    stale = min(workers.rank, 2)
    assert strategy.last_push[0] == Decision(stale, float(workers.rank < 2))
    assert w.value[0] == -min(workers.rank + 1, 2)
    in_turn(server, strategy.pull)
    record = strategy.reports()[0].records[server.cluster.comm.rank]
    assert (record.applied, record.dropped) == ((1, 0) if workers.rank < 2 else (0, 1))
    # A fresh one is applied.
    if workers.rank == workers.size - 1:
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        assert strategy.last_push[0] == Decision(0, 1.0)
    workers.barrier()


@scenario(staleness=Scale(), optimizer=lambda: strategies.SGD(6.0))
def test_stale_gradients_have_a_smaller_learning_rate(strategy, server):
    w = strategy.variable(np.zeros(1))
    only_workers(server)
    in_turn(server, lambda: strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)]))
    strategy.pull()
    expected = -sum(6 / (1 + i) for i in range(server.cluster.workers.size))
    np.testing.assert_allclose(w.value[0], expected)


@scenario(synchronous=True, optimizer=lambda: strategies.Momentum(0.5, 0.9))
def test_synchronous_updates_are_those_of_one_process(strategy, server):
    rng = np.random.default_rng(0)
    start = [rng.standard_normal((4, 3)), rng.standard_normal(5).astype(np.float32)]
    variables = [strategy.variable(value) for value in start]
    workers = only_workers(server)
    oracle = strategies.Momentum(0.5, 0.9)
    expected = [value.copy() for value in start]
    for step in range(4):
        given = [
            [
                np.random.default_rng((step, r, i)).standard_normal(v.shape).astype(v.dtype)
                for i, v in enumerate(start)
            ]
            for r in range(workers.size)
        ]
        examples = [2 * r + step % 2 for r in range(workers.size)]  # one has none in some steps
        if not sum(examples):
            continue
        weights = np.array(examples) / sum(examples)
        mean = [
            sum(w * g[i].astype(np.float64) for w, g in zip(weights, given, strict=True))
            for i in range(2)
        ]
        oracle.apply_gradients(
            [(m.astype(v.dtype), v) for m, v in zip(mean, expected, strict=True)]
        )
        own = zip(given[workers.rank], variables, strict=True)
        strategy.apply_gradients(strategy.optimizer, own, examples=examples[workers.rank])
        assert all(d.staleness == 0 for d in strategy.last_push)
        for variable, value in zip(variables, expected, strict=True):
            # 4 steps of some 10 roundings each, of numbers up to about 4.
            np.testing.assert_allclose(variable.value, value, atol=160 * np.finfo(value.dtype).eps)
    # The same bits on all workers.
    for variable in variables:
        everywhere = workers.allgather(variable.value.reshape(1, -1).copy())
        assert (everywhere == everywhere[0]).all()
    for report in strategy.reports():
        assert all(record.most_staleness == 0 for record in report.records.values())


@scenario(synchronous=True)
def test_examples_are_integers_of_any_kind(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    with pytest.raises(TypeError, match=r"bad examples, expected an integer .* got 2\.5"):
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)], examples=2.5)
    kind = [np.int32, int, np.uint8][workers.rank % 3]
    rank = float(workers.rank)
    strategy.apply_gradients(
        strategy.optimizer, [(np.full(1, rank), w)], examples=kind(workers.rank + 1)
    )
    counts = np.arange(workers.size) + 1
    np.testing.assert_allclose(w.value[0], -(counts * (counts - 1)).sum() / counts.sum())
    workers.barrier()


@scenario(synchronous=True)
def test_a_gradient_of_none_counts_as_zero_and_rows_add_up(strategy, server):
    table = strategy.variable(np.zeros((5, 2)), name="table")
    dense = strategy.variable(np.zeros(2), name="dense")
    mixed = strategy.variable(np.zeros((3, 1)), name="mixed")
    untouched = strategy.variable(np.ones(2), name="untouched")
    workers = only_workers(server)
    first = workers.rank == 0
    rows = strategies.Rows(np.array([workers.rank % 5, 4, 4]), np.ones((3, 2)))
    strategy.apply_gradients(
        strategy.optimizer,
        [
            (rows, table),
            (np.ones(2) if first else None, dense),
            (np.ones((3, 1)) if first else strategies.Rows(np.array([2]), np.ones((1, 1))), mixed),
            (None, untouched),
        ],
    )
    n = workers.size
    expected = np.zeros((5, 2))
    np.add.at(expected, [r % 5 for r in range(n)], -1 / n)
    expected[4] -= 2
    np.testing.assert_allclose(table.value, expected)
    np.testing.assert_allclose(dense.value, -1 / n)
    np.testing.assert_allclose(mixed.value[:, 0], [-1 / n, -1 / n, -1])
    assert untouched.value.tolist() == [1, 1]


@scenario(synchronous=True, partitioner=lambda shape, dtype: [2, 1])
def test_rows_of_a_worker_may_be_none_or_have_indices_of_another_dtype(strategy, server):
    table = strategy.variable(np.zeros((600, 1)), name="table")
    workers = only_workers(server)
    kinds = [[], np.array([2], np.uint8), np.array([2], np.uint64), np.array([2], np.int32)]
    for turn in range(len(kinds)):
        indices = kinds[(workers.rank + turn) % len(kinds)]
        rows = strategies.Rows(indices, np.ones((len(indices), 1)))
        strategy.apply_gradients(strategy.optimizer, [(rows, table)])
    np.testing.assert_allclose(table.value[[1, 2, 302]], [[0], [-3], [0]])
    np.testing.assert_allclose(strategy.look_up(table, np.array([2, 255], np.uint8)), [[-3], [0]])
    workers.barrier()


@scenario(synchronous=True)
def test_who_has_left_is_not_waited_for(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    steps = 1 + workers.size - workers.rank  # each takes one step fewer than the one before
    for _ in range(steps):
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
    strategy.leave()
    strategy.leave()
    with pytest.raises(FailedPreconditionError, match="a worker that has not left"):
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
    workers.barrier()
    strategy.pull()
    assert w.value[0] == -(1 + workers.size)
    assert strategy.reports()[0].version == 1 + workers.size


def leave_while_a_push_waits(strategy, server, variable):
    """Push in a thread, leave when that is under way, and return what the push has raised."""
    sent = threading.Semaphore(0)
    ask = strategy.service.ask

    def counted(questions):
        asked = ask(questions)
        for question in questions:
            if question.operation == "push":
                sent.release()
        return asked

    strategy.service.ask = counted
    gradients = [(np.ones(1), variable)]
    pushed = in_thread(strategy.apply_gradients, strategy.optimizer, gradients)
    for _ in server.cluster.ranks_of("ps"):
        assert sent.acquire(timeout=LIMIT)
    strategy.leave()
    error = pushed.exception(LIMIT)
    del strategy.service.ask
    return error


# The chief of a warm-up makes no step, so that the others' gradients are held.
@pytest.mark.parametrize(("synchronous", "warmup_steps"), [(True, 0), (False, 10)])
@scenario(timeout=None)
def test_a_worker_that_leaves_ends_its_own_push(strategy, server, synchronous, warmup_steps):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    last = workers.size - 1
    if workers.rank == last > 0:
        error = leave_while_a_push_waits(strategy, server, w)
        assert isinstance(error, FailedPreconditionError)
        task = server.cluster.comm.rank
        assert "the worker has left before its gradients were applied" in error.message
        assert f"(worker: task {task})" in error.message
    workers.barrier()
    if workers.rank < last and strategy.synchronous:
        strategy.apply_gradients(strategy.optimizer, [(np.full(1, 2.0), w)])
    workers.barrier()
    strategy.pull()  # nobody has waited for it, and what it pushed does not count
    assert w.value[0] == (-2 if last and strategy.synchronous else 0)


@scenario(synchronous=True, timeout=0.3)
def test_a_wait_for_others_ends_and_names_them(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    if workers.rank == 0 and workers.size > 1:
        others = server.cluster.training_ranks[1:]
        with pytest.raises(DeadlineExceededError, match="no gradients from tasks") as caught:
            strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        assert str(others) in str(caught.value)
    workers.barrier()
    strategy.timeout = LIMIT
    strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
    assert w.value[0] == -1


@scenario(synchronous=True, timeout=1)
def test_ps_tasks_that_differ_get_no_more_gradients(strategy, server):
    variables = [strategy.variable(np.zeros(1)) for _ in server.cluster.ranks_of("ps")]
    workers = only_workers(server)
    if workers.size == 1 or len(variables) == 1:
        return

    def push():
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), v) for v in variables])

    if workers.rank:  # the first ps waits for worker 0 alone, the other one for all
        place = parameters_of_first_ps(strategy)
        told = {"worker": server.cluster.comm.rank}
        server.service.disown(server.service.start(place, "join", lambda answer: None, told))
        strategy.pull()
    workers.barrier()
    if workers.rank == 0:
        why = "no gradients from tasks .*; the ps tasks differ now: start again"
        for _ in range(2):
            with pytest.raises(UnavailableError, match=why):
                push()
    workers.barrier()
    strategy.pull()
    assert [v.value[0] for v in variables] == [-1, 0]
    workers.barrier()


@scenario(synchronous=True, chief_timeout=1)
def test_a_worker_that_a_ps_counts_as_gone_trains_no_more(strategy, server):
    w = strategy.variable(np.zeros(1))
    comm, workers = server.cluster.comm, server.cluster.workers

    push = partial(strategy.apply_gradients, strategy.optimizer, [(np.ones(1), w)])
    if not training(server):
        with silence(comm.channel):
            comm.barrier()
            comm.barrier()
        return
    comm.barrier()
    if workers.rank == 0:
        with pytest.raises(UnavailableError, match=r"no sign of life for 1 s \(.*\); start again"):
            push()
    comm.barrier()
    if workers.rank == 0:
        strategy.pull()
        before = w.value[0]
        with pytest.raises(UnavailableError, match=r"counts the worker as gone.*; start again"):
            push()
        strategy.pull()
        assert w.value[0] == before
    workers.barrier()
    if workers.rank:
        push()  # the others do not wait for it
        assert w.value[0] == -1
    workers.barrier()


@scenario(synchronous=True, timeout=0.1)
def test_gradients_that_are_withdrawn_before_their_turn_do_not_wait(strategy, server):
    w = strategy.variable(np.zeros(1))
    comm, workers = server.cluster.comm, server.cluster.workers
    if not training(server):
        _, shard = server.service.open(PARAMETERS, {}, name=strategy.shared_name, task=comm.rank)
        busy, never_ends = threading.Event(), SimpleNamespace(wait=lambda *given: None)
        shard.serve(never_ends, lambda work: busy.wait(LIMIT))
        comm.barrier()
        until(lambda: Kind.WITHDRAW in comm.channel.handled)
        busy.set()
        return

    push = partial(strategy.apply_gradients, strategy.optimizer, [(np.ones(1), w)])
    comm.barrier()
    if workers.size == 1:
        push()  # has all that it waits for when its turn comes
    elif workers.rank == 0:
        with pytest.raises(DeadlineExceededError, match="no gradients from tasks"):
            push()
    workers.barrier()
    strategy.timeout = LIMIT
    push()
    assert w.value[0] == (-2 if workers.size == 1 else -1)
    workers.barrier()


@pytest.mark.parametrize("synchronous", [False, True])
@scenario(warmup_steps=3, rate_scale=10.0)
def test_the_chief_warms_up_alone(strategy, server, synchronous):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    chief = workers.rank == 0
    for _ in range(3 if chief else 1):
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        assert all(d.weight == chief for d in strategy.last_push)
    assert w.value[0] == -3
    workers.barrier()
    in_turn(server, strategy.pull)
    if synchronous:
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        assert w.value[0] == -13  # the rate is another one from now on
    else:
        in_turn(server, lambda: strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)]))
        strategy.pull()
        assert w.value[0] == -3 - 10 * workers.size


@pytest.mark.parametrize("synchronous", [False, True])
@scenario(warmup_steps=3)
def test_a_wait_for_the_warm_up_ends_and_says_how_far_it_is(strategy, server, synchronous):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)

    push = partial(strategy.apply_gradients, strategy.optimizer, [(np.ones(1), w)])
    for _ in range(2 if strategy.is_chief else 0):
        push()
    workers.barrier()
    if not strategy.is_chief:
        strategy.timeout = 0.3
        with pytest.raises(
            DeadlineExceededError, match="the chief has made 2 of 3 warm-up updates"
        ):
            push()
    workers.barrier()
    strategy.timeout = LIMIT
    push()
    assert w.value[0] == -3


@scenario(warmup_steps=1000, rate_scale=10.0)
def test_a_chief_that_leaves_ends_the_warm_up(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    if strategy.is_chief:
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        strategy.leave()
    else:
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        assert strategy.last_push[0].weight == 0
        strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])
        assert strategy.last_push[0].weight == 1
    workers.barrier()
    strategy.pull()
    assert w.value[0] == -1 - 10 * (workers.size - 1)  # the rate is another one from then on


def fails_in_second_step(step):
    if step:
        raise ValueError("no rate")
    return 1.0


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_update_that_fails_in_part_is_an_error_for_all_workers(world, synchronous):
    @scenario(ps=1, synchronous=synchronous, warmup_steps=2)
    def body(strategy, server):
        w = strategy.variable(np.zeros(1))
        b = strategy.variable(np.zeros(1), optimizer=strategies.SGD(fails_in_second_step))
        if not training(server):
            return

        def push():
            strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w), (np.ones(1), b)])

        why = "expected all or none, got ValueError: .*no rate.*; start again from a checkpoint"
        if strategy.is_chief:
            push()
            with pytest.raises(ValueError, match="no rate"):
                push()
            strategy.leave()
        else:  # waits for the end of the warm-up
            with pytest.raises(DataLossError, match=why):
                push()
        for call in (strategy.pull, strategy.state_dict):
            with pytest.raises(DataLossError, match=why):
                call()
        server.cluster.workers.barrier()

    body(world)


@pytest.mark.parametrize("synchronous", [False, True])
@scenario(partitioner=lambda shape, dtype: [3] + [1] * (len(shape) - 1))
def test_parts_lie_on_all_ps_and_are_one_variable(strategy, server, synchronous):
    rows = 7
    count = len(server.cluster.ranks_of("ps"))
    start = np.arange(2.0 * rows).reshape(rows, 2)
    v = strategy.variable(start, name="v")
    table = strategy.variable(lambda: start.copy(), name="table", resident=False)
    assert [p.task for p in v.parts] == [i % count for i in range(3)]
    assert [p.name for p in v.parts] == ["v/part_0", "v/part_1", "v/part_2"]
    with pytest.raises(ValueError, match=r"no copy on this task.*\(variable: table\)"):
        table.value  # noqa: B018
    workers = only_workers(server)
    n = 1 if synchronous else workers.size
    np.testing.assert_array_equal(v.value, start)
    indices = [6, 0, 3, 6]
    found = strategy.look_up(table, indices)
    np.testing.assert_array_equal(found, start[indices])
    found[...] = 0  # new memory: torch.from_numpy takes it without a warning
    np.testing.assert_array_equal(strategy.look_up(table, indices), start[indices])
    assert strategy.look_up(table, []).shape == (0, 2)
    workers.barrier()
    gradient = strategies.Rows(np.array(indices), np.ones((4, 2)))
    strategy.apply_gradients(strategy.optimizer, [(start, v), (gradient, table)])
    workers.barrier()
    strategy.pull()
    np.testing.assert_allclose(v.value, start - n * start, atol=1e-13)
    expected = start.copy()
    np.add.at(expected, indices, -n)
    np.testing.assert_allclose(strategy.look_up(table, range(rows)), expected)
    with pytest.raises(ValueError, match=r"look_up: an index is out of range.*0 .. 6"):
        strategy.look_up(table, [7])
    workers.barrier()
    if strategy.is_chief:
        v.assign(start + 1)
        np.testing.assert_array_equal(v.value, start + 1)
    workers.barrier()
    strategy.pull()
    np.testing.assert_array_equal(v.value, start + 1)


@pytest.mark.several
def test_bytes_are_spread(comm):
    with opened(comm) as server:
        count = len(server.cluster.ranks_of("ps"))
        strategy = ParameterServerStrategy(
            server, strategies.SGD(1.0), choice=GreedyLoadBalancing(count)
        )
        made = [strategy.variable(np.zeros(n)) for n in (100, 30, 30, 30, 5)]
        tasks = [v.parts[0].task for v in made]
        assert tasks == ([0, 1, 1, 1, 1] if count == 2 else [0] * 5)
        assert [v.name for v in made][:2] == ["variable", "variable_1"]


WRONG = [
    (lambda s, w: [(np.ones(3), w)], r"float64 of shape \(2,\), got float64 of shape \(3,\) .*w\)"),
    (lambda s, w: [(np.ones(2, np.float32), w)], "expected float64 .* got float32"),
    (lambda s, w: [(np.ones(2), np.zeros(2))], "expected a variable of this strategy"),
    (lambda s, w: [(strategies.Rows([2], np.ones(1)), w)], "index is out of range"),
    (lambda s, w: [(np.ones(2), w), (np.ones(2), w)], r"given twice \(variable: w\)"),
    (lambda s, w: [(np.ones(2), w), (None, w)], r"given twice \(variable: w\)"),
]


@pytest.mark.parametrize(("pairs", "message"), WRONG)
@scenario()
def test_wrong_gradients_change_nothing(strategy, server, pairs, message):
    w = strategy.variable(np.zeros(2), name="w")
    if training(server):
        with pytest.raises(ValueError, match=message):
            strategy.apply_gradients(strategy.optimizer, pairs(strategy, w))
        with pytest.raises(ValueError, match="expected the optimizer of the strategy or"):
            strategy.apply_gradients(strategies.SGD(1.0), [])
        assert strategy.reports()[0].version == 0
        server.cluster.workers.barrier()
        strategy.apply_gradients(strategy.optimizer, [(np.ones(2), w)])
    else:
        with pytest.raises(FailedPreconditionError, match="pull: a ps task serves others"):
            strategy.pull()
        with pytest.raises(FailedPreconditionError, match="expected a worker"):
            strategy.apply_gradients(strategy.optimizer, [])


@scenario()
def test_a_call_names_the_optimizer_of_the_strategy_or_of_its_variables(strategy, server):
    own = strategies.SGD(10.0)
    w = strategy.variable(np.zeros(1), name="w")
    table = strategy.variable(np.zeros(1), name="table", optimizer=own)
    if not training(server):
        return
    gradient = np.ones(1)
    with pytest.raises(ValueError, match=r"of all these variables, got another one \(SGD\)"):
        strategy.apply_gradients(own, [(gradient, w), (gradient, table)])
    server.cluster.workers.barrier()
    strategy.apply_gradients(own, [(gradient, table)])
    strategy.apply_gradients(strategy.optimizer, [(gradient, w), (gradient, table)])
    server.cluster.workers.barrier()
    strategy.pull()
    count = server.cluster.workers.size
    assert (w.value[0], table.value[0]) == (-count, -20 * count)


@scenario(ps=1)
def test_a_ps_refuses_two_gradients_for_one_variable(strategy, server):
    w = strategy.variable(np.zeros(2), name="w")
    if training(server):
        # As a worker would that does not look itself.
        place = parameters_of_first_ps(strategy)
        common = {"worker": server.cluster.comm.rank, "change": 1}
        told = {**common, "version": 0, "parts": [[0, False, None]] * 2}
        with pytest.raises(InvalidArgumentError, match=r"given twice \(variable: w\)"):
            server.service.request(place, "push", told, [np.ones(2)] * 2)
        for version in (-1, 1):
            told = {**common, "version": version, "parts": []}
            why = rf"no such version, expected 0 .. 0, got {version} \(worker: task "
            with pytest.raises(InvalidArgumentError, match=why):
                server.service.request(place, "push", told)
        strategy.pull()
        assert w.value.tolist() == [0, 0]


@pytest.mark.several
def test_wrong_use_on_one_task_is_an_error_on_all(comm):
    last = comm.rank == comm.size - 1
    with opened(comm) as server:

        def make(**options):
            return ParameterServerStrategy(server, strategies.SGD(1.0), **options)

        with pytest.raises(ValueError, match="bad warmup_steps"):
            make(warmup_steps=-1 if last else 0)
        with pytest.raises(ValueError, match="bad timeout"):
            make(timeout=0 if last else 1)
        with pytest.raises((TypeError, ValueError), match="rate_scale"):
            make(rate_scale=-1 if last else 0)
        with pytest.raises(Exception, match="synchronous=True"):
            make(synchronous=last)
        with pytest.raises(TypeError, match="expected one of strategies.optimizers"):
            ParameterServerStrategy(server, object() if last else strategies.SGD(1.0))
        strategy = make()
        with pytest.raises(FailedPreconditionError, match=r"this name is taken.* shared_name="):
            make()
        make(shared_name="others")
        with pytest.raises(Exception, match=r"float64 \(3,\)"):
            strategy.variable(np.zeros(3 if last else 2))
        with pytest.raises(KeyError if last else Exception, match="oh"):
            strategy.variable(broken if last else np.zeros(2))
        w = strategy.variable(np.full(2, comm.rank), dtype=np.float32, name="w")
        with pytest.raises(ValueError, match="this name is taken"):
            strategy.variable(np.zeros(2), name="w")
        # The chief's value counts.
        assert w.value.tolist() == [server.cluster.training_ranks[0]] * 2
        if training(server):
            strategy.pull()
            assert w.value.tolist() == [server.cluster.training_ranks[0]] * 2


def broken():
    raise KeyError("oh")


@scenario(partitioner=lambda shape, dtype: [2])
def test_a_name_that_a_part_has_is_taken(strategy, server):
    strategy.variable(np.zeros(4), name="w")
    with pytest.raises(ValueError, match=r"name that is taken, .* got \['w/part_1'\]"):
        strategy.variable(np.zeros(1), name="w/part_1")
    assert list(strategy.variables) == ["w"]


@scenario(devices=["/cpu:0", "/cpu:1"], synchronous=True)
def test_replicas_of_a_worker_push_together(strategy, server):
    w = strategy.variable(np.zeros(1))
    workers = only_workers(server)
    assert strategy.num_replicas_in_sync == 2 * workers.size

    def step():
        context = strategies.get_replica_context()
        number = context.replica_id_in_sync_group
        strategy.apply_gradients(strategy.optimizer, [(np.array([1.0 * number]), w)])
        return number

    numbers = strategy.run(step)
    assert strategy.local_results(numbers) == (2 * workers.rank, 2 * workers.rank + 1)
    np.testing.assert_allclose(w.value[0], -np.mean(range(2 * workers.size)))

    def dataset(context):
        assert context.num_input_pipelines == workers.size
        assert context.input_pipeline_id == workers.rank
        return [np.ones((2, 1))] * 4

    assert len(list(strategy.distribute_datasets_from_function(dataset))) == 2


@pytest.mark.parametrize("devices", [["/cpu:0"], ["/cpu:0", "/cpu:1"]])
@scenario()
def test_global_batches_are_cut_for_all_replicas_of_all_workers(strategy, server, devices):
    workers = only_workers(server)
    batch = np.arange(3 * len(devices) * workers.size)
    # Not collective: each has another number of batches.
    for rows in strategy.distribute_dataset([batch] * (workers.rank + 1)):
        for i, own in enumerate(strategy.local_results(rows)):
            first = 3 * (i * workers.size + workers.rank)
            assert own.tolist() == [first, first + 1, first + 2]
    with pytest.raises(ValueError, match="expected policy 'data', got 'off'"):
        strategy.distribute_dataset([batch], policy="off")


@scenario()
def test_many_variables_travel_in_one_message_each(strategy, server):
    variables = [strategy.variable(np.full(3, i, np.float32)) for i in range(60)]
    big = strategy.variable(np.zeros(100_000))
    only_workers(server)
    grads = [(np.ones(v.shape, v.dtype), v) for v in (*variables, big)]
    in_turn(server, lambda: strategy.apply_gradients(strategy.optimizer, grads))
    strategy.pull()
    n = server.cluster.workers.size
    for i, variable in enumerate(variables):
        assert variable.value.tolist() == [i - n] * 3
    assert (big.value == -n).all()
    with pytest.raises(ValueError, match="read-only"):
        big.value[0] = 1


@scenario()
def test_values_that_were_taken_do_not_change(strategy, server):
    w = strategy.variable(np.zeros(50_000))
    only_workers(server)
    for step in range(3):
        before = w.value
        kept = before.copy()
        strategy.apply_gradients(strategy.optimizer, [(np.ones(50_000), w)])
        np.testing.assert_array_equal(before, kept)
        assert w.value[0] <= kept[0] - 1, step
        assert (w.value == w.value[0]).all()  # never half of an update


@scenario()
def test_two_threads_of_a_worker_push(strategy, server):
    w = strategy.variable(np.zeros(1))
    only_workers(server)

    def push(count):
        for _ in range(count):
            strategy.apply_gradients(strategy.optimizer, [(np.ones(1), w)])

    together(push, [5, 5])
    server.cluster.workers.barrier()
    strategy.pull()
    assert w.value[0] == -10 * server.cluster.workers.size
