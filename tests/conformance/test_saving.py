"""Saving and restoring together: replicas once, generators of each rank."""

import functools
import shutil

import numpy as np
import pytest
from calls import folder_of

import strategies
from requirements import installed
from strategies import errors
from strategies.checkpoint import Saver
from strategies.input import ShardedInput
from strategies.variables.partition import fixed_size


def test_all_ranks_go_on_where_they_were(comm):
    files = {name: [f"{name}{i}" for i in range(5)] for name in "abc"}

    def things(comm):
        return {
            "weights": np.zeros(3),
            "own": np.random.default_rng(comm.rank),
            "same": np.random.default_rng(7),
            "input": ShardedInput(
                list(files), files.get, rank=comm.rank, size=comm.size, policy="data"
            ),
        }

    folder, used = folder_of(comm), things(comm)
    used["weights"][:] = 4
    used["own"].random(comm.rank)
    next(used["input"])
    with strategies.CheckpointManager(folder, comm) as checkpoints:
        path = Saver(checkpoints, **used, epoch=2).save(5)
        assert comm.allgather_object(path) == [path] * comm.size
        fresh = things(comm)
        saver = Saver(checkpoints, **fresh, epoch=0)
        assert saver.restore() == 5
        found = checkpoints.restore_or_none()
    assert saver["epoch"] == 2
    assert fresh["weights"].tolist() == [4, 4, 4]
    assert fresh["own"].random() == used["own"].random()
    assert fresh["same"].random() == used["same"].random()
    assert list(fresh["input"]) == list(used["input"])
    # One description of what is equal, one for each rank of what is not.
    assert "ranks" not in found.metadata["things"]["same"]
    assert ("ranks" in found.metadata["things"]["own"]) == (comm.size > 1)


def test_variables_on_a_task(comm):
    folder, last = folder_of(comm), comm.size - 1
    start = np.arange(6.0).reshape(3, 2)
    with (
        strategies.rpc.Service(comm) as service,
        strategies.CheckpointManager(folder, comm) as checkpoints,
    ):
        one = strategies.variables.shared_variable(
            start, service=service, shared_name="one", task=last
        )
        parts = strategies.variables.shared_partitioned_variable(
            2 * start, service=service, shared_name="parts", tasks=[0, last],
            partitioner=fixed_size(2),
        )  # fmt: skip
        saver = Saver(checkpoints, model={"one": one, "parts": parts})
        saver.save(1)
        if comm.rank == last:
            one.assign(start + 1)
            parts.assign(start + 1)
        comm.barrier()
        assert one.read().value[0, 0] == 1
        comm.barrier()
        assert saver.restore() == 1
        np.testing.assert_array_equal(one.read().value, start)
        np.testing.assert_array_equal(parts.read().value, 2 * start)
        assert one.read().version == 2, "assigned by a task, and by one rank"
        comm.barrier()


def test_random_keys_of_each_rank(comm):
    jax = installed("jax")
    checkpoints = strategies.CheckpointManager(folder_of(comm), comm)
    keys = {"own": jax.random.key(comm.rank), "same": jax.random.key(7)}
    Saver(checkpoints, keys=keys).save(1)
    saver = Saver(checkpoints, keys=dict.fromkeys(keys, jax.random.key(99)))
    saver.restore()
    for name, key in keys.items():
        assert (jax.random.key_data(saver["keys"][name]) == jax.random.key_data(key)).all()
    own = [f"keys/own/rank-{rank}" for rank in range(comm.size)]
    names = {"keys/same", *(own if comm.size > 1 else ["keys/own"])}
    assert set(checkpoints.restore_or_none().tensors) == names
    checkpoints.close()


def test_fewer_ranks_and_more(comm):
    folder = folder_of(comm)
    half = comm.split(0 if comm.rank < (comm.size + 1) // 2 else None)
    rng = np.random.default_rng(comm.rank)
    expected = rng.random(2)
    if half is not None:
        before = np.random.default_rng(comm.rank)
        before.random()
        Saver(strategies.CheckpointManager(folder, half), rng=before).save(1)
    comm.barrier()
    again = np.random.default_rng(comm.rank)
    Saver(strategies.CheckpointManager(folder, comm), rng=again).restore()
    # Generators that differ go on on the ranks that were there; one that is equal on all goes
    # on everywhere.
    if half is not None:
        assert again.random() == expected[1]
    elif (comm.size + 1) // 2 > 1:
        assert again.random() == expected[0]


def test_one_rank_alone_asks_for_the_newest_and_the_best(comm):
    folder = folder_of(comm)
    with strategies.CheckpointManager(folder, comm, best="min", background=True) as checkpoints:
        saver = Saver(checkpoints, weights=np.ones(2))
        for step, metric in ((1, 0.5), (2, 0.25), (3, 0.75)):
            saver.save(step, metric=metric)
        if comm.rank == 0:  # which writes
            assert checkpoints.latest().name == "step-000003"
        checkpoints.wait()
        if comm.rank == comm.size - 1:
            assert checkpoints.latest().name == "step-000003"
            assert checkpoints.best().name == "step-000002"
        comm.barrier()


def test_what_one_rank_cannot_do_is_an_error_on_all(comm):
    last = comm.rank == comm.size - 1
    folder = folder_of(comm)
    checkpoints = strategies.CheckpointManager(folder, comm)
    bad = Saver(checkpoints, thing={1} if last else 1, rng=np.random.default_rng(comm.rank))
    with pytest.raises(errors.InvalidArgumentError, match=r"got set \(name: thing\)"):
        bad.save(1)
    Saver(checkpoints, weights=np.ones(2)).save(2)
    mine = np.zeros(3 if last else 2)
    with pytest.raises(errors.InvalidArgumentError, match=r"expected \(3,\)"):
        Saver(checkpoints, weights=mine).restore()
    assert not mine.any()
    good = np.zeros(2)
    assert Saver(checkpoints, weights=good).restore() == 2
    assert good.all()
    checkpoints.close()


def test_an_error_in_the_background_is_one_on_all(comm):
    folder = folder_of(comm)
    with strategies.CheckpointManager(folder, comm, background=True) as checkpoints:
        saver = Saver(checkpoints, weights=np.ones(2))
        saver.save(1)
        checkpoints.wait()
        if comm.rank == 0:
            shutil.rmtree(folder)
        saver.save(2)
        next_call = checkpoints.latest  # of one process alone, it raises the error
        if comm.size > 1:
            assert comm.rank or checkpoints.latest() is None  # and leaves it to all ranks
            next_call = functools.partial(saver.save, 3)
        with pytest.raises(errors.NotFoundError, match="save: no such file"):
            next_call()
        if comm.rank == 0:
            checkpoints.close()  # the lock was a file of the folder that is gone
        path = saver.save(4)
    assert checkpoints.latest() == path
