"""Any number of replicas, on ranks and on devices of one rank, does what one process does."""

import threading

import numpy as np
import pytest

import collectives as cc
import strategies
from requirements import installed

DEVICES = (1, 2, 3)

STRATEGIES = {
    "mirrored": lambda comm, devices: strategies.MirroredStrategy(devices, comm=comm),
    "multi worker": lambda comm, devices: strategies.MultiWorkerMirroredStrategy(
        comm, devices=devices
    ),
    "central storage": lambda comm, devices: strategies.CentralStorageStrategy(devices, comm=comm),
}


def cpus(count):
    return [f"/cpu:{i}" for i in range(count)]


@pytest.fixture(params=STRATEGIES)
def kind(request):
    return STRATEGIES[request.param]


@pytest.fixture(params=DEVICES, ids=lambda count: f"{count} devices")
def count(request):
    return request.param


def replica_id():
    return strategies.get_replica_context().replica_id_in_sync_group


# Training


def make_batches(sizes, columns=6):
    random = np.random.default_rng(0)
    shape = (columns, 2)
    weights = random.standard_normal(shape)
    xs = [random.standard_normal((n, columns)) for n in sizes]
    return [(x, x @ weights + 0.1 * random.standard_normal((len(x), 2))) for x in xs]


def gradient(w, x, y, ridge=0.0):
    """Of half the mean squared error of a linear model, plus the ridge."""
    return x.T @ (x @ w - y) / max(len(x), 1) + ridge * w


def train(strategy, batches, optimizer, *, inside, itself=False, ridge=0.0, start=0.0):
    with strategy.scope():
        w = strategy.variable(np.full((6, 2), start))

    def step(x, y):
        pairs = [(gradient(w.value, x, y, ridge), w)]
        if itself:
            optimizer.apply_gradients(pairs, examples=len(x))
        elif inside:
            strategy.apply_gradients(optimizer, pairs, examples=len(x))
        return pairs[0][0], len(x)

    for x, y in strategy.distribute_dataset(batches):
        result, examples = strategy.run(step, args=(x, y))
        if not inside:
            strategy.apply_gradients(optimizer, [(result, w)], examples=examples)
    return w.value


@pytest.mark.parametrize("inside", [True, False], ids=["in the replica", "between replicas"])
def test_training_equals_one_process_on_the_whole_batch(world, kind, count, inside):
    # The last batches have rows for some replicas only.
    batches = make_batches([12] * 20 + [7, 3, 1])
    alone = train(
        strategies.DefaultStrategy(), batches, strategies.Momentum(0.05, 0.9), inside=inside
    )

    def check(comm):
        strategy = kind(comm, cpus(count))
        assert strategy.num_replicas_in_sync == comm.size * count
        optimizer = strategies.Momentum(0.05, 0.9)
        start = 0.0 if comm.rank == 0 else 5.0  # rank 0's values count
        ours = train(strategy, batches, optimizer, inside=inside, start=start)
        np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-12)
        for theirs in comm.allgather(ours[np.newaxis]):
            np.testing.assert_array_equal(theirs, ours)
        chief_only = isinstance(strategy, strategies.CentralStorageStrategy)
        assert optimizer.step == (len(batches) if comm.rank == 0 or not chief_only else 0)

    world.run(check)


def test_a_distributed_optimizer_averages_over_the_replicas_of_all_ranks(world, count):
    batches = make_batches([12] * 10 + [5])
    momentum = strategies.Momentum(0.05, 0.9)
    alone = train(strategies.DefaultStrategy(), batches, momentum, inside=True)

    def check(comm):
        strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
        for itself in (False, True):
            momentum = strategies.Momentum(0.05, 0.9)
            optimizer = strategies.DistributedOptimizer(momentum, comm=comm)
            ours = train(strategy, batches, optimizer, inside=True, itself=itself)
            np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-12)
            assert optimizer.step == len(batches)
        central = strategies.CentralStorageStrategy(cpus(count), comm=comm)
        with pytest.raises(TypeError, match="updates on every rank"):
            train(central, batches, optimizer, inside=True)

    world.run(check)


def test_passes_of_a_distributed_optimizer_are_weighted_by_their_examples(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    w = strategy.variable(np.zeros(2), name="w")
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, backward_passes_per_step=2
    )
    for value, rows in ((1.0, 1), (2.0, 3)):
        gradients = [(np.full(2, value), w)]
        strategy.apply_gradients(optimizer, gradients, examples=rows)
    reached = w.value.copy()
    np.testing.assert_allclose(reached, -1.75, rtol=8 * 2.0**-53)
    strategy.apply_gradients(optimizer, [(np.ones(2), w)], examples=0)
    with pytest.raises(ValueError, match="no rank has an example"):
        strategy.apply_gradients(optimizer, [(np.ones(2), w)], examples=0)
    np.testing.assert_array_equal(w.value, reached)


def test_wider_gradients_take_the_dtype_of_their_variable(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    w = strategy.variable(np.zeros((2, 1), np.float32), name="w")
    optimizer = strategies.SGD(1.0)
    for gradient in (np.ones((2, 1)), [[1], [1]], strategies.Rows([0, 1], np.ones((2, 1)))):
        strategy.apply_gradients(optimizer, [(gradient, w)])
    assert w.value.dtype == np.float32
    np.testing.assert_array_equal(w.value, -3)
    with pytest.raises(TypeError, match="wrong dtype, expected float32, got complex128"):
        strategy.apply_gradients(optimizer, [(np.ones((2, 1), complex), w)])
    np.testing.assert_array_equal(w.value, -3)


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_linear_and_ridge_regression_reach_their_closed_form(world, kind, ridge):
    batches = make_batches([48]) * 60
    x, y = batches[0]
    best = np.linalg.solve(x.T @ x / len(x) + ridge * np.eye(6), x.T @ y / len(x))

    def check(comm):
        strategy = kind(comm, cpus(2))
        ours = train(strategy, batches, strategies.SGD(0.7), inside=True, ridge=ridge)
        np.testing.assert_allclose(ours, best, rtol=0, atol=1e-6)

    world.run(check)


@pytest.fixture(scope="module")
def digits():
    data = installed("sklearn.datasets").load_digits()
    return data.data / 16, np.eye(10)[data.target]


def test_the_digits_are_learned_with_every_strategy(comm, kind, count, digits):
    pixels, classes = digits
    batches = [(pixels[i : i + 100], classes[i : i + 100]) for i in range(0, 1500, 100)] * 4
    strategy = kind(comm, cpus(count))
    optimizer = strategies.Momentum(0.5, 0.9)
    w = strategy.variable(np.zeros((64, 10)), name="w")

    def train_step(x, y):
        scores = np.exp(x @ w.value)
        errors = scores / scores.sum(axis=1, keepdims=True) - y
        gradient = x.T @ errors / max(len(x), 1)
        strategy.apply_gradients(optimizer, [(gradient, w)], examples=len(x))

    for x, y in strategy.distribute_dataset(batches):
        strategy.run(train_step, args=(x, y))

    def hits(x, y):
        return (x @ w.value).argmax(axis=1) == y.argmax(axis=1)

    held_out = strategy.distribute_dataset([(pixels[1500:], classes[1500:])])
    (right,) = (strategy.run(hits, args=batch) for batch in held_out)
    assert strategy.reduce("mean", right, axis=0) > 0.85


def test_gradients_may_be_missing_in_some_replicas_or_in_all(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    some, none = (strategy.variable(np.ones(2), name=name) for name in ("some", "none"))

    def step():
        gradient = np.full(2, 6.0) if replica_id() == 0 else None
        strategy.apply_gradients(strategies_sgd, [(gradient, some), (None, none)])

    strategies_sgd = strategies.SGD(1.0)
    strategy.run(step)
    np.testing.assert_allclose(some.value, 1 - 6 / (comm.size * count))
    np.testing.assert_array_equal(none.value, 1)


def test_wrong_gradients_in_one_replica_are_an_error_on_all_ranks_and_change_nothing(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    w = strategy.variable(np.zeros(3), name="w")
    other = strategies.DefaultStrategy().variable(np.zeros(3), name="other")
    optimizer = strategies.SGD(1.0)
    last = comm.size * count - 1

    def step(what):
        wrong = replica_id() == last
        shape = 4 if wrong and what == "shape" else 3
        examples = -1 if wrong and what == "count" else 0 if what == "none" else 2
        variable = other if wrong and what == "owner" else w
        strategy.apply_gradients(optimizer, [(np.ones(shape), variable)], examples=examples)

    for what, words in {
        "shape": "shape",
        "count": "bad examples",
        "none": "no (rank|replica) has an example",
        "owner": "belongs to another strategy|have different variables",
    }.items():
        with pytest.raises(ValueError, match=words):
            strategy.run(step, args=(what,))
        np.testing.assert_array_equal(w.value, 0)
    strategy.run(step, args=("right",))
    np.testing.assert_array_equal(w.value, -1)


# Contexts and results


def test_every_replica_knows_who_it_is(comm, count):
    strategy = strategies.MirroredStrategy(cpus(count), comm=comm)
    assert not strategies.in_cross_replica_context()

    def who():
        context = strategies.get_replica_context()
        assert strategies.get_strategy() is strategy
        assert context.num_replicas_in_sync == comm.size * count
        assert not strategies.in_cross_replica_context()
        return context.replica_id_in_sync_group, context.device

    with strategy.scope():
        assert strategies.in_cross_replica_context()
        assert strategies.get_replica_context() is None
        results = strategy.local_results(strategy.run(who))
    first = comm.rank * count
    assert [number for number, _ in results] == list(range(first, first + count))
    assert [device for _, device in results] == cpus(count)


def test_values_are_wrapped_even_where_there_is_one_replica(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    same = object()
    contexts = []
    values = strategy.distribute_values_from_function(lambda c: contexts.append(c) or same)
    first, total = comm.rank * count, comm.size * count
    assert contexts == [strategies.replicas.ValueContext(first + i, total) for i in range(count)]
    assert values == strategies.replicas.PerReplica((same,) * count)
    assert strategy.local_results(strategy.run(lambda v: v is same, args=(values,)))[0]


# Meetings


def test_all_reduce_and_all_gather_give_every_replica_the_same(comm, kind, count):
    strategy = kind(comm, cpus(count))
    total = comm.size * count

    def step():
        context = strategies.get_replica_context()
        me = context.replica_id_in_sync_group
        value = {"a": np.full((2, 2), me + 1.0, np.float32), "b": [me, np.float16(me)]}
        summed = context.all_reduce("SUM", value)
        mean = context.all_reduce("mean", value)
        rows = context.all_gather(np.full((me, 2), me))
        columns = context.all_gather(np.full((2, 1), me), axis=-1)
        return summed, mean, rows, columns

    for summed, mean, rows, columns in strategy.local_results(strategy.run(step)):
        np.testing.assert_array_equal(summed["a"], total * (total + 1) / 2)
        assert summed["a"].dtype == np.float32
        assert summed["b"][0] == total * (total - 1) // 2
        assert summed["b"][0].dtype.kind == "i"
        assert mean["b"][0] == (total - 1) / 2
        assert mean["b"][0].dtype == np.float64
        assert mean["b"][1].dtype == np.float16
        np.testing.assert_allclose(mean["a"], (total + 1) / 2, rtol=1e-6)
        np.testing.assert_array_equal(rows[:, 0], np.repeat(range(total), range(total)))
        np.testing.assert_array_equal(columns, [list(range(total))] * 2)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries_stay_what_they_are(comm, count, library):
    name = "jax.numpy" if library == "jax" else library
    xp = installed(name)
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    kind = type(xp.ones(2))
    total = comm.size * count

    def step():
        context = strategies.get_replica_context()
        me = context.replica_id_in_sync_group
        value = xp.ones((2, 3)) * (me + 1)
        return value, context.all_reduce("mean", value)

    value, mean = strategy.run(step)
    for own in strategy.local_results(mean):
        assert isinstance(own, kind)
        np.testing.assert_allclose(np.asarray(own), (total + 1) / 2, rtol=1e-6)
    for axis, expected in ((None, 1), (0, 2), ((0, 1), 6)):
        summed = strategy.reduce("sum", value, axis)
        assert isinstance(summed, kind)
        np.testing.assert_allclose(np.asarray(summed), expected * total * (total + 1) / 2)
        mean = strategy.reduce("mean", value, axis)
        np.testing.assert_allclose(np.asarray(mean), (total + 1) / 2, rtol=1e-6)
    assert isinstance(strategy.gather(value, 1), kind)
    assert tuple(strategy.gather(value, 1).shape) == (2, 3 * total)


def test_merge_call_runs_once_per_process_between_the_replicas(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    calls = []

    def merge(given, number, fixed, *, keyword):
        assert given is strategy
        assert strategies.in_cross_replica_context()
        assert strategies.get_strategy() is strategy
        assert fixed is None
        calls.append((given.local_results(number), keyword))
        return given.reduce("sum", number), number

    def step():
        context = strategies.get_replica_context()
        me = context.replica_id_in_sync_group
        total, own = context.merge_call(merge, args=(me, None), kwargs={"keyword": "word"})
        assert strategies.get_replica_context() is context
        return total.item(), own

    results = strategy.local_results(strategy.run(step))
    first, everyone = comm.rank * count, range(comm.size * count)
    assert calls == [(tuple(range(first, first + count)), "word")]
    assert results == tuple((sum(everyone), first + i) for i in range(count))


# Errors


def test_an_exception_in_one_replica_reaches_every_rank_and_stops_the_others(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    last = comm.size * count - 1
    after, cleaned = [], []

    def step(kind, meets):
        me = replica_id()
        if me == last:
            raise kind("this replica is out of luck")
        try:
            if meets:
                strategies.get_replica_context().all_reduce("sum", 1)
                after.append(me)
        except Exception:
            after.append("swallowed")
        finally:
            cleaned.append(me)

    own = comm.rank == comm.size - 1
    for kind in (ValueError, KeyError):
        expected = kind if own or kind is ValueError else RuntimeError
        for meets in (True, False):
            with pytest.raises(expected, match="out of luck") as caught:
                strategy.run(step, args=(kind, meets))
            if not own:
                assert f"(run of rank {comm.size - 1} of {comm.size})" in str(caught.value)
    assert after == []
    assert len(cleaned) == 4 * (count - own)
    assert not [t for t in threading.enumerate() if t.name.startswith("replica-")] or (
        comm.size > 1  # where other ranks are threads, too
    )
    assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == comm.size * count


def test_an_exception_in_a_merge_call_of_one_rank_is_an_error_on_all(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))

    def merge(strategy, number):
        if comm.rank == comm.size - 1:
            raise LookupError("no such number")
        return strategy.reduce("sum", number)

    def step():
        strategies.get_replica_context().merge_call(merge, args=(replica_id(),))

    own = comm.rank == comm.size - 1
    with pytest.raises(LookupError if own else RuntimeError, match="no such number"):
        strategy.run(step)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_an_error_of_one_rank_in_a_collective_of_its_own_is_the_error_on_all(comm):
    # Others are inside an operation that this rank never comes to.
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    broken = comm.size - 1

    def step():
        if comm.rank == broken:
            raise ValueError("gave up")
        for _ in range(3):
            comm.allreduce(np.ones(4))

    with pytest.raises(ValueError, match="gave up"):
        strategy.run(step)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_replicas_that_meet_at_different_points_are_an_error_on_all(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    total = comm.size * count

    def step(what):
        context = strategies.get_replica_context()
        if context.replica_id_in_sync_group == total - 1 and what != "right":
            if what == "other":
                context.all_gather(np.ones(1))
            elif what == "op":
                context.all_reduce("mean", 1.0)
            return None
        return context.all_reduce("sum", 1.0)

    for what, words in (
        {
            "other": r"(?s)all_reduce sum.*all_gather 0",
            "op": r"(?s)all_reduce sum.*all_reduce mean",
            "end": r"(?s)all_reduce sum.*its end",
        }.items()
        if total > 1
        else ()
    ):
        with pytest.raises(RuntimeError, match=words):
            strategy.run(step, args=(what,))
    assert strategy.local_results(strategy.run(step, args=("right",)))[0] == total


def test_a_meeting_that_one_replica_does_not_come_to_does_not_wait_for_ever(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    strategy.ranks.options = strategies.CommunicationOptions(timeout=0.3)
    meeting, is_late = comm.split(0), comm.rank == comm.size - 1

    def step():
        if is_late:
            meeting.barrier()  # the others have given up
        strategies.get_replica_context().all_reduce("sum", 1.0)

    if comm.size == 1:
        return
    with pytest.raises(cc.CollectiveTimeout, match="no answer within 0.3 s"):
        strategy.run(step)
    if not is_late:
        meeting.barrier()
    with pytest.raises(cc.CollectiveError, match="not usable any more"):
        strategy.run(lambda: None)


@pytest.mark.several
def test_ranks_with_different_numbers_of_devices_are_an_error_on_all(comm):
    devices = cpus(2 if comm.rank == 1 else 1)
    with pytest.raises(cc.MismatchError, match=r"with 1 devices .* with 2 devices .* rank 1"):
        strategies.MultiWorkerMirroredStrategy(comm, devices=devices)
    devices = ["/gpu:0"] if comm.rank == 1 else cpus(1)
    with pytest.raises(ValueError, match="no such device"):
        strategies.MultiWorkerMirroredStrategy(comm, devices=devices)


# reduce and gather


def test_means_are_over_elements_and_not_over_replicas(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    total = comm.size * count
    rows = strategy.distribute_values_from_function(
        lambda c: np.arange(2.0 * (c.replica_id_in_sync_group + 1)).reshape(-1, 2)
    )
    everything = np.concatenate([np.arange(2.0 * (i + 1)).reshape(-1, 2) for i in range(total)])
    for axis in (0, -2, (0, 1), (-1, 0)):
        plain = (0, 1) if isinstance(axis, tuple) else axis
        np.testing.assert_allclose(strategy.reduce("mean", rows, axis), everything.mean(axis=plain))
        np.testing.assert_allclose(strategy.reduce("Sum", rows, axis), everything.sum(axis=plain))
    np.testing.assert_array_equal(strategy.gather(rows, 0), everything)
    nested = strategy.reduce("mean", strategy.run(lambda: {"a": replica_id(), "b": (1.0, [2.0])}))
    assert nested == {"a": (total - 1) / 2, "b": (1.0, [2.0])}
    none = strategy.distribute_values_from_function(lambda c: np.zeros((0, 2), np.float32))
    assert np.isnan(strategy.reduce("mean", none, axis=0)).all()
    assert strategy.reduce("sum", none, axis=0).dtype == np.float32


def test_wrong_reductions_of_one_rank_are_errors_on_all(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    wrong = comm.rank == comm.size - 1
    for call in (
        lambda: strategy.reduce("sum", np.ones(2), axis=1 if wrong else 0),
        lambda: strategy.reduce("max" if wrong else "sum", 1.0),
        lambda: strategy.gather(np.float64(1) if wrong else np.ones(2), 0),
        lambda: strategy.gather(np.ones(2), 1 if wrong else 0),
    ):
        with pytest.raises(ValueError, match="unknown op, expected 'sum' or 'mean'|no such axis"):
            call()
    for call in (
        lambda: strategy.reduce("sum", None if wrong else 1.0),
        lambda: strategy.reduce("sum", "text" if wrong else 1.0),
    ):
        with pytest.raises(TypeError, match="expected an array of numbers"):
            call()
    if comm.size > 1:
        for call in (
            lambda: strategy.reduce("sum", np.ones(3 if wrong else 2)),
            lambda: strategy.gather(np.ones((1, 3 if wrong else 2)), 0),
        ):
            with pytest.raises(cc.MismatchError):
                call()
    assert strategy.reduce("sum", 1) == comm.size


# Batches


def test_golden_batches_of_two_processes(comm):
    if comm.size != 2:
        return
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(2))
    batches = [np.arange(start, min(start + 4, 15)) for start in range(0, 15, 4)]
    steps = [
        [part.tolist() for part in step.values] for step in strategy.distribute_dataset(batches)
    ]
    first, last = ([[0], [2]], [[12], [14]]) if comm.rank == 0 else ([[1], [3]], [[13], []])
    assert (steps[0], steps[-1], len(steps)) == (first, last, 4)
    # Batches of its own, of 7 rows: 7 rows of both together in each step.
    sizes = [
        [len(part) for part in step.values]
        for step in strategy.distribute_dataset([np.arange(7)], policy="off")
    ]
    assert sizes == ([[2, 2], [2, 1]] if comm.rank == 0 else [[2, 1], [2, 2]])


def test_there_is_no_step_in_which_nobody_has_a_row(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    replicas = comm.size * count
    if replicas == 1:  # which gets the batches as they are
        return
    w = strategy.variable(np.zeros(1), name="w")
    optimizer = strategies.SGD(1.0)

    def step(x):
        strategy.apply_gradients(optimizer, [(np.ones(1), w)], examples=len(x))

    # Every process cuts its last row into as many parts as there are replicas.
    batches = [np.arange(2 * replicas), np.arange(0), np.arange(1)]
    for x in strategy.distribute_dataset(batches, policy="off"):
        strategy.run(step, args=(x,))
    np.testing.assert_allclose(w.value, -(comm.size + 1))
    own = strategy.distribute_datasets_from_function(lambda context: [np.ones(0)] * 3)
    assert list(own) == []


@pytest.mark.parametrize("policy", ["data", "off"])
def test_every_row_once(comm, count, policy):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    batches = [{"x": np.arange(10.0 * n, 10 * n + rows)} for n, rows in enumerate((9, 9, 7, 1))]
    mine = batches if policy == "data" or comm.rank == 0 else []
    seen = [
        strategy.gather(batch, 0)["x"] for batch in strategy.distribute_dataset(mine, policy=policy)
    ]
    everything = np.concatenate([batch["x"] for batch in batches])
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), everything)


def test_each_replica_takes_the_next_batch_of_its_process_until_none_has_any(comm, count):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    contexts = []

    def batches(context):
        contexts.append(context)
        own = context.input_pipeline_id * 100
        return [np.array([own + i]) for i in range(context.input_pipeline_id + 2)]

    steps = list(strategy.distribute_datasets_from_function(batches))
    assert contexts == [strategies.replicas.InputContext(comm.size, comm.rank, comm.size * count)]
    assert len(steps) == -(-(comm.size + 1) // count)  # of the process with most batches
    rows = [part.tolist() for step in steps for part in strategy.local_results(step)]
    own = comm.rank + 2
    assert rows[:own] == [[comm.rank * 100 + i] for i in range(own)]
    assert all(row == [] for row in rows[own:])


# Options


@pytest.mark.parametrize(
    "options",
    [
        strategies.CommunicationOptions(bytes_per_pack=10),
        strategies.CommunicationOptions(algorithm="ring"),
        strategies.CommunicationOptions(compression=cc.BF16),
    ],
    ids=["packs", "ring", "bf16"],
)
def test_options_change_how_and_not_what(comm, world, count, options):
    plain = strategies.MultiWorkerMirroredStrategy(comm, devices=cpus(count))
    strategy = strategies.MultiWorkerMirroredStrategy(
        comm, devices=cpus(count), communication_options=options
    )
    exact = np.float32(1 + 2**-12)  # bfloat16 has 8 bits

    def step(options=None):
        context = strategies.get_replica_context()
        value = [np.full(n, exact, np.float32) for n in (3, 1, 0, 5)]
        return context.all_reduce("mean", value, options)

    everywhere = [
        plain.local_results(plain.run(step, args=(options,)))[0],
        strategy.local_results(strategy.run(step))[0],
    ]
    rounded = comm.size > 1 and not world.shared and options.compression is cc.BF16
    for results in everywhere:
        assert [len(result) for result in results] == [3, 1, 0, 5]
        for result in results:
            np.testing.assert_allclose(result, exact, rtol=2**-8 if rounded else 1e-6)
            assert not rounded or not (result == exact).any() or result.size == 0
    # What people read is not rounded.
    assert strategy.reduce("mean", strategy.run(lambda: exact)) == pytest.approx(exact, rel=1e-6)
