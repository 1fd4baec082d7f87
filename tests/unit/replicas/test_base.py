"""Scopes and contexts of strategies, in one process."""

import re
import threading

import numpy as np
import pytest

import strategies

STRATEGIES = [strategies.DefaultStrategy, strategies.OneDeviceStrategy]


def test_outside_of_any_scope_the_default_strategy_holds():
    default = strategies.get_strategy()
    assert isinstance(default, strategies.DefaultStrategy)
    one = strategies.OneDeviceStrategy("/cpu:0")
    with one.scope(), one.scope():
        assert strategies.get_strategy() is one
    assert strategies.get_strategy() is default


def test_a_scope_belongs_to_its_thread():
    seen = []
    with strategies.OneDeviceStrategy().scope():
        thread = threading.Thread(target=lambda: seen.append(strategies.get_strategy()))
        thread.start()
        thread.join(10)
    assert isinstance(seen[0], strategies.DefaultStrategy)


def test_mixing_strategies_is_an_error():
    with (
        strategies.OneDeviceStrategy().scope(),
        pytest.raises(RuntimeError, match="got DefaultStrategy inside OneDeviceStrategy"),
        strategies.DefaultStrategy().scope(),
    ):
        pass


def test_an_unknown_device_is_an_error():
    with pytest.raises(ValueError, match=r"no such device, expected /cpu:0, .* got '/gpu:0'"):
        strategies.OneDeviceStrategy("/gpu:0")
    for bad in (["/cpu:0"], 0, "cpu", "/job:ps/cpu:0"):
        with pytest.raises(ValueError, match=f"a name such as .*, got {re.escape(repr(bad))}"):
            strategies.OneDeviceStrategy(bad)
    with pytest.raises(ValueError, match=r"expected different devices, .* \['/cpu:0', '/cpu:0'\]"):
        strategies.MirroredStrategy(["/cpu:0", "cpu:0"])
    with pytest.raises(TypeError, match="not a list of names, got '/cpu:0'"):
        strategies.MirroredStrategy("/cpu:0")


@pytest.mark.parametrize("make", STRATEGIES)
def test_one_replica_gets_everything(make):
    strategy = make()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.is_chief
    batches = [np.arange(3), np.arange(5)]
    for shared, batch in zip(strategy.distribute_dataset(batches), batches, strict=True):
        assert shared is batch
    contexts = []
    own = strategy.distribute_datasets_from_function(lambda c: contexts.append(c) or batches)
    assert len(list(own)) == 2
    assert contexts == [strategies.replicas.InputContext(1, 0, 1)]
    assert strategy.reduce("mean", np.array([1.0, 3.0]), axis=0) == 2.0
    assert strategy.reduce("mean", [1, 2], axis=None) == [1.0, 2.0]
    assert strategy.reduce("mean", np.array([1, 2]), axis=0) == 1.5


def test_run_calls_the_function_in_the_replica_context():
    strategy = strategies.DefaultStrategy()
    assert strategy.run(lambda a, b: a + b, args=(1,), kwargs={"b": 2}) == 3
    with pytest.raises(ValueError, match="not a list or tuple of arguments, got int"):
        strategy.run(abs, args=1)
    for method in (
        lambda: strategy.reduce("sum", 1.0),
        lambda: strategy.run(abs, args=(1,)),
        lambda: strategy.variable(0.0),
        lambda: strategy.scope().__enter__(),
    ):
        with pytest.raises(RuntimeError, match="called inside a replica"):
            strategy.run(method)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert strategy.run(lambda: "usable") == "usable"


def test_variables_have_unique_names_a_shape_and_a_dtype():
    strategy = strategies.DefaultStrategy()
    names = [strategy.variable(0.0).name for _ in range(3)]
    assert names == ["variable", "variable_1", "variable_2"]
    w = strategy.variable(lambda: [[1, 2]], name="w", dtype=np.float32)
    assert (w.shape, w.dtype, repr(w)) == (
        (1, 2),
        np.float32,
        "Variable(name='w', shape=(1, 2), dtype=float32)",
    )
    with pytest.raises(ValueError, match="this name is taken, expected a new one, got 'w'"):
        strategy.variable(0.0, name="w")
    w.assign([[3, 4]])
    np.testing.assert_array_equal(np.asarray(w), [[3, 4]])
    with pytest.raises(ValueError, match=r"expected \(1, 2\), got \(2,\) \(variable: w\)"):
        w.assign([3, 4])
    with pytest.raises(TypeError, match="expected float32, got complex128"):
        w.assign([[1j, 2]])


def test_how_variables_are_combined_is_one_of_some_words():
    strategy = strategies.DefaultStrategy()
    v = strategy.variable(1.0, synchronization="Auto", aggregation="Sum")
    assert (v.synchronization, v.aggregation) == ("on_write", "sum")
    with pytest.raises(ValueError, match="no such synchronization, expected .* got 'none'"):
        strategy.variable(0.0, synchronization="none")
    with pytest.raises(ValueError, match="no such aggregation, .* none sum mean .* got 'max'"):
        strategy.variable(0.0, aggregation="max")
    with pytest.raises(ValueError, match="integers have no mean .* got int64"):
        strategy.variable(1, aggregation="mean", dtype=np.int64)


def test_a_global_batch_that_cannot_be_shared_evenly_is_an_error():
    context = strategies.replicas.InputContext(2, 1, 3)
    assert context.get_per_replica_batch_size(12) == 4
    with pytest.raises(ValueError, match="expected a multiple of 3 replicas, got 10"):
        context.get_per_replica_batch_size(10)


def test_a_distributed_optimizer_wants_an_optimizer():
    with pytest.raises(TypeError, match="has no apply_gradients, .* got float"):
        strategies.DistributedOptimizer(0.1)
