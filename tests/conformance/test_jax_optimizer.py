"""DistributedOptimizer of Optax: the same program on any number of ranks, compiled or not."""

from __future__ import annotations

import numpy as np
import pytest

import collectives as cc
import strategies
from conftest import UNDER_MPI
from oracle import joined
from requirements import installed

jax, optax = installed("jax"), installed("optax")
jnp = jax.numpy
from strategies.jax import library_errors  # noqa: E402  (needs JAX)


@pytest.fixture(params=["compiled", "not compiled"])
def compiled(request, world):
    """Ranks that are threads share a device, on which JAX makes ordered calls one by one."""
    if request.param == "compiled":
        if not UNDER_MPI and world.size > 1:
            pytest.skip("compiled programs of several ranks need a process for each")
        return jax.jit
    return lambda function: function


def parameters():
    random = np.random.default_rng(2)
    w = random.standard_normal((6, 2)).astype(np.float32)
    return {"layer": {"w": jnp.asarray(w), "b": jnp.zeros(2)}, "unused": jnp.ones(3)}


def batches_of(rank, steps=6, rows=4):
    random = np.random.default_rng([11, rank])
    return [
        (
            random.standard_normal((rows, 6)).astype(np.float32),
            random.standard_normal((rows, 2)).astype(np.float32),
        )
        for _ in range(steps)
    ]


def loss_of(params, x, y):
    layer = params["layer"]
    return ((x @ layer["w"] + layer["b"] - y) ** 2).mean()


gradients_of = jax.jit(jax.grad(loss_of))


def train(tx, batches, compiled, examples=False):
    params = parameters()
    state = tx.init(params)

    def step(params, state, x, y):
        gradients = gradients_of(params, x, y)
        told = {"examples": len(x)} if examples else {}
        updates, state = tx.update(gradients, state, params, **told)
        return optax.apply_updates(params, updates), state

    step = compiled(step)
    for x, y in batches:
        params, state = step(params, state, x, y)
    return params, state


def assert_alike(comm, params, expected):
    for own, exact in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        # float32: 6 steps of less than 100 roundings; Adam divides by numbers down to 1e-2.
        np.testing.assert_allclose(own, exact, rtol=0, atol=6 * 100 * 2.0**-24 * 10)
        everyones = comm.allgather(np.asarray(own)[np.newaxis])
        np.testing.assert_array_equal(everyones, np.broadcast_to(own, everyones.shape))


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.05, 0.9),
    "adam": lambda: optax.adam(0.01),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_one_process_on_all_rows(comm, compiled, kind):
    ranks = [batches_of(r) for r in range(comm.size)]
    exact, _ = train(OPTIMIZERS[kind](), joined(ranks), lambda f: f)
    tx = strategies.DistributedOptimizer(OPTIMIZERS[kind](), comm=comm)
    assert isinstance(tx, optax.GradientTransformation)
    params, state = train(tx, ranks[comm.rank], compiled)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    assert_alike(comm, params, exact)


def test_uneven_examples(comm, compiled):
    ranks = [batches_of(r, rows=0 if r == 1 else 2 + r) for r in range(comm.size)]
    exact, _ = train(optax.sgd(0.1), joined(ranks), lambda f: f)
    tx = strategies.DistributedOptimizer(optax.sgd(0.1), comm=comm)
    params, _ = train(tx, ranks[comm.rank], compiled, examples=True)
    assert_alike(comm, params, exact)


@pytest.mark.parametrize("examples", [False, True], ids=["alike", "weighted"])
def test_passes_add_up_before_ranks_communicate(comm, compiled, examples):
    rows = [2 + r if examples else 4 for r in range(comm.size)]
    ranks = [batches_of(r, rows=rows[r]) for r in range(comm.size)]
    three = [
        [tuple(map(np.concatenate, zip(*r[i : i + 3], strict=True))) for i in (0, 3)] for r in ranks
    ]
    exact, _ = train(optax.sgd(0.05, 0.9), joined(three), lambda f: f)
    tx = strategies.DistributedOptimizer(
        optax.sgd(0.05, 0.9), comm=comm,
        backward_passes_per_step=3, average_aggregated_gradients=True,
    )  # fmt: skip
    params, state = train(tx, ranks[comm.rank], compiled, examples)
    assert int(state.count) == 0
    assert_alike(comm, params, exact)
    params, _ = train(tx, ranks[comm.rank][:2], compiled, examples)
    assert_alike(comm, params, parameters())  # not enough for an update


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([None, 3], "expected examples for all passes or for none"),
        ([0, None], "expected examples for all passes or for none"),
        ([None, None, 0], "expected examples for all passes or for none"),
        ([3, None, 3], "expected examples for all passes or for none"),
        ([-1, 3], "bad examples, expected >= 0"),
    ],
)
def test_examples_of_some_passes_only_are_an_error_on_all(world, compiled, passes, words):
    def check(comm):
        tx = strategies.DistributedOptimizer(
            optax.sgd(1.0), comm=comm, backward_passes_per_step=len(passes),
            average_aggregated_gradients=True,
        )  # fmt: skip
        updates = {n: compiled(lambda g, s, n=n: tx.update(g, s, examples=n)) for n in passes}
        gradient = jnp.ones(2)
        state = tx.init(gradient)
        for n in passes[:-1]:
            _, state = updates[n if comm.rank == comm.size - 1 else passes[0]](gradient, state)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=words):
            jax.block_until_ready(updates[passes[-1]](gradient, state))
        state = tx.init(gradient)
        for _ in passes:
            result, state = compiled(lambda g, s: tx.update(g, s))(gradient, state)
        np.testing.assert_array_equal(result, -1)

    world.run(check)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_passes_of_16_bits_are_weighted_in_32(comm, compiled, dtype):
    tx = strategies.DistributedOptimizer(optax.sgd(1.0, 0.5), comm=comm, backward_passes_per_step=8)
    update = compiled(lambda g, s: tx.update(g, s, examples=1000))
    state = tx.init([jnp.zeros(2, dtype)])
    assert state.sums[0].dtype == jnp.float32
    for value in (101, 99, 101, 99, 101, 99, 101, 99):
        # The sum is 800,000: no number of float16.
        (change,), state = update([jnp.full(2, value, dtype)], state)
    assert change.dtype == dtype
    # Rounded by the weight of the rank and by the mean.
    bound = 100 * 2 * float(jnp.finfo(dtype).eps) if comm.size > 1 else 0
    np.testing.assert_allclose(np.asarray(change, float), -100, rtol=0, atol=bound)


def test_clipping_compression_and_large_gradients(comm, compiled):
    # Some MiB, so that JAX copies them in its own threads.
    n = 1 << 20
    tx = strategies.DistributedOptimizer(
        optax.sgd(1.0), comm=comm, clip_global_norm=2.0, compression=cc.BF16
    )
    update = compiled(lambda g, s: tx.update(g, s))
    gradients = [jnp.full(n, comm.rank + 1.0), jnp.ones((2, 2), jnp.bfloat16)]
    state = tx.init(gradients)
    for _ in range(3):
        (large, small), state = update(gradients, state)
        comm.barrier()  # the program's own operations do not get in between
    mean = (comm.size + 1) / 2
    norm = np.sqrt(n * mean**2 + 4)
    np.testing.assert_allclose(large, -mean * 2 / norm, rtol=2.0**-7)
    assert small.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(small, float), -2 / norm, rtol=2.0**-6)


def test_gradients_on_several_devices_of_a_process(comm, compiled):
    devices = jax.local_devices()
    if len(devices) == 1:
        pytest.skip("the process has one device")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    gradients = jax.device_put(jnp.arange(6.0) * (comm.rank + 1), everywhere)
    tx = strategies.DistributedOptimizer(optax.sgd(1.0), comm=comm)
    update = compiled(lambda g, s: tx.update(g, s)[0])
    for _ in range(2):
        result = update(gradients, tx.init(gradients))
        np.testing.assert_allclose(result, -np.arange(6.0) * (comm.size + 1) / 2)


def test_results_do_not_share_memory_with_later_ones(comm, compiled):
    tx = strategies.DistributedOptimizer(optax.sgd(1.0), comm=comm)
    update = compiled(lambda g, s: tx.update(g, s)[0])
    state = tx.init(jnp.zeros(1000))
    results = [update(jnp.full(1000, float(i)), state) for i in range(4)]
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, -float(i))


@pytest.mark.several
def test_other_gradients_on_one_rank_are_an_error_on_all_and_no_end(comm, compiled):
    tx = strategies.DistributedOptimizer(optax.sgd(1.0), comm=comm)
    update = compiled(lambda g, s: tx.update(g, s)[0])
    gradient = {"w": jnp.ones(3 if comm.rank == comm.size - 1 else 2)}
    words = r"\['w'\]: float32 of shape \(2,\) on rank 0, \['w'\]: float32 of shape \(3,\)"
    with pytest.raises((cc.MismatchError, jax.errors.JaxRuntimeError), match=words):
        jax.block_until_ready(update(gradient, tx.init(gradient)))
    gradient = {"w": jnp.full(2, float(comm.rank))}
    result = update(gradient, tx.init(gradient))["w"]
    np.testing.assert_allclose(result, -(comm.size - 1) / 2)


@pytest.mark.several
def test_errors_of_compiled_steps_are_the_library_s(comm):
    tx = strategies.DistributedOptimizer(optax.sgd(1.0), comm=comm)
    gradient = jnp.ones(3 if comm.rank == 1 else 2)
    with jax.default_device(jax.devices()[comm.rank]):
        update = jax.jit(lambda g: tx.update(g, tx.init(g))[0])
        with pytest.raises(cc.MismatchError, match="DistributedOptimizer"), library_errors():
            update(gradient)
        np.testing.assert_array_equal(update(jnp.ones(2)), -1)


def test_an_error_of_one_rank_reaches_all(comm):
    tx = strategies.DistributedOptimizer(optax.sgd(1.0), comm=comm)
    gradient = jnp.ones(2)
    wrong = -1 if comm.rank == comm.size - 1 else 1
    with pytest.raises(ValueError, match="bad examples, expected >= 0, got -1"):
        tx.update(gradient, tx.init(gradient), examples=wrong)
    np.testing.assert_array_equal(tx.update(gradient, tx.init(gradient))[0], -1)
    with pytest.raises(ValueError, match="named_parameters are for optimizers of PyTorch"):
        strategies.DistributedOptimizer(optax.sgd(1.0), comm=comm, named_parameters=[])


def test_parameters_and_states_of_one_rank_reach_all(comm):
    root = comm.size - 1
    tx = optax.chain(optax.clip(1.0), optax.adam(0.1))
    params = jax.tree.map(lambda x: x + comm.rank, parameters())
    state = tx.init(params)
    if comm.rank == root:
        _, state = tx.update(params, state)
    got = strategies.broadcast_parameters(params, root, comm=comm)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    for own, exact in zip(jax.tree.leaves(got), jax.tree.leaves(parameters()), strict=True):
        assert isinstance(own, jax.Array)
        np.testing.assert_array_equal(own, np.asarray(exact) + root)
    state = strategies.broadcast_optimizer_state(state, root, comm=comm)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    assert int(state[1][0].count) == 1


def test_random_keys_are_broadcast(comm):
    own = {"one": jax.random.key(comm.rank), "two": jax.random.split(jax.random.key(comm.rank))}
    got = strategies.broadcast_parameters(own, comm.size - 1, comm=comm)
    for name, key in {
        "one": jax.random.key(comm.size - 1),
        "two": jax.random.split(jax.random.key(comm.size - 1)),
    }.items():
        assert got[name].dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(got[name]), jax.random.key_data(key))


@pytest.mark.several
def test_a_forgotten_broadcast_or_another_rate_is_an_error_on_all(comm, compiled):
    odd = comm.rank == comm.size - 1
    params = {"w": jnp.full(3, float(odd))}
    gradient = {"w": jnp.ones(3)}

    def update(rate, compare="all"):
        tx = strategies.DistributedOptimizer(optax.sgd(rate), comm=comm, compare=compare)
        function = compiled(tx.update)

        def steps(count=1):
            state = tx.init(params)
            for _ in range(count):
                updates, state = jax.block_until_ready(function(gradient, state, params))
            return updates

        return steps

    errors = (cc.MismatchError, jax.errors.JaxRuntimeError)
    first = update(0.5)
    with pytest.raises(errors, match=rf"parameters, \['w'\]: .* on rank {comm.size - 1} is"):
        first()
    update(0.5, "nothing")()
    params = strategies.broadcast_parameters(params, comm=comm)
    strategies.check_consistent(params, comm=comm)
    np.testing.assert_array_equal(first(3)["w"], -0.5)
    # Of a warm-up that begins at zero the first updates are alike.
    rate = optax.linear_schedule(0, 0.2 if odd else 0.1, 10)
    for other in (0.2 if odd else 0.1, rate):
        steps = update(other)
        with pytest.raises(errors, match=r"in their updates of the same gradients, as by an"):
            steps(2)
    update(0.2 if odd else 0.1, "parameters")()


@pytest.mark.several
@pytest.mark.parametrize("passes", [1, 2])
def test_a_rate_that_differs_in_a_later_step_is_an_error_in_that_step(comm, compiled, passes):
    odd = comm.rank == comm.size - 1
    tx = strategies.DistributedOptimizer(
        optax.inject_hyperparams(optax.sgd)(0.5), comm=comm, backward_passes_per_step=passes
    )
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    update = compiled(tx.update)
    for _ in range(3 * passes):
        updates, state = update({"w": jnp.ones(3)}, state, params)
    np.testing.assert_array_equal(updates["w"], -0.5 * passes)
    own = state if passes == 1 else state.inner
    number = (float, jnp.float32)[passes - 1]  # both are assigned in programs
    own.hyperparams["learning_rate"] = number(0.25 if odd else 0.5)
    for _ in range(passes - 1):
        _, state = update({"w": jnp.ones(3)}, state, params)
    errors = (cc.MismatchError, jax.errors.JaxRuntimeError)
    words = rf"hyperparams\['learning_rate'\] is 0.5 on rank 0, 0.25 on rank {comm.size - 1}; "
    with pytest.raises(errors, match=words):
        jax.block_until_ready(update({"w": jnp.ones(3)}, state, params))


def test_a_wrapped_transformation_is_not_wrapped_again(comm):
    wrapped = strategies.DistributedOptimizer(optax.sgd(0.1), comm=comm)
    passes = strategies.DistributedOptimizer(optax.sgd(0.1), comm=comm, backward_passes_per_step=2)
    for given in (wrapped, passes):
        with pytest.raises(ValueError, match="is wrapped already and .*, got AveragingTrans"):
            strategies.DistributedOptimizer(given, comm=comm)
        with pytest.raises(ValueError, match="Optax: the strategy averages gradients"):
            strategies.optimizers.Optax(given)


def test_rows_are_not_averaged_by_a_transformation(comm):
    transformation = strategies.DistributedOptimizer(optax.sgd(0.1), comm=comm)
    params = {"table": jnp.zeros((4, 2))}
    rows = {"table": strategies.Rows([1], jnp.ones((1, 2)))}
    with pytest.raises(TypeError, match=r"expected a dense gradient, got Rows.*\['table'\]"):
        transformation.update(rows, transformation.init(params), params)


def test_variables_of_jax_are_for_optax(comm):
    pair = (jnp.ones(3), jnp.ones(3))
    words = r"a variable of JAX cannot be changed in place, .*; for JAX use Optax"
    with pytest.raises(TypeError, match=words):
        strategies.SGD(0.1).apply_gradients([pair])
    with pytest.raises(TypeError, match=words):
        strategies.DistributedOptimizer(strategies.SGD(0.1), comm=comm).apply_gradients([pair])
