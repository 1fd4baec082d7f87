"""Replicas on devices of any library do what one process does with all rows, in NumPy."""

import sys

import numpy as np
import pytest

import collectives as cc
import fakecupy
import strategies
from requirements import installed
from served import opened, training

# 8 devices of JAX in each process: `conftest` asks for them before anybody imports JAX.
KINDS = {
    "numpy": [f"/cpu:{i}" for i in range(2)],
    "torch": [f"/cpu:{i}" for i in range(3)],
    "jax, 1 device": ["/cpu:0"],
    "jax, 8 devices": [f"/cpu:{i}" for i in range(8)],
    "cupy": ["/gpu:1", "/gpu:0"],
}

STRATEGIES = {
    "mirrored": lambda comm, devices: strategies.MirroredStrategy(devices, comm=comm),
    "multi worker": lambda comm, devices: strategies.MultiWorkerMirroredStrategy(
        comm, devices=devices
    ),
    "central storage": lambda comm, devices: strategies.CentralStorageStrategy(devices, comm=comm),
}


class Library:
    """What a test asks of a library: its devices, and arrays of it."""

    def __init__(self, name, devices, make, type_of):
        self.name = name
        self.devices = devices
        self.make = make
        self.type_of = type_of

    def device_of(self, array):
        """Name the device of an array, as strategies do."""
        if self.name.startswith("jax"):
            (device,) = array.devices()
            return f"/cpu:{device.id}"
        return f"/gpu:{array.device.id}" if self.name == "cupy" else "host"

    def on(self, name):
        """Name a device in the way of `device_of`."""
        return name if self.name.startswith("jax") or self.name == "cupy" else "host"

    def host(self, array):
        return array.get() if self.name == "cupy" else np.asarray(array)


@pytest.fixture(params=KINDS)
def library(request, monkeypatch):
    name, devices = request.param, KINDS[request.param]
    if name == "torch":
        torch = installed("torch")
        return Library(name, devices, torch.tensor, torch.Tensor)
    if name.startswith("jax"):
        jax = installed("jax")
        if jax.local_device_count() < 8:
            pytest.fail("conftest asks for 8 devices before JAX starts")
        return Library(name, devices, jax.numpy.array, jax.Array)
    if name == "cupy":
        fake = fakecupy.FakeCupy(devices=2)
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setitem(sys.modules, "array_api_compat.cupy", fakecupy.ARRAY_API)
        # Batches are of NumPy, and come to the devices as all that is not there.
        return Library(name, devices, np.array, fakecupy.ndarray)
    return Library(name, devices, np.array, np.ndarray)


@pytest.fixture(params=STRATEGIES)
def kind(request):
    return STRATEGIES[request.param]


def make_batches(sizes, make):
    random = np.random.default_rng(0)
    whole = [[random.standard_normal((n, k)).astype(np.float32) for k in (6, 2)] for n in sizes]
    return [tuple(map(make, pair)) for pair in whole]


def train(strategy, batches, start, see=lambda *arrays: None):
    with strategy.scope():
        w = strategy.variable(start, name="w")
    optimizer = strategies.Momentum(0.05, 0.9)

    def step(x, y):
        see(x, y, w.value)
        error = x @ w.value - y
        gradient = x.T @ error / max(len(x), 1)
        strategy.apply_gradients(optimizer, [(gradient, w)], examples=len(x))
        return (error * error).sum()

    total = 0.0
    for batch in strategy.distribute_dataset(batches):
        total = strategy.reduce("sum", strategy.run(step, args=batch))
    return w, total


SIZES = [24, 24, 7, 3]


def test_training_on_devices_equals_one_process_on_the_whole_batch(world, kind, library):
    start = np.ones((6, 2), np.float32)
    alone, last = train(strategies.DefaultStrategy(), make_batches(SIZES, np.array), start)

    def check(comm):
        strategy = kind(comm, library.devices)
        assert strategy.num_replicas_in_sync == comm.size * len(library.devices)
        seen = []

        def see(*arrays):
            device = strategies.get_replica_context().device
            seen.extend((device, x) for x in arrays)

        batches = make_batches(SIZES, library.make)
        w, total = train(strategy, batches, library.make(start + comm.rank), see)
        # Between 8 replicas' sums and one: some 30 roundings of float32 at each of 4 steps.
        np.testing.assert_allclose(library.host(w.components[0]), alone.value, rtol=0, atol=3e-5)
        np.testing.assert_allclose(float(library.host(total)), last, rtol=1e-4)
        for device, array in seen:
            assert isinstance(array, library.type_of)
            assert library.device_of(array) == library.on(device)
        for component in w.components:
            own = library.host(component)
            np.testing.assert_array_equal(own, library.host(w.components[0]))
            for theirs in comm.allgather(own[np.newaxis]):
                np.testing.assert_array_equal(theirs, own)

    world.run(check)


def test_variables_are_written_and_read_in_every_way(comm, library):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=library.devices)
    total = comm.size * len(library.devices)
    numbers = np.arange(1, total + 1)
    for synchronization in ("on_write", "on_read"):
        for aggregation in ("sum", "mean", "only_first_replica"):
            start = library.make(np.ones(2, np.float32))
            v = strategy.variable(start, synchronization=synchronization, aggregation=aggregation)
            strategy.run(lambda v=v: v.assign_add(np.full(2, number(), np.float32)))
            own = numbers if synchronization == "on_write" else numbers + 1
            wanted = {"sum": own.sum(), "mean": own.mean(), "only_first_replica": own[0]}
            expected = wanted[aggregation] + (synchronization == "on_write")
            value = v.value
            assert isinstance(value, library.type_of)
            np.testing.assert_allclose(library.host(value), expected, rtol=1e-6)
            for i, component in enumerate(v.components):
                if synchronization == "on_read" and total > 1:
                    assert not np.shares_memory(library.host(value), library.host(component))
                if len(v.components) == len(library.devices):
                    assert library.device_of(component) == library.on(library.devices[i])
    v.assign(library.make(np.zeros(2, np.float32)))
    v.assign_sub(np.full(2, 3.0))
    np.testing.assert_array_equal(library.host(v.value), -3)
    with pytest.raises(ValueError, match=r"wrong shape, expected \(2,\), got \(3,\)"):
        v.assign(library.make(np.zeros(3, np.float32)))
    with pytest.raises(TypeError, match="wrong dtype, expected float32, got complex"):
        v.assign(np.zeros(2, complex))


def number():
    return strategies.get_replica_context().replica_id_in_sync_group + 1


def test_replicas_exchange_arrays_on_their_devices(comm, library):
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=library.devices)
    total = comm.size * len(library.devices)

    def step(value):
        context = strategies.get_replica_context()
        summed = context.all_reduce("sum", value * number())
        rows = context.all_gather(value[:1] * number())
        return summed, rows, value * number(), context.device

    ones = strategy.distribute_dataset([library.make(np.ones((2 * total, 3), np.float32))])
    (result,) = (strategy.run(step, args=(batch,)) for batch in ones)
    for summed, rows, _, device in strategy.local_results(result):
        for array in (summed, rows):
            assert isinstance(array, library.type_of)
            assert library.device_of(array) == library.on(device)
        np.testing.assert_array_equal(library.host(summed), total * (total + 1) / 2)
        np.testing.assert_array_equal(library.host(rows)[:, 0], np.arange(1, total + 1))
    own = result[2]
    joined = strategy.gather(own, 0)
    assert isinstance(joined, library.type_of)
    expected = np.repeat(np.arange(1, total + 1), 2)
    np.testing.assert_array_equal(library.host(joined)[:, 0], expected)
    mean = strategy.reduce("mean", own, axis=0)
    np.testing.assert_allclose(library.host(mean), (total + 1) / 2, rtol=1e-6)


def test_one_device_and_one_that_is_not_there(comm, library):
    device = library.devices[-1]
    strategy = strategies.OneDeviceStrategy(device)
    w = strategy.variable(library.make(np.ones(3, np.float32)))
    strategies.SGD(0.5).apply_gradients([(w.value, w)])
    assert library.device_of(w.value) == library.on(device)
    np.testing.assert_array_equal(library.host(w.value), 0.5)
    with pytest.raises(ValueError, match="no such device, expected .*got '/tpu:0'"):
        strategies.MultiWorkerMirroredStrategy(comm, devices=["/tpu:0"])
    soft = strategies.MultiWorkerMirroredStrategy(
        comm, devices=["/tpu:0", "/cpu:0"], soft_placement=True
    )
    assert soft.devices == ("/cpu:1", "/cpu:0")
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def stepped(strategy, optimizer, batches, w, seen):
    """Train as `train` does, where steps are made elsewhere."""

    def see(*arrays):
        device = strategies.get_replica_context().device
        seen.extend((device, x) for x in arrays)

    def step(x, y):
        see(x, y, w.value)
        error = x @ w.value - y
        gradient = x.T @ error / max(len(x), 1)
        strategy.apply_gradients(optimizer, [(gradient, w)], examples=len(x))

    for batch in strategy.distribute_dataset(batches):
        strategy.run(step, args=batch)


def check_seen(library, seen, w, expected):
    assert seen
    for device, x in seen:
        assert isinstance(x, library.type_of)
        assert library.device_of(x) == library.on(device)
    assert isinstance(w.value, library.type_of)
    np.testing.assert_allclose(library.host(w.value), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.several
def test_parameter_servers_train_on_devices(world, library):
    start = np.ones((6, 2), np.float32)
    alone, _ = train(strategies.DefaultStrategy(), make_batches(SIZES, np.array), start)

    def check(comm):
        with opened(comm) as server:
            optimizer = strategies.Momentum(0.05, 0.9)
            strategy = strategies.parameter_server.ParameterServerStrategy(
                server, optimizer, synchronous=True, devices=library.devices
            )
            w = strategy.variable(library.make(start), name="w")
            if not training(server):
                return
            seen = []
            stepped(strategy, optimizer, make_batches(SIZES, library.make), w, seen)
            server.cluster.workers.barrier()
            check_seen(library, seen, w, alone.value)
            assert w.value is w.value  # made once for each version
            rows = strategy.look_up(w, library.make(np.array([2, 0])))
            assert isinstance(rows, library.type_of)
            np.testing.assert_array_equal(library.host(rows), library.host(w.value)[[2, 0]])
            server.cluster.workers.barrier()
            strategy.assign(w, library.make(2 * start))
            np.testing.assert_array_equal(library.host(w.value), 2 * start)
            np.testing.assert_array_equal(np.asarray(w), 2 * start)
            server.cluster.workers.barrier()

    world.run(check)


def test_spare_replicas_train_on_devices(world, library):
    start = np.ones((6, 2), np.float32)
    alone, _ = train(strategies.DefaultStrategy(), make_batches(SIZES, np.array), start)

    def check(comm):
        optimizer = strategies.Momentum(0.05, 0.9)
        device = library.devices[-1]
        with strategies.spare_replica.SpareReplicaStrategy(comm=comm, device=device) as strategy:
            w = strategy.variable(library.make(start), name="w")
            seen = []
            stepped(strategy, optimizer, make_batches(SIZES, library.make), w, seen)
            check_seen(library, seen, w, alone.value)

    world.run(check)


def test_no_such_device_for_steps_made_elsewhere(comm, library):
    with pytest.raises(ValueError, match="no such device, expected .*got '/tpu:0'"):
        strategies.spare_replica.SpareReplicaStrategy(comm=comm, device="/tpu:0")
    assert comm.allreduce(1, op=cc.SUM) == comm.size
