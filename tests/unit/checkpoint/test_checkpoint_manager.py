"""The collective side of checkpoints, with ranks as threads."""

import os

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
from inprocess import run_ranks
from strategies import errors
from strategies.checkpoint import checkpoint
from strategies.checkpoint.checkpoint_manager import CheckpointManager


def in_step(size, work):
    """Run `work(comm)` on every rank; give the results or exceptions, in rank order."""

    def one(comm):
        try:
            return work(comm)
        except Exception as error:
            return error

    return run_ranks(size, one)


def manager_of(tmp_path, comm, **options):
    """Only rank 0 has the directory: the others' must never be touched."""
    where = tmp_path / "run" if comm.rank == 0 else tmp_path / f"no disk on rank {comm.rank}"
    return CheckpointManager(where, comm, **options)


TENSORS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([1.5, np.nan], ml_dtypes.bfloat16),
    "flag": np.array(True),
    "none": np.empty((0, 2)),
    "step": np.array(7),
}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rank_0_writes_and_all_restore_the_same_bits(tmp_path, size):
    def work(comm):
        with manager_of(tmp_path, comm) as manager:
            assert comm.rank or manager.latest() is None  # which saves next
            assert manager.restore_or_none() is None
            mine = TENSORS if comm.rank == 0 else {"of no interest": object()}
            path = manager.save(mine, step=3, metadata={"line": comm.rank})
            assert manager.latest() == (None if comm.rank else path)  # as each sees its directory
            return path, manager.restore_or_none()

    results = in_step(size, work)
    for path, found in results:
        assert path == tmp_path / "run" / "step-000003"
        assert (found.step, found.metadata, found.path) == (3, {"line": 0}, path)
        assert list(found.tensors) == list(TENSORS)
        for name, array in TENSORS.items():
            got = found.tensors[name]
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert got.tobytes() == array.tobytes()
            assert got.flags.writeable
    for name in TENSORS:
        arrays = [found.tensors[name] for _, found in results]
        assert not any(np.shares_memory(a, b) for a in arrays for b in arrays if a is not b)
    assert os.listdir(tmp_path) == ["run"]
    assert f'"world_size": {size}' in (results[0][0] / "manifest.json").read_text()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_same_error_on_every_rank_and_the_next_call_works(tmp_path, size):
    def work(comm):
        manager = manager_of(tmp_path, comm)
        caught = []
        for bad in ({"step": -1}, {"step": 1, "metadata": {1: 2}}):
            with pytest.raises(errors.InvalidArgumentError) as error:
                manager.save({}, **bad)
            caught.append(str(error.value))
        manager.save(TENSORS, step=1)
        if comm.rank == 0:
            shard = tmp_path / "run" / "step-000001" / "rank-00000.safetensors"
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
        with pytest.raises(errors.DataLossError) as error:
            manager.restore_or_none()
        caught.append(str(error.value))
        with pytest.raises(errors.NotFoundError, match="restore: no such file") as error:
            manager.restore_or_none(tmp_path / "missing")
        caught.append(str(error.value))
        manager.save(TENSORS, step=2)
        assert manager.restore_or_none().step == 2
        manager.close()
        manager.close()
        return caught

    results = in_step(size, work)
    assert all(result == results[0] for result in results), results
    assert "step" in results[0][0]
    assert "checksum differs" in results[0][2]


class Stop(BaseException):
    """Like an interrupt: no `Exception`."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("error", [Stop("now"), MemoryError("too much"), KeyError("k")])
def test_no_rank_waits_when_rank_0_is_interrupted(tmp_path, size, error):
    class Tensors(dict):
        def items(self):
            raise error

    def work(comm):
        manager = manager_of(tmp_path, comm)
        first = None
        try:
            manager.save(Tensors(), step=1)
        except BaseException as caught:
            first = caught
        manager.save(TENSORS, step=2)
        return first

    first, *others = in_step(size, work)
    assert first is error
    for other in others:
        assert type(other) is errors.AbortedError
        assert type(error).__name__ in str(other)
        assert "rank 0" in str(other)


def test_an_interrupt_of_rank_0_is_raised_also_where_nobody_can_be_told(tmp_path):
    class Silent:
        rank, size = 0, 2

        def broadcast_object(self, obj, root=0):
            raise cc.CollectiveTimeout("broadcast_object: no answer")

    class Tensors(dict):
        def items(self):
            raise Stop("now")

    manager = manager_of(tmp_path, Silent())
    with pytest.raises(Stop, match="now") as caught:
        manager.save(Tensors(), step=1)
    assert isinstance(caught.value.__cause__, cc.CollectiveTimeout)


def test_the_manager_keeps_others_out_until_it_is_closed(tmp_path):
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.save({"a": np.ones(2)}, step=1)
    first.save({"a": np.ones(2)}, step=2)
    with pytest.raises(errors.FailedPreconditionError, match="another writer"):
        second.save({}, step=3)
    with pytest.raises(errors.FailedPreconditionError, match="another writer"):
        checkpoint.save(tmp_path, {}, step=3)
    assert second.restore_or_none().step == 2
    first.close()
    second.save({}, step=3)
    with pytest.raises(errors.FailedPreconditionError):
        first.save({}, step=4)
    second.close()
    first.save({}, step=4)
    first.close()


def test_a_manager_that_is_forgotten_lets_others_write(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save({}, step=1)
    del manager
    CheckpointManager(tmp_path).save({}, step=2)


def test_keep_is_obeyed(tmp_path):
    with CheckpointManager(tmp_path, keep=2) as manager:
        for step in range(4):
            manager.save({}, step=step)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]
