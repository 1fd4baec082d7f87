"""Transformations of Optax update the variables of strategies whose replicas are in step."""

import numpy as np
import pytest

import strategies
from requirements import installed
from strategies.optimizers import Optax

jax, optax = installed("jax"), installed("optax")
jnp = jax.numpy

DEVICES = ["/cpu:0", "/cpu:1"]
MAKE = {
    "TPU": lambda comm: strategies.TPUStrategy(devices=DEVICES, comm=comm),
    "mirrored": lambda comm: strategies.MirroredStrategy(DEVICES, comm=comm),
    "multi worker": lambda comm: strategies.MultiWorkerMirroredStrategy(comm),
    "central": lambda comm: strategies.CentralStorageStrategy(comm=comm),
}
KINDS = {
    "adam, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    "lion on a schedule": lambda: optax.lion(optax.linear_schedule(0.1, 0.0, 5)),
}


def start():
    random = np.random.default_rng(1)
    return {
        "w": random.standard_normal((6, 2)).astype(np.float32),
        "b": np.zeros(2, np.float32),
        "unused": np.ones(3, np.float32),
    }


def make_batches(rows, count=4):
    random = np.random.default_rng(0)
    return [
        tuple(random.standard_normal((rows, k)).astype(np.float32) for k in (6, 2))
        for _ in range(count)
    ]


def loss_of(w, b, x, y):
    return ((x @ w + b - y) ** 2).mean()


def expected(transformation, batches):
    """Do as one process without a strategy."""
    params = {name: jnp.asarray(value) for name, value in start().items()}
    state = transformation.init(params)
    for x, y in batches:
        gradients = jax.grad(lambda p, x=x, y=y: loss_of(p["w"], p["b"], x, y))(params)
        updates, state = transformation.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def variables_of(strategy):
    return {name: strategy.variable(jnp.asarray(x), name=name) for name, x in start().items()}


def trained(strategy, made, optimizer, batches):
    def step(x, y):
        w, b = made["w"], made["b"]
        gradients = jax.grad(loss_of, (0, 1))(w.value, b.value, x, y)
        pairs = [*zip(gradients, (w, b), strict=True), (None, made["unused"])]
        strategy.apply_gradients(optimizer, pairs, examples=x.shape[0])

    for batch in strategy.distribute_dataset(batches):
        strategy.run(step, args=batch)
    return {name: np.asarray(variable.value) for name, variable in made.items()}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_one_process(comm, name, kind):
    strategy = MAKE[name](comm)
    batches = make_batches(24)
    optimizer = Optax(KINDS[kind]())
    found = trained(strategy, variables_of(strategy), optimizer, batches)
    for key, value in expected(KINDS[kind](), batches).items():
        # Some roundings of numbers around 1 in each step, which Adam's root enlarges.
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-5)
    assert optimizer.step == (0 if name == "central" and comm.rank else len(batches))


def test_training_goes_on_from_a_state_with_the_same_bits(comm):
    batches = make_batches(24)
    whole, first, second = (Optax(optax.adam(0.05)) for _ in range(3))
    one, other = (MAKE["TPU"](comm) for _ in range(2))
    made = variables_of(one)
    trained(one, made, first, batches[:2])
    second.load_state_dict(
        {k: np.asarray(v) if k != "step" else v for k, v in first.state_dict().items()}
    )
    assert set(second.state_dict()) == set(first.state_dict())
    parts = trained(one, made, second, batches[2:])
    for key, value in trained(other, variables_of(other), whole, batches).items():
        np.testing.assert_array_equal(parts[key], value)
    assert second.step == whole.step == 4


def test_wrong_use_is_an_error_on_all_ranks_and_the_next_call_works(comm):
    with pytest.raises(TypeError, match="expected a transformation.* got SGD"):
        Optax(strategies.SGD(0.1))
    strategy = MAKE["TPU"](comm)
    made = variables_of(strategy)
    w, gradient = made["w"], jnp.ones((6, 2))
    optimizer = Optax(optax.adam(0.1))
    for given, pairs, kind, message in [
        (optax.sgd(0.1), [(gradient, w)], TypeError, r"optimizers\.Optax\(transformation\)"),
        (optimizer, [(strategies.Rows([0], jnp.ones((1, 2))), w)], TypeError, "got Rows"),
    ]:
        with pytest.raises(kind, match=message):
            strategy.apply_gradients(given, pairs)
    with pytest.raises(TypeError, match="holds an array of JAX, got ndarray"):
        optimizer.apply_gradients([(np.ones(2), np.ones(2))])
    strategy.apply_gradients(optimizer, [(gradient, w)])
    with pytest.raises(ValueError, match=r"expected \['w'\], got \['b'\]"):
        strategy.apply_gradients(optimizer, [(jnp.ones(2), made["b"])])
    with pytest.raises(ValueError, match="bad state"):
        optimizer.load_state_dict({"step": 1, "first/w": np.ones(1)})
    optimizer.load_state_dict({"step": 1, "state/0": np.ones(1)})
    with pytest.raises(ValueError, match="or another transformation"):
        strategy.apply_gradients(optimizer, [(gradient, w)])
    optimizer.load_state_dict({"step": 0})
    strategy.apply_gradients(optimizer, [(gradient, w)])
    np.testing.assert_allclose(w.value, start()["w"] - 0.2, rtol=0, atol=1e-5)
