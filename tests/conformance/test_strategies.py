"""Training in step: any number of ranks does what one process does on the whole batch."""

import numpy as np
import pytest

import collectives as cc
import strategies
from strategies.errors import InvalidArgumentError
from strategies.input import batch_split, in_step


def make_variables(strategy, seed):
    random = np.random.default_rng(seed)
    return [
        strategy.variable(random.standard_normal((6, 4)).astype(np.float32), name="w"),
        strategy.variable(np.zeros(4, np.float32), name="b"),
    ]


def linear_step(variables, x, y):
    """Gradients of the mean squared error of a linear model; NaN for no rows, as NumPy's mean."""
    w, b = (v.value for v in variables)
    error = (x @ w + b - y) * 2
    with np.errstate(invalid="ignore"):
        return [x.T @ error / np.float32(len(x)), error.sum(axis=0) / np.float32(len(x))]


def train(strategy, optimizer, batches, seed=3):
    with strategy.scope():
        variables = make_variables(strategy, seed)
    for x, y in strategy.distribute_dataset(batches):
        gradients = strategy.run(linear_step, args=(variables, x, y))
        pairs = zip(gradients, variables, strict=True)
        if hasattr(optimizer, "comm"):  # averages over ranks
            optimizer.apply_gradients(pairs, examples=len(x))
        else:
            optimizer.apply_gradients(pairs)
    return variables


def make_batches(sizes):
    random = np.random.default_rng(0)
    return [
        (
            random.standard_normal((n, 6)).astype(np.float32),
            random.standard_normal((n, 4)).astype(np.float32),
        )
        for n in sizes
    ]


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda: strategies.SGD(0.05), lambda: strategies.Momentum(0.02, 0.9)],
    ids=["sgd", "momentum"],
)
def test_training_equals_one_process_on_the_whole_batch(world, make_optimizer):
    # The last batches have rows for some ranks only.
    batches = make_batches([12] * 40 + [7, 3, 1])
    alone = train(strategies.DefaultStrategy(), make_optimizer(), batches)

    def check(comm):
        strategy = strategies.MultiWorkerMirroredStrategy(comm)
        optimizer = strategies.DistributedOptimizer(make_optimizer(), comm=comm)
        ours = train(strategy, optimizer, batches, seed=3 + comm.rank)  # rank 0's values count
        assert optimizer.step == len(batches)
        for own, expected in zip(ours, alone, strict=True):
            np.testing.assert_allclose(own.value, expected.value, rtol=0, atol=1e-5)
            everyones = comm.allgather(own.value[np.newaxis])
            np.testing.assert_array_equal(everyones, np.broadcast_to(own.value, everyones.shape))

    world.run(check)


def test_gradients_may_be_missing_on_some_ranks_or_on_all(comm):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    here, nowhere = np.zeros(2, np.float32), np.ones(2, np.float32)
    gradient = np.full(2, 6.0, np.float32) if comm.rank == 0 else None
    optimizer.apply_gradients([(gradient, here), (None, nowhere)])
    np.testing.assert_allclose(here, -6.0 / comm.size, rtol=1e-6)
    np.testing.assert_array_equal(nowhere, 1)


def test_a_wrong_gradient_on_one_rank_is_an_error_on_all_and_changes_nothing(comm):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    variable = strategies.Variable(np.zeros(3), name="w")
    shape = 4 if comm.rank == comm.size - 1 else 3
    with pytest.raises(ValueError, match=r"expected \(3,\), got \(4,\) \(variable: w\)"):
        optimizer.apply_gradients([(np.ones(shape), variable)])
    with pytest.raises(ValueError, match="no rank has an example"):
        optimizer.apply_gradients([(np.ones(3), variable)], examples=0)
    np.testing.assert_array_equal(variable.value, 0)
    optimizer.apply_gradients([(np.ones(3), variable)])
    np.testing.assert_array_equal(variable.value, -1)


def test_variables_in_another_order_on_one_rank_are_one_clear_error_on_all(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    shape = (2, 3) if comm.rank == 1 else (3, 2)
    if comm.size == 1:
        return
    with pytest.raises(cc.MismatchError, match=r"shape is \(3, 2\) on .*, \(2, 3\) on rank 1"):
        strategy.variable(np.zeros(shape), name="w")


def test_reduce_counts_rows_and_not_replicas(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    rows = np.arange(comm.rank + 1, dtype=np.float64)  # 1, 2, 3, ... rows
    everything = np.concatenate([np.arange(r + 1.0) for r in range(comm.size)])
    assert strategy.reduce("SUM", rows, axis=0) == everything.sum()
    np.testing.assert_allclose(strategy.reduce("mean", rows, axis=0), everything.mean())
    nested = strategy.reduce("mean", {"a": comm.rank, "b": (1.0, [2.0])})
    assert nested["a"] == (comm.size - 1) / 2
    assert nested["b"] == (1.0, [2.0])
    with pytest.raises(ValueError, match="unknown op, expected 'sum' or 'mean', got 'max'"):
        strategy.reduce("max", rows)
    with pytest.raises(ValueError, match="no such axis"):
        strategy.reduce("sum", rows, axis=1)


def test_ranks_that_run_out_of_data_stay_in_step(comm):
    batches = [
        {"x": np.full((2, 3), comm.rank, np.float32), "y": np.zeros(2, np.int64)}
    ] * comm.rank  # rank 0 never has any, and learns the structure from the others
    seen = list(in_step(batches, comm))
    assert len(seen) == comm.size - 1
    for number, batch in enumerate(seen):
        rows = 2 if number < comm.rank else 0
        assert batch["x"].shape == (rows, 3)
        assert batch["x"].dtype == np.float32
        assert batch["y"].shape == (rows,)
        assert batch["y"].dtype == np.int64


@pytest.mark.parametrize("kind", [InvalidArgumentError, ValueError, OSError])
def test_an_error_in_one_ranks_input_is_raised_on_all_in_the_same_step(comm, kind):
    class Broken(Exception):
        pass

    def batches(comm):
        yield np.zeros((1, 2))
        if comm.rank == comm.size - 1:
            raise kind("shard-3.csv:17: a field is no number")
        yield np.zeros((1, 2))

    iterator = in_step(batches(comm), comm)
    next(iterator)
    expected = kind if comm.rank == comm.size - 1 or kind is not OSError else RuntimeError
    with pytest.raises(expected, match=r"shard-3\.csv:17: a field is no number") as caught:
        next(iterator)
    if comm.rank < comm.size - 1:
        assert f"(input of rank {comm.size - 1} of {comm.size})" in str(caught.value)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_an_error_of_a_function_that_makes_batches_is_raised_on_all(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)

    def dataset_fn(context):
        if context.input_pipeline_id == comm.size - 1:
            raise InvalidArgumentError("no files for this rank")
        return [np.ones(1)]

    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="no files for this rank"):
            next(strategy.distribute_datasets_from_function(dataset_fn))
    assert strategy.reduce("sum", 1) == comm.size


def test_global_batches_are_shared_without_loss(comm):
    strategy = strategies.MultiWorkerMirroredStrategy(comm)
    batches = [(np.arange(n), np.arange(n) * 2.0) for n in (8, 7, 1)]
    for (x, y), (ours, double) in zip(batches, strategy.distribute_dataset(batches), strict=True):
        np.testing.assert_array_equal(comm.allgather(ours), x)
        np.testing.assert_array_equal(comm.allgather(double), y)
    with pytest.raises(ValueError, match="no common number of rows"):
        batch_split.cut((np.zeros(2), np.zeros(3)), [1, 1])


def test_checkpoints_reach_every_rank_and_another_number_of_ranks(comm, tmp_path):
    folder = comm.broadcast_object(str(tmp_path))
    tensors = {"w": np.arange(6.0).reshape(2, 3), "step": np.asarray(5)}
    with strategies.CheckpointManager(folder, comm) as manager:
        assert manager.restore_or_none() is None
        manager.save(tensors, step=5, metadata={"epoch": 2})
    half = comm.split(comm.rank % 2)
    found = strategies.CheckpointManager(folder, half).restore_or_none()
    assert (found.step, found.metadata) == (5, {"epoch": 2})
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor)
