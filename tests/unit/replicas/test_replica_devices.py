"""Which devices there are, and what works on them."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fakecupy
import strategies
from requirements import installed, needs
from strategies.cluster import local_devices


@pytest.fixture
def cupy(monkeypatch):
    fake = fakecupy.FakeCupy(devices=2)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "array_api_compat.cupy", fakecupy.ARRAY_API)
    return fake


def test_names_of_devices():
    strategy = strategies.MirroredStrategy(["cpu:3", "/device:CPU:0"])
    assert strategy.devices == ("/cpu:3", "/cpu:0")
    for wrong in ("/job:ps/cpu:0", "/cpu", "/cpu:-1", "", 0, "cpu:0/gpu:0"):
        with pytest.raises(ValueError, match="expected a name such as /cpu:0, /gpu:1 or /tpu:0"):
            strategies.OneDeviceStrategy(wrong)


def test_devices_that_are_listed(cupy):
    assert strategies.devices()[0] == "/cpu:0"
    assert {"/gpu:0", "/gpu:1"} <= set(strategies.devices())
    with pytest.raises(ValueError, match=r"expected /cpu:0, .*/gpu:0, /gpu:1, got '/gpu:2'"):
        strategies.OneDeviceStrategy("/gpu:2")


def test_soft_placement_takes_free_cpus_and_says_so(cupy, caplog):
    with caplog.at_level("INFO", "strategies.cluster.local_devices"):
        strategy = strategies.MirroredStrategy(
            ["/gpu:7", "/cpu:0", "/gpu:0", "/tpu:0"], soft_placement=True
        )
    assert strategy.devices == ("/cpu:1", "/cpu:0", "/gpu:0", "/cpu:2")
    assert [record.getMessage() for record in caplog.records] == [
        "MirroredStrategy: (replica 0): /cpu:1, without /gpu:7",
        "MirroredStrategy: (replica 3): /cpu:2, without /tpu:0",
    ]


def test_a_function_runs_with_its_gpu_selected(cupy):
    def who():
        return cupy.selected[-1].id, strategies.get_replica_context().device

    assert strategies.OneDeviceStrategy("/gpu:1").run(who) == (1, "/gpu:1")
    strategy = strategies.MirroredStrategy(["/gpu:1", "/gpu:0"])
    assert strategy.local_results(strategy.run(who)) == ((1, "/gpu:1"), (0, "/gpu:0"))
    assert cupy.selected[-1].id == 0


def test_a_function_runs_with_its_device_of_jax_selected():
    jax = installed("jax")

    def who():
        (device,) = jax.numpy.zeros(1).devices()
        return device.id

    strategy = strategies.MirroredStrategy([f"/cpu:{i}" for i in (5, 2)])
    assert strategy.local_results(strategy.run(who)) == (5, 2)
    assert strategies.OneDeviceStrategy("/cpu:7").run(who) == 7
    assert strategies.DefaultStrategy().run(who) == 0
    assert "/cpu:7" in strategies.devices()


def test_threads_take_an_array_of_several_devices_apart_at_once():
    jax = installed("jax")
    names = [f"/cpu:{i}" for i in range(4)]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replica",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    whole = [jax.device_put(np.full((2, 3), i, np.float32), everywhere) for i in range(1500)]
    together = threading.Barrier(len(names))

    def check(name):
        for i, array in enumerate(whole):
            together.wait(20)
            mine = local_devices.put(array, name)
            assert mine.devices() == {local_devices.of_jax(name)}
            assert float(mine[1, 2]) == i

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            for done in [pool.submit(check, name) for name in names]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert {len(array.addressable_shards) for array in whole} == {len(names)}


def test_batches_come_to_the_devices_but_for_text(cupy):
    strategy = strategies.MirroredStrategy(["/gpu:0", "/gpu:1"])
    batch = {"x": np.arange(4.0), "names": np.array(["a", "b", "c", "d"])}
    (step,) = strategy.distribute_dataset([batch])
    assert [x.device.id for x in step["x"].values] == [0, 1]
    assert [x.get().tolist() for x in step["x"].values] == [[0.0, 1.0], [2.0, 3.0]]
    assert [names.tolist() for names in step["names"].values] == [["a", "b"], ["c", "d"]]
    # CuPy's arrays come to the host where a replica is there.
    mixed = strategies.MirroredStrategy(["/gpu:0", "/cpu:0"])
    (step,) = mixed.distribute_dataset([cupy.array(np.arange(2.0))])
    assert [type(part) for part in step.values] == [fakecupy.ndarray, np.ndarray]


def test_a_strategy_that_is_given_no_device_moves_nothing():
    jax = installed("jax")
    x = jax.device_put(np.ones(2, np.float32), jax.devices()[3])
    strategy = strategies.DefaultStrategy()
    w = strategy.variable(x)
    (batch,) = strategy.distribute_dataset([x])
    assert w.value.devices() == batch.devices() == {jax.devices()[3]}


def test_replicas_of_torch_share_memory_and_not_gradients():
    torch = installed("torch")
    strategy = strategies.MirroredStrategy(["/cpu:0", "/cpu:1"])
    w = strategy.variable(torch.ones(2, requires_grad=True), name="w")
    optimizer = strategies.SGD(0.5)

    def step(x):
        value = w.value
        assert value is w.value
        assert value.requires_grad
        (value * x).sum().backward()
        strategy.apply_gradients(optimizer, [(value.grad, w)])
        value.grad = None
        return value.data_ptr()

    values = strategies.replicas.PerReplica((1.0, 3.0))
    first, second = strategy.local_results(strategy.run(step, args=(values,)))
    assert first == second == w.value.data_ptr()
    assert w.value.tolist() == [0.0, 0.0]
    assert isinstance(w.value, torch.Tensor)
    assert w.dtype is torch.float32
    with torch.no_grad():
        w.value.add_(1)  # outside, in place, for all
    assert strategy.local_results(strategy.run(lambda: w.value[0].item())) == (1.0, 1.0)
    w.assign(np.array([2.0, 3.0]))
    assert w.value.requires_grad
    assert np.asarray(w).tolist() == [2.0, 3.0]


def test_variables_of_jax_take_another_array_in_place_of_theirs():
    jax = installed("jax")
    strategy = strategies.MirroredStrategy(["/cpu:0", "/cpu:1"])
    start = jax.numpy.ones((3, 2))
    w = strategy.variable(start, name="w", dtype="bfloat16")
    optimizer = strategies.Adam(0.5)

    def step():
        rows = strategies.Rows([0, 2], jax.numpy.ones((2, 2), "bfloat16"))
        strategy.apply_gradients(optimizer, [(rows, w)])

    strategy.run(step)
    assert [str(c.dtype) for c in w.components] == ["bfloat16"] * 2
    np.testing.assert_array_equal(np.asarray(w.value[:, 0], np.float32), [0.5, 1.0, 0.5])
    assert optimizer.state_dict()["step"] == 1
    assert isinstance(start, jax.Array)
    assert float(start.sum()) == 6  # whose memory nobody has changed

    def alone():
        optimizer.apply_gradients([(jax.numpy.ones((3, 2)).astype("bfloat16"), w)])

    with pytest.raises(RuntimeError, match="one of several replicas changes a variable alone"):
        strategy.run(alone)


def test_pytorch_has_no_tpu():
    torch = installed("torch")
    from strategies.cluster import local_devices as devices

    with pytest.raises(ValueError, match="PyTorch has no such device, .* got /tpu:1"):
        devices.put(torch.ones(1), "/tpu:1")


def test_importing_and_naming_cpus_starts_nothing():
    needs("jax", "torch")
    program = """
import sys
import strategies
strategy = strategies.MirroredStrategy(["/cpu:0", "/cpu:1"])
strategy.run(lambda: strategy.variable)
print(strategies.devices())
assert not {"jax", "torch"} & set(sys.modules)
import jax
assert not jax._src.xla_bridge.backends_are_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, check=True, stdout=subprocess.PIPE, timeout=60
    )
    assert done.stdout == "('/cpu:0',)\n"
