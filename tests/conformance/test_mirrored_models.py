"""A model with a copy per replica learns what one process learns from all rows.

Keras needs its backend before its import: `tests/documents/keras_checks.py` has its checks.
"""

import numpy as np
import pytest

import strategies
from requirements import installed

DEVICES = ["/cpu:0", "/cpu:1"]
STEPS, ROWS = 4, 12

# Float32: a gradient is a sum of 12 rows with fewer than 100 roundings, in another order for each
# number of replicas. Momentum adds up the errors of 4 steps, up to four times; weights are below 4.
ALIKE = {"rtol": 0, "atol": 4 * 4 * 100 * 4 * 2.0**-24}


def torch_model():
    """Two layers whose first weight is used twice."""
    torch = installed("torch")

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = torch.nn.Linear(6, 3)
            self.decode = torch.nn.Linear(6, 3, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return torch.tanh(self.encode(x)) + self.decode(x)

    return Tied()


def nnx_model():
    """The same over Flax."""
    nnx, jnp = installed("flax.nnx"), installed("jax.numpy")

    class Tied(nnx.Module):
        def __init__(self):
            self.encode = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.decode = nnx.Linear(6, 3, use_bias=False, rngs=nnx.Rngs(0))
            self.decode.kernel = self.encode.kernel

        def __call__(self, x):
            return jnp.tanh(self.encode(x)) + self.decode(x)

    return Tied()


def torch_norm():
    return installed("torch").nn.BatchNorm1d(6)


def nnx_norm():
    nnx = installed("flax.nnx")
    return nnx.BatchNorm(6, momentum=0.9, rngs=nnx.Rngs(0))


LIBRARIES = {
    "torch": (torch_model, torch_norm, "torch", "as_tensor"),
    "nnx": (nnx_model, nnx_norm, "jax.numpy", "asarray"),
}

STRATEGIES = {
    "mirrored": lambda comm: strategies.MirroredStrategy(DEVICES, comm=comm),
    "multi worker": lambda comm: strategies.MultiWorkerMirroredStrategy(comm, devices=DEVICES),
    "central storage": lambda comm: strategies.CentralStorageStrategy(DEVICES, comm=comm),
    "tpu": lambda comm: strategies.TPUStrategy(devices=DEVICES, comm=comm),
}

CASES = [
    (library, strategy)
    for library in LIBRARIES
    for strategy in STRATEGIES
    if (library, strategy) != ("torch", "tpu")
]


@pytest.fixture(params=CASES, ids=lambda case: ", ".join(case))
def case(request):
    """Return the functions that make a model, a batch norm, an array, and a strategy."""
    library, strategy = request.param
    model, norm, module, convert = LIBRARIES[library]
    return model, norm, getattr(installed(module), convert), STRATEGIES[strategy]


def batches(sizes):
    random = np.random.default_rng(0)
    return [tuple(random.standard_normal((n, k)).astype(np.float32) for k in (6, 3)) for n in sizes]


def train(strategy, model, array, optimizer, data):
    """Train with the mean square; return the last loss."""

    def step(x, y):
        x, y = array(x), array(y)
        return model.minimize(
            optimizer, lambda net: ((net(x) - y) ** 2).mean(), examples=x.shape[0]
        )

    for batch in strategy.distribute_dataset(data):
        loss = strategy.run(step, args=batch)
    return strategy.reduce("mean", loss)


def state_of(model):
    return {name: np.asarray(value).copy() for name, value in model.state_dict().items()}


def start_of(model):
    """Return weights by name; the same for both libraries, and on all ranks."""
    random = np.random.default_rng(1)
    return {
        name: random.standard_normal(np.shape(value)).astype(np.float32) / 2
        for name, value in model.state_dict().items()
    }


def mirrored(strategy, make, shift=0.0):
    """Mirror a model with weights of a seed, which differ between ranks by `shift`."""
    plain = strategies.DefaultStrategy().mirror(make())
    plain.load_state_dict({name: value + shift for name, value in start_of(plain).items()})
    return strategy.mirror(plain.export())


def same_on_all(comm, state):
    for name, value in state.items():
        for other in comm.allgather(value[np.newaxis]):
            np.testing.assert_array_equal(other, value, err_msg=name)


def test_replicas_learn_what_one_process_learns_from_all_rows(comm, case):
    make, _, array, strategy_of = case
    # The last batches have fewer rows than there are replicas.
    data = batches([ROWS] * STEPS + [3, 1])
    one, strategy = strategies.DefaultStrategy(), strategy_of(comm)
    alone, ours = mirrored(one, make), mirrored(strategy, make, shift=comm.rank)
    for replicas, model in ((one, alone), (strategy, ours)):
        train(replicas, model, array, strategies.Momentum(0.05, 0.9), data)
    state = state_of(ours)
    assert len(state) == 2  # the weight is tied
    for name, expected in state_of(alone).items():
        np.testing.assert_allclose(state[name], expected, err_msg=name, **ALIKE)
    same_on_all(comm, state)
    for variable in ours.variables:
        for component in strategy.local_results(variable):
            np.testing.assert_array_equal(component.tolist(), variable.value.tolist())


def test_statistics_of_a_batch_norm_are_those_of_a_replica_and_read_as_their_mean(comm, case):
    _, norm, array, strategy_of = case
    strategy = strategy_of(comm)
    model = strategy.mirror(norm())
    total = strategy.num_replicas_in_sync
    x = np.random.default_rng(2).standard_normal((4 * total, 6)).astype(np.float32)

    def step(part):
        return model.minimize(
            strategies.SGD(0.0), lambda net: (net(array(part)) ** 2).mean(), examples=4
        )

    (part,) = strategy.distribute_dataset([x])
    strategy.run(step, args=(part,))
    state = state_of(model)
    (mean,) = [value for name, value in state.items() if name.endswith("mean")]
    # A tenth of the means of the replicas, from 0 on: a few roundings of numbers below 1.
    np.testing.assert_allclose(mean, 0.1 * x.mean(axis=0), rtol=0, atol=8 * 2.0**-24)
    own = next(v for v in model.variables if v.name.endswith("mean"))
    for i, component in enumerate(strategy.local_results(own)):
        # Process r of P takes the parts r, r + P, ...
        first = 4 * (comm.rank + i * comm.size)
        expected = 0.1 * x[first : first + 4].mean(axis=0)
        np.testing.assert_allclose(component, expected, rtol=0, atol=8 * 2.0**-24)
    same_on_all(comm, state)


def test_a_saver_stores_one_copy_that_another_strategy_restores(comm, case, tmp_path):
    make, norm, array, strategy_of = case
    strategy = strategy_of(comm)
    folder = comm.broadcast_object(str(tmp_path))
    models = {"model": mirrored(strategy, make), "norm": strategy.mirror(norm(), name="norm")}
    with strategies.CheckpointManager(folder, comm) as checkpoints:
        saver = strategies.checkpoint.Saver(checkpoints, **models)
        saved = {name: state_of(model) for name, model in models.items()}
        saver.save(1)
        train(strategy, models["model"], array, strategies.SGD(0.5), batches([ROWS]))
        assert any((state_of(models["model"])[n] != v).any() for n, v in saved["model"].items())
        assert saver.restore() == 1
    for name, model in models.items():
        for part, value in state_of(model).items():
            np.testing.assert_array_equal(value, saved[name][part])
    one = strategies.DefaultStrategy()
    plain = {"model": one.mirror(make()), "norm": one.mirror(norm(), name="norm")}
    with strategies.CheckpointManager(folder, comm) as checkpoints:
        assert strategies.checkpoint.Saver(checkpoints, **plain).restore() == 1
    for name, model in plain.items():
        for part, value in state_of(model).items():
            np.testing.assert_array_equal(value, saved[name][part])


def test_apply_and_export_return_the_current_model(comm, case):
    make, _, array, strategy_of = case
    strategy = strategy_of(comm)
    model = mirrored(strategy, make)
    ((x, y),) = batches([ROWS])
    train(strategy, model, array, strategies.SGD(0.5), [(x, y)])
    shown = strategy.run(lambda: model.apply(lambda net: net(array(x)) * 1))
    plain = model.export()
    for result in strategy.local_results(shown):
        # The same sums, perhaps compiled: 6 products each.
        np.testing.assert_allclose(
            result.tolist(), plain(array(x)).tolist(), rtol=0, atol=32 * 2.0**-24
        )


def test_a_failed_step_leaves_no_gradients_behind(comm):
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(DEVICES, comm=comm)
    model = strategy.mirror(torch.nn.Linear(1, 1, bias=False))
    model.load_state_dict({"weight": torch.ones(1, 1)})

    def broken(net):
        net.weight.sum().backward()
        raise KeyError("broken")

    with pytest.raises(Exception, match="broken"):
        strategy.run(lambda: model.minimize(strategies.SGD(1.0), broken))
    strategy.run(lambda: model.minimize(strategies.SGD(1.0), lambda net: net.weight.sum()))
    assert model.state_dict()["weight"].item() == 0.0


def test_frozen_parameters_stay_and_replaced_buffers_are_kept(comm):
    torch = installed("torch")

    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.bias.requires_grad_(False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls = self.calls + 1  # another tensor
            return super().forward(x)

    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=DEVICES)
    model = strategy.mirror(Counting())
    before = state_of(model)
    for _ in range(2):
        strategy.run(
            lambda: model.minimize(strategies.SGD(1.0), lambda net: net(torch.ones(1, 2)).sum())
        )
    after = state_of(model)
    np.testing.assert_array_equal(after["bias"], before["bias"])
    # Gradients of ones are ones, and subtracted without loss but for one rounding each.
    np.testing.assert_allclose(after["weight"], before["weight"] - 2, rtol=0, atol=2.0**-22)
    assert after["calls"] == 2


def test_dropout_of_nnx_differs_between_replicas_and_steps(comm):
    nnx, jnp = installed("flax.nnx"), installed("jax.numpy")
    strategy = strategies.TPUStrategy(devices=DEVICES, comm=comm)
    model = strategy.mirror(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    def drawn():
        return model.apply(lambda net: net(jnp.ones((1, 64))))

    masks = [np.array(strategy.gather(strategy.run(drawn), 0)) for _ in range(2)]
    assert len({mask.tobytes() for mask in np.concatenate(masks)}) == 4 * comm.size


def lazy():
    return installed("torch").nn.LazyLinear(1)


def on_meta():
    return installed("torch").nn.Linear(1, 1, device="meta")


def of_torch():
    return installed("torch").nn.Linear(1, 1)


REFUSALS = {
    "another kind": ("mirrored", dict, TypeError, "expected a PyTorch module.*got dict"),
    "lazy": ("mirrored", lazy, ValueError, r"no value yet.*tensor: weight"),
    "on meta": ("mirrored", on_meta, ValueError, r"no value yet.*tensor: weight"),
    "empty": ("mirrored", lambda: installed("torch").nn.Tanh(), ValueError, "has no arrays"),
    "torch on tpu": ("tpu", of_torch, ValueError, "computes with JAX.*got Tensor"),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_models_that_cannot_be_mirrored_are_refused_on_all_ranks(comm, row):
    kind, make, error, text = REFUSALS[row]
    if kind == "tpu":
        installed("jax")
    installed("torch")
    with pytest.raises(error, match=text):
        STRATEGIES[kind](comm).mirror(make())


def test_wrong_calls_of_a_mirrored_model(comm):
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(DEVICES, comm=comm)
    plain = torch.nn.Linear(1, 1)
    model = strategy.mirror(plain)
    for call in (model.apply, lambda fn: model.minimize(strategies.SGD(0.1), fn)):
        with pytest.raises(RuntimeError, match="outside of a replica, expected a call inside run"):
            call(lambda net: net.weight.sum())
    with pytest.raises(ValueError, match="this name is taken"):
        strategy.mirror(plain)
    with pytest.raises(KeyError, match="weight"):
        model.load_state_dict({})
