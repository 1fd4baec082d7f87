"""`DistributedOptimizer(strategy=)` averages over that strategy's replicas, or says why not."""

import numpy as np
import pytest

import strategies
from requirements import installed

ALONE = {"default": strategies.DefaultStrategy, "one device": strategies.OneDeviceStrategy}
TOGETHER = {
    "mirrored": lambda comm: strategies.MirroredStrategy(comm=comm),
    "multi worker": lambda comm: strategies.MultiWorkerMirroredStrategy(comm),
}
TWO = ["/cpu:0", "/cpu:1"]


def of_arrays():
    w = np.zeros(3)

    def take(optimizer, gradient):
        optimizer.apply_gradients([(gradient, w)])
        return w

    return strategies.SGD(1.0), {}, take


def of_torch():
    torch = installed("torch")
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def take(optimizer, gradient):
        w.grad = torch.from_numpy(gradient)
        optimizer.step()
        return w.detach().numpy()

    return torch.optim.SGD([w], lr=1.0), {"named_parameters": [("w", w)]}, take


def of_optax():
    optax = installed("optax")
    jnp = installed("jax.numpy")

    def take(optimizer, gradient):
        w = jnp.zeros(3)
        updates, _ = optimizer.update(jnp.asarray(gradient), optimizer.init(w), w)
        return np.asarray(optax.apply_updates(w, updates))

    return optax.sgd(1.0), {}, take


KINDS = {"arrays": of_arrays, "torch": of_torch, "optax": of_optax}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_gradients_are_averaged_over_the_ranks_of_the_strategy(comm, name, kind):
    strategy = ALONE[name]() if name in ALONE else TOGETHER[name](comm)
    optimizer, options, take = kind()
    wrapped = strategies.DistributedOptimizer(optimizer, strategy=strategy, **options)
    found = take(wrapped, np.arange(3.0) + comm.rank)
    ranks = [comm.rank] if name in ALONE else range(comm.size)
    np.testing.assert_allclose(found, -np.mean([np.arange(3.0) + r for r in ranks], axis=0))


@pytest.mark.parametrize("kind", [of_torch, of_optax], ids=["torch", "optax"])
def test_a_model_of_another_library_belongs_to_one_replica(comm, kind):
    strategy = strategies.MirroredStrategy(TWO, comm=comm)
    optimizer, options, take = kind()
    with pytest.raises(ValueError, match="belongs to one replica.*one device.*got 2"):
        strategies.DistributedOptimizer(optimizer, strategy=strategy, **options)
    # Without `strategy`, it is the step that finds itself in one of several replicas.
    wrapped = strategies.DistributedOptimizer(optimizer, comm=comm, **options)
    with pytest.raises(ValueError, match="(step|update): .*belongs to one replica.*got 2"):
        strategy.run(lambda: take(wrapped, np.ones(3)))
    np.testing.assert_allclose(take(wrapped, np.ones(3)), -np.ones(3))


@pytest.mark.parametrize("devices", [1, 2])
def test_optax_in_a_program_of_all_devices_is_refused(comm, devices):
    installed("optax")
    names = [f"/cpu:{i}" for i in range(devices)]
    strategy = strategies.TPUStrategy(devices=names, comm=comm)
    optimizer, _, take = of_optax()
    wrapped = strategies.DistributedOptimizer(optimizer, comm=comm)
    with pytest.raises(ValueError, match=r"update: .*strategy\.apply_gradients"):
        strategy.run(take, args=(wrapped, np.ones(3)))


@pytest.mark.parametrize("devices", [1, 2])
def test_an_optimizer_for_arrays_updates_after_a_program_of_all_devices(comm, devices):
    installed("jax")
    names = [f"/cpu:{i}" for i in range(devices)]
    strategy = strategies.TPUStrategy(devices=names, comm=comm)
    w = strategy.variable(np.zeros(3, np.float32), name="w")
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), strategy=strategy)

    def step(x):
        optimizer.apply_gradients([(x.sum(axis=0), w)])

    rows = np.arange(3.0 * strategy.num_replicas_in_sync, dtype=np.float32).reshape(-1, 3)
    for batch in strategy.distribute_dataset([rows]):
        strategy.run(step, args=(batch,))
    np.testing.assert_allclose(w.value, -rows.mean(axis=0), rtol=1e-6)


def test_central_storage_takes_the_optimizer_itself(comm):
    strategy = strategies.CentralStorageStrategy(comm=comm)
    with pytest.raises(ValueError, match="updates on rank 0"):
        strategies.DistributedOptimizer(strategies.SGD(1.0), strategy=strategy)
