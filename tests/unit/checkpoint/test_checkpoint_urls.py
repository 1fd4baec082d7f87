"""Checkpoints behind URLs: nothing can be renamed, the manifest decides."""

import importlib
import itertools
import os

import fsspec
import numpy as np
import pytest
from checkpoint_samples import assert_same_bits, tensors_of

import strategies
from inprocess import run_ranks
from strategies import errors
from strategies.__main__ import main
from strategies.checkpoint import Saver, Slice, checkpoint

NUMBERS = itertools.count()


@pytest.fixture(params=["memory", "local"])  # "local": real files, by fsspec's own way
def root(request, tmp_path):
    return f"memory://{next(NUMBERS)}/run" if request.param == "memory" else f"local://{tmp_path}"


def files_of(root):
    files, path = fsspec.core.url_to_fs(root)
    found = files.find(path)
    return sorted(name.split(f"{path}/", 1)[1] for name in found)


def files_by_step(root):
    """Step -> number of files of arrays."""
    names = [name.split("/")[0] for name in files_of(root) if "rank-" in name]
    return {name: names.count(name) for name in names}


def test_round_trip_of_every_dtype(root):
    path = checkpoint.save(root, tensors_of(1), step=120, metadata={"epoch": 3})
    assert path.name == "step-000120"
    for place in (root, path, str(path)):
        found = checkpoint.restore(place)
        assert (found.step, found.metadata, found.path) == (120, {"epoch": 3}, path)
        assert_same_bits(found.tensors, tensors_of(1))
    assert [name.rpartition("/")[2] for name in files_of(root)][0] == "latest"
    assert checkpoint.latest(root) == path
    checkpoint.verify(path)


def test_file_urls_are_directories(tmp_path):
    path = checkpoint.save(f"file://{tmp_path}/run", {"w": np.ones(2)}, step=1)
    assert path == tmp_path / "run" / "step-000001"
    assert sorted(os.listdir(path)) == ["manifest.json", "rank-00000.safetensors"]
    assert checkpoint.restore(tmp_path / "run").step == 1


def test_nothing_there(root):
    assert checkpoint.latest(root) is None
    assert strategies.CheckpointManager(root).restore_or_none() is None
    with pytest.raises(errors.NotFoundError):
        checkpoint.restore(root)


def test_what_stays(root):
    with strategies.CheckpointManager(root, keep=2, best="min") as manager:
        for step, metric in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
            manager.save({"w": np.full(3, step)}, step=step, metric=metric)
            assert manager.restore_or_none().tensors["w"].tolist() == [step] * 3
        assert manager.best().name == "step-000001"
        manager.save({"w": np.ones(3)}, step=4)  # again: the old files are gone
        assert manager.restore_or_none().tensors["w"].tolist() == [1] * 3
    assert files_by_step(root) == {"step-000001": 1, "step-000003": 1, "step-000004": 1}


def test_a_checkpoint_to_which_a_user_has_added_a_file_is_not_deleted(root):
    files, path = fsspec.core.url_to_fs(root)
    checkpoint.save(root, {"w": np.ones(3)}, step=1)
    files.pipe_file(f"{path}/step-000001/notes.txt", b"of the user")
    before = files_of(root)
    for step in (2, 3):
        checkpoint.save(root, {"w": np.ones(3)}, step=step, keep=1)
    assert set(before) <= set(files_of(root))
    assert files_by_step(root) == {"step-000001": 1, "step-000003": 1}


def test_a_saver_in_the_background(root):
    model, rng = np.zeros(3), np.random.default_rng(1)
    with strategies.CheckpointManager(root, background=True) as manager:
        saver = Saver(manager, model=model, rng=rng)
        for step in (1, 2):
            model += 1
            saver.save(step)
        expected = rng.random()
        model[:] = 9
        assert saver.restore() == 2
    assert model.tolist() == [2, 2, 2]
    assert rng.random() == expected


class Dead(BaseException):
    """As if the process had been killed: nothing more happens."""


class Calls:
    """Counts the calls that change something; from number `stop` on, each raises an error."""

    names = ("pipe_file", "rm_file", "rm", "makedirs", "_open")

    def __init__(self, monkeypatch, root, error, stop=None):
        self.count, self.stop, self.error = 0, stop, error
        kind = type(fsspec.core.url_to_fs(root)[0])
        for name in self.names:
            monkeypatch.setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, real):
        def call(*args, **kwargs):
            if real.__name__ == "_open" and "wb" not in (*args, *kwargs.values()):
                return real(*args, **kwargs)
            self.count += 1
            if self.stop is not None and self.count > self.stop:
                raise self.error
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("error", [Dead(), OSError(28, "No space left on device"), KeyError("x")])
@pytest.mark.parametrize("step", [2, 3])  # one that is there, and a new one
def test_stopped_at_every_call(root, monkeypatch, error, step):
    def prepared(place):
        for old in (1, 2):
            checkpoint.save(place, {"w": np.full(4, old)}, step=old)

    def save(place, value=9):
        checkpoint.save(place, {"w": np.full(4, value)}, step=step, keep=2)

    prepared(f"{root}/count")
    with monkeypatch.context() as patch:
        calls = Calls(patch, root, error)
        save(f"{root}/count")
    assert calls.count >= 4
    seen = set()
    for stop in range(calls.count):
        place = f"{root}/{stop}"
        prepared(place)
        raised = None
        with monkeypatch.context() as patch:
            Calls(patch, root, error, stop)
            try:
                save(place)
            except (Dead, errors.OpError) as caught:
                raised = caught
        found = checkpoint.restore(place)
        (value,) = set(found.tensors["w"].tolist())
        assert (found.step, value) in [(2, 2), (step, 9)]
        if value == 2:
            assert raised is not None
            kinds = {OSError: errors.ResourceExhaustedError, KeyError: errors.UnavailableError}
            assert isinstance(raised, kinds.get(type(error), Dead))
        seen.add(value)
        save(place, 7)
        assert checkpoint.restore(place).tensors["w"].tolist() == [7] * 4
        kept = {"step-000002": 1, f"step-{step:06d}": 1}
        assert {**files_by_step(place), "step-000001": 1} == {**kept, "step-000001": 1}
    assert seen == {2, 9}


def test_damage_is_named(root):
    for step in (1, 2):
        path = checkpoint.save(root, {"w": np.ones(100)}, step=step)
    files, at = fsspec.core.url_to_fs(str(path))
    (shard,) = [name for name in files.ls(at, detail=False) if "rank-" in name]
    good = files.cat_file(shard)
    files.pipe_file(shard, good[:-1] + b"\1")
    with pytest.raises(errors.DataLossError, match=r"checksum differs.*tensor: w, file: \w+://"):
        checkpoint.restore(root)
    files.pipe_file(shard, good[:-1])
    with pytest.raises(errors.DataLossError, match="wrong length"):
        checkpoint.restore(path)
    assert checkpoint.restore(root).step == 1
    files.rm_file(shard)
    with pytest.raises(errors.NotFoundError, match="rank-00000"):
        checkpoint.restore(path)


def test_a_second_job_is_found_out_and_harms_nothing(root, monkeypatch):
    checkpoint.save(root, {"w": np.ones(1)}, step=1)
    kind = type(fsspec.core.url_to_fs(root)[0])
    done = []
    real_open = kind.open

    def opened(files, *args, **kwargs):
        if not done and "wb" in (*args, *kwargs.values()):
            done.append(True)
            checkpoint.save(root, {"w": np.full(1, 5)}, step=5)  # between two steps of the first
        return real_open(files, *args, **kwargs)

    monkeypatch.setattr(kind, "open", opened)
    with pytest.raises(errors.FailedPreconditionError, match="another writer"):
        checkpoint.save(root, {"w": np.full(1, 2)}, step=2)
    assert checkpoint.restore(root).tensors["w"].tolist() == [5]
    assert files_by_step(root) == {"step-000001": 1, "step-000005": 1}


@pytest.mark.parametrize("background", [False, True])
def test_all_ranks_write_and_others_read(root, background):
    def save(comm):
        with strategies.CheckpointManager(
            root, comm, sharded=True, background=background
        ) as manager:
            for step in (1, 1, 2):
                row = Slice(np.full((1, 2), comm.rank), (comm.rank, 0), (comm.size, 2))
                manager.save({"rows": row, "same": np.full(3, step)}, step=step)

    def restore(comm):
        found = strategies.CheckpointManager(root, comm, sharded=True).restore_or_none()
        assert found.step == 2
        assert found.tensors["rows"].tolist() == [[rank] * 2 for rank in range(3)]
        assert found.tensors["same"].tolist() == [2] * 3

    run_ranks(3, save)
    assert files_by_step(root) == {"step-000001": 3, "step-000002": 3}
    run_ranks(2, restore)


def test_commands_take_urls(root, capsys):
    for step in (1, 2):
        path = checkpoint.save(root, {"w": np.full(2, step)}, step=step)
    assert main(["checkpoint", "show", root]) == 0
    assert "step-000002" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(path)]) == 0
    assert "w  int64     [2]" in capsys.readouterr().out
    assert main(["checkpoint", "verify", root]) == 0
    assert capsys.readouterr().out.count(": ok") == 2
    assert main(["checkpoint", "diff", f"{root}/step-000001", root]) == 1
    assert "w: 2 of 2 elements differ" in capsys.readouterr().out


def test_without_fsspec(monkeypatch, capsys):
    real = importlib.import_module

    def missing(name, *args):
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install fsspec"):
        strategies.CheckpointManager("s3://bucket/run")
    assert main(["checkpoint", "show", "s3://bucket/run"]) == 2
    assert "pip install fsspec" in capsys.readouterr().err


def test_a_protocol_that_nobody_knows():
    with pytest.raises(errors.InvalidArgumentError, match="nosuch"):
        strategies.CheckpointManager("nosuch://bucket/run")
