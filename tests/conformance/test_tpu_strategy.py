"""One program for all devices of JAX does what one process does with all rows.

JAX has 8 devices of the host in every process, see `conftest`; ranks that are threads share them.
"""

import numpy as np
import pytest

import collectives as cc
import strategies
from requirements import installed


@pytest.fixture(params=[1, 2, 8], ids=lambda count: f"{count} devices")
def count(request):
    return request.param


@pytest.fixture
def jnp():
    installed("jax")
    return installed("jax.numpy")


def make(comm, count):
    return strategies.TPUStrategy(devices=[f"/cpu:{i}" for i in range(count)], comm=comm)


def make_batches(sizes):
    random = np.random.default_rng(0)
    return [tuple(random.standard_normal((n, k)).astype(np.float32) for k in (6, 2)) for n in sizes]


def train(strategy, batches, start, traces):
    w, b = (strategy.variable(start[name], name=name) for name in ("w", "b"))
    optimizer = strategies.Adam(0.05)
    calls = []

    def step(x, y, scale):
        calls.append(1)
        error = x @ w.value + b.value - y
        rows = max(x.shape[0], 1)
        pairs = [(x.T @ error / rows * scale, w), (error.sum(axis=0) / rows * scale, b)]
        strategy.apply_gradients(optimizer, pairs, examples=x.shape[0])
        return (error * error).sum(), {"nothing": None}

    total = 0.0
    for x, y in strategy.distribute_dataset(batches):
        loss, _ = strategy.run(step, args=(x, y, 1.0))
        total = strategy.reduce("sum", loss)
        traces.append(len(calls))
    return w, b, float(np.asarray(total))


def test_training_equals_one_process_on_the_whole_batch(world, count, jnp):
    # 480 rows are shared evenly by 1 to 5 ranks of 1 to 8 devices; those of the last batch are not,
    # so that threads run, for each of which JAX compiles every operation anew: some seconds for 8.
    batches = make_batches([480] * 3 + [7] * (count == 2))
    start = {"w": np.ones((6, 2), np.float32), "b": np.zeros(2, np.float32)}
    one = strategies.DefaultStrategy()
    *alone, last = train(one, batches, start, [])

    def check(comm):
        strategy = make(comm, count)
        assert strategy.num_replicas_in_sync == comm.size * count
        own = {name: array + comm.rank for name, array in start.items()}  # rank 0's count
        *ours, total = train(strategy, batches, own, traces := [])
        for mine, theirs in zip(ours, alone, strict=True):
            # Adam divides by what may be small: a rounding of float32 may count a lot.
            np.testing.assert_allclose(mine.value, theirs.value, rtol=0, atol=1e-4)
            everyones = comm.allgather(np.asarray(mine.value)[np.newaxis])
            np.testing.assert_array_equal(everyones, np.broadcast_to(mine.value, everyones.shape))
            for i in range(count):
                shard = mine.value.addressable_shards[i].data
                np.testing.assert_array_equal(shard, mine.value)
        np.testing.assert_allclose(total, last, rtol=1e-4)
        # Three steps of one shape are traced twice: to find its variables, and to compile.
        assert traces[:3] == [2, 2, 2]

    world.run(check)


def test_replicas_meet_and_write_variables_in_every_way(comm, jnp):
    count = 2
    strategy = make(comm, count)
    total = comm.size * count
    numbers = np.arange(1, total + 1, dtype=np.float32)
    made = {
        (how, kind): strategy.variable(
            np.ones(2, np.float32), synchronization=how, aggregation=kind
        )
        for how in ("on_write", "on_read")
        for kind in ("sum", "mean", "only_first_replica")
    }
    traces = []

    def step(value):
        traces.append(1)
        context = strategies.get_replica_context()
        number = context.replica_id_in_sync_group + 1
        for variable in made.values():
            variable.assign_add(jnp.full(2, number, "float32"))
        own = made["on_read", "sum"].value  # of this replica, with its number
        summed = context.all_reduce("sum", {"a": value[0] * number, "b": [number]})
        again = context.all_reduce("mean", summed["a"] + number)
        half = context.all_reduce("mean", jnp.full(3, number, "bfloat16"))
        rows = context.all_gather(jnp.full((2, 1), number), axis=-1)
        return own, summed, again, half, rows, "text"

    for _ in range(2):
        given = strategy.distribute_values_from_function(lambda c: np.ones(1, np.float32))
        results = strategy.local_results(strategy.run(step, args=(given,)))
        triangle = total * (total + 1) / 2
        for i, (own, summed, again, half, rows, text) in enumerate(results):
            assert own.shape == (2,)
            assert {d.id for d in own.devices()} == {i}
            np.testing.assert_array_equal(summed["a"], triangle)
            np.testing.assert_array_equal(summed["b"][0], triangle)
            np.testing.assert_allclose(again, triangle + (total + 1) / 2, rtol=1e-6)
            np.testing.assert_allclose(np.asarray(half, float), (total + 1) / 2, rtol=2**-8)
            assert str(half.dtype) == "bfloat16"
            np.testing.assert_array_equal(rows, np.broadcast_to(numbers, (2, total)))
            assert text == "text"
    for (how, kind), variable in made.items():
        own = 1 + 2 * numbers
        combined = {"sum": own.sum(), "mean": own.mean(), "only_first_replica": own[0]}[kind]
        if (how, kind) == ("on_write", "sum"):
            combined = 1 + 2 * numbers.sum()
        np.testing.assert_allclose(variable.value, combined, rtol=1e-6)
    # Alone, a trace for the variables and one for the program; else one more for each meeting.
    assert len(traces) == (2 if comm.size == 1 else 1 + 5)


def test_what_cannot_be_compiled_runs_in_threads_on_all_ranks_and_the_log_says_why(
    comm, jnp, caplog
):
    strategy = make(comm, 2)
    total = comm.size * 2
    w = strategy.variable(np.zeros(2, np.float32), name="w", aggregation="sum")

    def host(value):
        assert float(value) > 0 or comm.rank  # which a tracer refuses
        w.assign_add(np.ones(2))
        context = strategies.get_replica_context()
        return context.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(value,))

    with caplog.at_level("WARNING", "strategies.tpu.strategy"):
        given = strategy.distribute_values_from_function(lambda c: np.float32(1))
        results = strategy.local_results(strategy.run(host, args=(given,)))
    assert [float(x) for x in results] == [total] * len(results)
    np.testing.assert_array_equal(w.value, total)
    assert "run: not compiled, each device has a thread instead: what jax.jit ref" in caplog.text
    lengths = strategy.distribute_values_from_function(
        lambda c: np.ones(c.replica_id_in_sync_group, np.float32)
    )
    with caplog.at_level("WARNING", "strategies.tpu.strategy"):
        result = strategy.run(lambda x: x.sum(), args=(lengths,))
    assert float(strategy.reduce("sum", result)) == total * (total - 1) / 2
    assert "the replicas have arrays of different shapes" in caplog.text

    def rows():
        sparse = strategies.Rows([0], jnp.ones(1))
        strategy.apply_gradients(strategies.SGD(1.0), [(sparse, w)])

    strategy.run(rows)
    np.testing.assert_array_equal(w.value, [total - 1, total])


def test_errors_are_raised_on_all_ranks_and_the_next_run_works(comm, jnp):
    strategy = make(comm, 2)
    w = strategy.variable(np.zeros(2, np.float32), name="w")
    last = comm.rank == comm.size - 1

    def wrong(x):
        if last:
            raise LookupError("no such thing")
        return strategies.get_replica_context().all_reduce("sum", x)

    given = strategy.distribute_values_from_function(lambda c: np.ones(2, np.float32))
    with pytest.raises(LookupError if last else RuntimeError, match="no such thing"):
        strategy.run(wrong, args=(given,))

    def late(x):
        strategy.apply_gradients(strategies.SGD(1.0), [(x, w)])
        return w.value

    with pytest.raises(ValueError, match=r"changes after the program.*variable: w"):
        strategy.run(late, args=(given,))
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(ValueError, match="write a variable without an aggregation"):
            strategy.run(lambda x: w.assign(x), args=(given,))
    for examples, words in ((0, "no replica has an example|no rank has an example"),):
        with pytest.raises(ValueError, match=words):
            strategy.run(
                lambda x, n=examples: strategy.apply_gradients(
                    strategies.SGD(1.0), [(x, w)], examples=n
                ),
                args=(given,),
            )
    np.testing.assert_array_equal(w.value, 0)
    strategy.run(lambda x: strategy.apply_gradients(strategies.SGD(1.0), [(x, w)]), (given,))
    np.testing.assert_array_equal(w.value, -1)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_words_and_numbers_of_a_call_stay_what_they_are(comm, jnp):
    strategy = make(comm, 2)

    def fn(x, *words, scale, padding):
        assert (*words, padding) == ("rows", "one row", "same")
        return x.sum() * scale

    for scale in (2.0, 3.0):
        result = strategy.run(
            fn, (np.ones(4, np.float32), "rows", "one row"), {"scale": scale, "padding": "same"}
        )
        assert [float(one) for one in strategy.local_results(result)] == [4 * scale] * 2


def test_a_resolver_says_what_there_is(caplog, jnp):
    with caplog.at_level("WARNING", "strategies.cluster.resolvers"):
        resolver = strategies.cluster.TPUClusterResolver("grpc://elsewhere", ranks=2)
        names = resolver.devices()
    assert names == tuple(f"/cpu:{i}" for i in range(8))
    assert resolver.num_accelerators() == {}
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert "used, and not 'grpc://elsewhere'" in caplog.text
    assert "JAX finds no TPU; what it has takes its place: 8 of kind cpu" in caplog.text
    assert strategies.TPUStrategy(resolver).devices == names
    with pytest.raises(ValueError, match="JAX has no such device, expected one of 8 .*'/cpu:8'"):
        strategies.TPUStrategy(devices=["/cpu:8"])


def test_what_a_caller_holds_is_not_overwritten_by_the_next_step(comm, count, jnp):
    strategy = make(comm, count)
    w = strategy.variable(np.zeros(4, np.float32), name="w")
    optimizer = strategies.Momentum(1.0, 0.5)
    batch = strategy.distribute_values_from_function(lambda c: np.ones(4, np.float32))

    def step(x):
        strategy.apply_gradients(optimizer, [(x, w)])
        return x

    given = strategy.local_results(strategy.run(step, args=(batch,)))
    value, state = w.value, optimizer.state_dict()
    gradient = jnp.full(4, 2.0)
    strategy.apply_gradients(optimizer, [(gradient, w)])  # outside of a program, too
    strategy.run(step, args=(batch,))
    np.testing.assert_array_equal(value, -1)
    np.testing.assert_array_equal(state["momentum/w"], 1)
    np.testing.assert_array_equal(gradient, 2)
    for own in given:
        np.testing.assert_array_equal(own, 1)
    # Slots of 1, 2.5 and 2.25, each subtracted once.
    np.testing.assert_array_equal(w.value, -5.75)
