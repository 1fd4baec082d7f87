"""Ranks in step: wrong gradients, input that fails, batches and checkpoints that all share."""

import numpy as np
import pytest

import collectives as cc
import strategies
from strategies.errors import InvalidArgumentError
from strategies.input import batch_split, in_step


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
