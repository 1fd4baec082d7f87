"""Sharded checkpoints: every rank writes its part, any number of ranks reads it."""

import errno
import functools
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from calls import folder_of

import collectives as cc
import strategies
from inprocess import run_ranks
from strategies import errors
from strategies.checkpoint import Box, Saver, Slice, checkpoint
from strategies.core import atomic_io

ROWS, COLUMNS = 61, 7


def wholes(seed=0):
    """What all ranks together have: arrays that are cut among them, and one that all have."""
    rng = np.random.default_rng(seed)
    return {
        "rows": rng.normal(size=(ROWS, COLUMNS)),
        "columns": rng.normal(size=(COLUMNS, ROWS)).astype(ml_dtypes.bfloat16),
        "replicated": rng.integers(0, 99, (50_000, 11), np.int64),  # 4.2 MiB
        "small": np.array(seed, np.int32),
        "empty": np.empty((0, 3), np.float32),
    }


def cut(name, shape, rank, size):
    """The box of a rank: of rows, of columns, or all."""
    if name not in ("rows", "columns"):
        return Box((0,) * len(shape), shape)
    axis = int(name == "columns")
    first, end = (shape[axis] * r // size for r in (rank, rank + 1))
    start, extent = [0, 0], list(shape)
    start[axis], extent[axis] = first, end - first
    return Box(tuple(start), tuple(extent))


def part(array, box):
    return array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]


def held_by(rank, size, seed=0):
    tensors = {}
    for name, array in wholes(seed).items():
        box = cut(name, array.shape, rank, size)
        is_cut = name in ("rows", "columns")
        tensors[name] = Slice(part(array, box), box.start, array.shape) if is_cut else array
    return {**tensors, f"own/{rank}": np.full(3, rank)}


def boxes_of(comm):
    return {
        name: cut(name, wholes()[name].shape, comm.rank, comm.size) for name in ("rows", "columns")
    }


def check(found, comm, seed=0):
    """This rank has its rows and columns, and all of the rest, bit for bit."""
    for name, array in wholes(seed).items():
        expected = part(array, cut(name, array.shape, comm.rank, comm.size))
        assert found[name].dtype == array.dtype
        assert found[name].shape == expected.shape
        assert found[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("background", [False, True])
def test_every_rank_writes_its_part_and_reads_its_part(comm, background):
    folder = folder_of(comm)
    with strategies.CheckpointManager(
        folder, comm, sharded=True, background=background, keep=2
    ) as manager:
        for step in (1, 2, 3):
            tensors = held_by(comm.rank, comm.size, step)
            path = manager.save(tensors, step=step, metadata={"epoch": comm.rank})
            for array in tensors.values() if background else ():
                (array.array if isinstance(array, Slice) else array)[...] = 0
        assert comm.allgather_object(str(path)) == [f"{folder}/step-000003"] * comm.size
        found = manager.restore_or_none(slices=boxes_of(comm))
    assert (found.step, found.metadata) == (3, {"epoch": 0})
    check(found.tensors, comm, 3)
    for rank in range(comm.size):
        assert found.tensors[f"own/{rank}"].tolist() == [rank] * 3
    assert sorted(os.listdir(folder)) == [".lock", "latest", "step-000002", "step-000003"]
    sizes = json.loads((path / "manifest.json").read_text())["files"]
    assert list(sizes) == [f"rank-{rank:05d}.safetensors" for rank in range(comm.size)]
    # What all have is written once, by all.
    assert max(sizes.values()) < 1.2 * min(sizes.values())
    whole = checkpoint.restore(folder)  # by one process, without the slices
    for name, array in wholes(3).items():
        assert whole.tensors[name].tobytes() == array.tobytes()


def test_other_numbers_of_ranks_go_on_with_the_same_bits(comm):
    folder = folder_of(comm)
    for size in (comm.size, 1, max(1, comm.size - 1), comm.size):
        some = comm.split(0 if comm.rank < size else None)
        if some is None:
            continue
        for sharded in (True, False):
            with strategies.CheckpointManager(folder, some, sharded=sharded) as manager:
                if not os.path.exists(f"{folder}/step-000000"):
                    some.barrier()
                    manager.save(held_by(some.rank, some.size), step=0)
                found = manager.restore_or_none(slices=boxes_of(some)).tensors
                check(found, some)
                again = {
                    name: Slice(found[name], box.start, wholes()[name].shape)
                    for name, box in boxes_of(some).items()
                }
                if sharded or some.size == 1:
                    manager.save({**found, **again}, step=1)
                    check(manager.restore_or_none(slices=boxes_of(some)).tensors, some)
    comm.barrier()


def test_from_four_ranks_to_three_to_five(tmp_path):
    def save_as(size, source, folder):
        def run(comm):
            with strategies.CheckpointManager(folder, comm, sharded=True) as manager:
                tensors = held_by(comm.rank, size)
                if source is not None:
                    found = strategies.CheckpointManager(
                        source, comm, sharded=True
                    ).restore_or_none(slices=boxes_of(comm))
                    check(found.tensors, comm)
                    tensors = {
                        **found.tensors,
                        **{
                            name: Slice(found.tensors[name], box.start, wholes()[name].shape)
                            for name, box in boxes_of(comm).items()
                        },
                    }
                manager.save(tensors, step=1)

        run_ranks(size, run)

    save_as(4, None, tmp_path / "4")
    save_as(3, tmp_path / "4", tmp_path / "3")
    save_as(5, tmp_path / "3", tmp_path / "5")
    for size in (4, 3, 5):
        found = checkpoint.restore(tmp_path / str(size)).tensors
        for name, array in wholes().items():
            assert found[name].tobytes() == array.tobytes()
        assert len(list((tmp_path / str(size) / "step-000001").glob("rank-*"))) == size


@pytest.mark.parametrize("background", [False, True])
def test_what_one_rank_cannot_write_is_an_error_on_all(world, background, monkeypatch):
    """The disk is full for the last rank; nothing of the checkpoint is there, the next one is."""
    real = atomic_io.new_file

    def new_file(path):
        if f"rank-{world.size - 1:05d}" in path.name and "000002" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path)

    monkeypatch.setattr(atomic_io, "new_file", new_file)

    def run(comm):
        folder = folder_of(comm)
        with strategies.CheckpointManager(
            folder, comm, sharded=True, background=background
        ) as manager:
            manager.save(held_by(comm.rank, comm.size), step=1)
            save = functools.partial(manager.save, held_by(comm.rank, comm.size), step=2)
            if background:
                save()
            with pytest.raises(errors.ResourceExhaustedError) as caught:
                manager.wait() if background else save()
            text = str(caught.value)
            assert "save: no space left on device" in text
            assert comm.allgather_object(text) == [text] * comm.size
            if comm.size > 1:
                assert f"(rank {comm.size - 1} of {comm.size})" in text
            comm.barrier()
            assert sorted(os.listdir(folder)) == [".lock", "latest", "step-000001"]
            comm.barrier()
            manager.save(held_by(comm.rank, comm.size, 3), step=3)
            check(manager.restore_or_none(slices=boxes_of(comm)).tensors, comm, 3)

    world.run(run)


def damage_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped byte": (damage_byte, errors.DataLossError, "checksum differs"),
    "cut": (lambda path: os.truncate(path, 100), errors.DataLossError, "wrong length"),
    "missing": (Path.unlink, errors.NotFoundError, "no such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_on_all_ranks(comm, damage):
    act, kind, text = DAMAGE[damage]
    folder = folder_of(comm)
    with strategies.CheckpointManager(folder, comm, sharded=True) as manager:
        for step in (1, 2):
            manager.save(held_by(comm.rank, comm.size, step), step=step)
        path = Path(folder) / "step-000002"
        name = f"rank-{comm.size - 1:05d}.safetensors"
        if comm.rank == 0:
            act(path / name)
        comm.barrier()
        with pytest.raises(kind, match=f"{text}.*{name}") as caught:
            manager.restore_or_none(path)
        assert type(caught.value) is kind
        if damage != "flipped byte":  # what can be seen without reading all is passed over
            check(manager.restore_or_none(slices=boxes_of(comm)).tensors, comm, 1)
        manager.save(held_by(comm.rank, comm.size, 3), step=3)
        check(manager.restore_or_none(slices=boxes_of(comm)).tensors, comm, 3)


def test_wrong_calls_are_errors_on_all_ranks_and_leave_nothing(comm):
    folder = folder_of(comm)
    last = comm.rank == comm.size - 1
    with strategies.CheckpointManager(folder, comm, sharded=True) as manager:
        bad = np.array([object()]) if last else np.ones(1)
        with pytest.raises(errors.InvalidArgumentError, match="unsupported array.*tensor: w"):
            manager.save({"w": bad}, step=1)
        with pytest.raises(errors.InvalidArgumentError, match="all but 2 of .*tensor: w"):
            manager.save({"w": Slice(np.ones(2), (2 * comm.rank,), (2 * comm.size + 2,))}, step=1)
        if comm.size > 1:
            with pytest.raises(errors.InvalidArgumentError, match=r"ranks differ.*tensor: w"):
                manager.save({"w": np.ones(2 + last)}, step=1)
            with pytest.raises(cc.MismatchError, match="step 1 on rank 0, step 2 on rank"):
                manager.save({"w": np.ones(2)}, step=1 + last)
        manager.save({"w": np.ones(4)}, step=1)
        with pytest.raises(errors.InvalidArgumentError, match=r"inside of \[4\].*tensor: w"):
            manager.restore_or_none(slices={"w": Box((3 if last else 0,), (2,))})
        found = manager.restore_or_none(slices={"w": Box((1,), (2,)), "none": Box((), ())})
        assert found.tensors["w"].tolist() == [1, 1]


def test_two_jobs_on_one_directory(comm):
    folder = folder_of(comm)
    first = strategies.CheckpointManager(folder, comm, sharded=True, background=True)
    second = strategies.CheckpointManager(folder, comm, sharded=True)
    first.save({"w": np.ones(3)}, step=1)
    with pytest.raises(errors.FailedPreconditionError, match="another writer"):
        second.save({"w": np.zeros(3)}, step=2)
    first.wait()
    first.close()
    comm.barrier()
    second.save({"w": np.zeros(3)}, step=2)
    assert second.restore_or_none().tensors["w"].tolist() == [0, 0, 0]
    second.close()
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def test_a_saver_of_parts_and_of_what_all_have(comm):
    def things(comm, seed):
        full = wholes(seed)
        boxes = boxes_of(comm)
        return {
            "model": {
                name: Slice(part(full[name], box).copy(), box.start, full[name].shape)
                for name, box in boxes.items()
            },
            "bias": full["replicated"][:5].copy(),
            "rng": np.random.default_rng([seed, comm.rank]),
        }

    folder = folder_of(comm)
    used = things(comm, 1)
    with strategies.CheckpointManager(folder, comm, sharded=True) as manager:
        Saver(manager, **used, epoch=3).save(7)
        expected = used["rng"].random()
        fresh = things(comm, 2)
        saver = Saver(manager, **fresh, epoch=0)
        assert saver.restore() == 7
        assert saver["epoch"] == 3
        assert fresh["rng"].random() == expected
        assert (fresh["bias"] == used["bias"]).all()
        for name, box in boxes_of(comm).items():
            array = fresh["model"][name].array
            assert array.tobytes() == part(wholes(1)[name], box).tobytes()
        other = Slice(np.zeros((1, COLUMNS)), (comm.rank, 0), (comm.size, COLUMNS))
        if comm.size > 1:
            with pytest.raises(errors.InvalidArgumentError, match="expected .* of float64"):
                Saver(manager, model={**fresh["model"], "rows": other}).restore()
    if comm.size > 1:
        with (
            strategies.CheckpointManager(folder_of(comm), comm) as plain,
            pytest.raises(errors.InvalidArgumentError, match="sharded=True"),
        ):
            Saver(plain, **used).save(1)
