"""Models of JAX whose steps a strategy makes: parameter servers and spare replicas."""

import numpy as np
import pytest

import strategies
from conftest import UNDER_MPI
from requirements import installed
from served import in_turn, only_workers, scenario, training
from strategies.spare_replica import SpareReplicaStrategy

jax, optax = installed("jax"), installed("optax")
jnp = jax.numpy


@pytest.fixture(params=["compiled", "not compiled"])
def compiled(request, world):
    """Ranks that are threads share a device, on which JAX makes ordered calls one by one."""
    if request.param == "compiled":
        if not UNDER_MPI and world.size > 1:
            pytest.skip("compiled programs of several ranks need a process for each")
        return jax.jit
    return lambda function: function


def parameters(shift=0.0):
    random = np.random.default_rng(2)
    w = random.standard_normal((6, 2)).astype(np.float32) + np.float32(shift)
    return {"layer": {"w": jnp.asarray(w), "b": jnp.zeros(2)}, "unused": jnp.ones(3)}


def rows_of(step, worker, workers):
    """Rows of a worker in a step; the last of several has none in the first step."""
    count = 0 if step == 0 and worker == workers - 1 > 0 else 2 + worker
    random = np.random.default_rng([step, worker])
    return tuple(random.standard_normal((count, n)).astype(np.float32) for n in (6, 2))


def loss_of(params, x, y):
    layer = params["layer"]
    return ((x @ layer["w"] + layer["b"] - y) ** 2).mean()


def stepping(transformation, compiled):
    def step(params, state, x, y, examples):
        gradients = jax.grad(loss_of)(params, x, y)
        updates, state = transformation.update(gradients, state, params, examples=examples)
        return optax.apply_updates(params, updates), state

    return compiled(step)


KINDS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum on a schedule": lambda: optax.sgd(optax.linear_schedule(0.2, 0.1, 3), 0.9, True),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(0.01, eps_in_sqrt=False, momentum=0.5),
    "rmsprop's default": lambda: optax.rmsprop(0.01, eps=1e-4),
    "adagrad": lambda: optax.adagrad(0.05),
    "centered": lambda: optax.rmsprop(0.01, eps=1e-4, eps_in_sqrt=False, centered=True),
}


def check_against_one_process(kind, transformation, params, rank, size, compiled):
    alone, oracle = parameters(), KINDS[kind]()
    state, step = transformation.init(params), stepping(transformation, compiled)
    oracle_state = oracle.init(alone)
    plain = stepping(optax.with_extra_args_support(oracle), lambda function: function)
    for number in range(4):
        x, y = rows_of(number, rank, size)
        params, state = jax.block_until_ready(step(params, state, x, y, len(x)))
        every = [rows_of(number, other, size) for other in range(size)]
        x, y = map(np.concatenate, zip(*every, strict=True))
        alone, oracle_state = plain(alone, oracle_state, x, y, len(x))
        for mine, expected in zip(*map(jax.tree.leaves, (params, alone)), strict=True):
            # Some roundings of numbers around 1 in each step, which a root enlarges.
            np.testing.assert_allclose(mine, expected, rtol=0, atol=3e-5)
    return params


@pytest.mark.parametrize("kind", KINDS)
@scenario(synchronous=True, optimizer=lambda: None)
def test_synchronous_servers_make_the_steps_of_one_process(strategy, server, compiled, kind):
    transformation = strategies.DistributedOptimizer(KINDS[kind](), strategy=strategy)
    assert isinstance(transformation, optax.GradientTransformation)
    params = parameters()
    transformation.init(params)
    names = ["['layer']['b']", "['layer']['w']", "['unused']"]
    assert list(strategy.variables) == names
    if training(server):
        workers = server.cluster.workers
        params = check_against_one_process(
            kind, transformation, params, workers.rank, workers.size, compiled
        )
        workers.barrier()
        newest = transformation.pull(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), newest, params)
        workers.barrier()


def test_spare_replicas_make_the_steps_of_one_process(comm, compiled):
    with SpareReplicaStrategy(comm=comm) as strategy:
        transformation = strategies.DistributedOptimizer(KINDS["adam"](), strategy=strategy)
        params = parameters()
        check_against_one_process("adam", transformation, params, comm.rank, comm.size, compiled)


@scenario(optimizer=lambda: None)
def test_each_worker_pushes_when_it_likes_and_rows_go_alone(strategy, server, compiled):
    transformation = strategies.DistributedOptimizer(optax.sgd(1.0), strategy=strategy)
    params = {"table": jnp.zeros((4, 2)), "w": jnp.ones(3)}
    state = transformation.init(params)
    workers = only_workers(server)

    @compiled
    def step(params, indices, values):
        gradients = {"table": strategies.Rows(indices, values), "w": jnp.ones(3)}
        updates, _ = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates)

    def push():
        # Zeros fill up.
        values = jnp.array([[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 2)
        new = jax.block_until_ready(step(params, jnp.array([2, 0, 2, 2, 2]), values))
        done = workers.rank + 1
        assert new["table"][:, 0].tolist() == [-done, 0, -2 * done, 0]
        assert new["w"].tolist() == [1 - done] * 3

    in_turn(server, push)
    workers.barrier()


@scenario(optimizer=lambda: None)
def test_what_cannot_be_wrapped_is_an_error_and_the_next_call_works(strategy, server):
    for transformation, message in [
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "got clip scale"),
        (optax.adam(0.1, eps_root=1e-3), "eps_root=0.001, expected 0"),
        (optax.lion(0.1), "got scale_by_lion"),
        (optax.rmsprop(0.1, eps_in_sqrt=False, initial_scale=1.0), "got one that steps to"),
    ]:
        with pytest.raises(ValueError, match=message):
            strategies.DistributedOptimizer(transformation, strategy=strategy)
    transformation = strategies.DistributedOptimizer(optax.sgd(0.1), strategy=strategy)
    params = parameters()
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        jax.jit(transformation.init)(params)
    with pytest.raises(ValueError, match="expected init first"):
        transformation.update(params, (), params)
    state = transformation.init(params)
    with pytest.raises(ValueError, match="expected params, got None"):
        transformation.update(params, state)
    with pytest.raises(ValueError, match="other parameters than init was given"):
        transformation.update({"w": jnp.ones(1)}, state, {"w": jnp.ones(1)})
    if training(server):
        in_turn(server, lambda: transformation.update(params, state, params))
        server.cluster.workers.barrier()


@scenario(optimizer=lambda: None)
def test_parameters_must_begin_as_the_chiefs(strategy, server):
    transformation = strategies.DistributedOptimizer(optax.sgd(0.1), strategy=strategy)
    chief = server.cluster.training_ranks[0]
    rank = server.cluster.comm.rank
    with pytest.raises(ValueError, match=r"a parameter is not the chief's.*\['w'\]"):
        transformation.init(parameters(shift=float(rank == chief))["layer"])
