"""Checkpoints: bit-exact round trips, which are kept, which is the newest."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_samples import SHARD, as_schema_1, assert_same_bits, leftovers, steps, tensors_of

from requirements import installed
from strategies import errors
from strategies.checkpoint import checkpoint


def test_round_trip_of_every_dtype(tmp_path):
    tensors = tensors_of(1)
    metadata = {"reader": {"file": "a.csv", "line": 7}, "rng": [2**127, -0.1, None, True, "é"]}
    path = checkpoint.save(tmp_path / "new" / "run", tensors, step=120, metadata=metadata)
    assert path == tmp_path / "new" / "run" / "step-000120"
    assert sorted(os.listdir(path)) == ["manifest.json", SHARD]
    for place in (path, path.parent, str(path)):
        found = checkpoint.restore(place)
        assert (found.step, found.metadata, found.path) == (120, metadata, path)
        assert_same_bits(found.tensors, tensors)
    assert (path.parent / "latest").read_text() == "step-000120\n"
    assert leftovers(path.parent) == []


def test_what_earlier_versions_have_written_is_read(tmp_path):
    path = checkpoint.save(tmp_path, tensors_of(1), step=1, metadata={"epoch": 3})
    as_schema_1(path)
    assert json.loads((path / "manifest.json").read_text())["schema"] == 1
    found = checkpoint.restore(tmp_path)
    assert found.metadata == {"epoch": 3}
    assert_same_bits(found.tensors, tensors_of(1))
    checkpoint.save(tmp_path, {}, step=2)
    assert json.loads((tmp_path / "step-000002" / "manifest.json").read_text())["schema"] == 2


def test_restored_arrays_belong_to_the_caller(tmp_path):
    checkpoint.save(tmp_path, {"a": np.arange(4)}, step=0)
    first, second = checkpoint.restore(tmp_path), checkpoint.restore(tmp_path)
    first.tensors["a"][:] = 9
    first.metadata["x"] = 1
    np.testing.assert_array_equal(second.tensors["a"], [0, 1, 2, 3])
    np.testing.assert_array_equal(checkpoint.restore(tmp_path).tensors["a"], [0, 1, 2, 3])


def test_layout_and_byte_order_of_what_is_saved_do_not_matter(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"F": base.T, "strided": base[::2, ::-1], "big": base.astype(">f4"), "int": 3,
             "float": 0.5, "list": [[1, 2]], "bool": True}  # fmt: skip
    checkpoint.save(tmp_path, views, step=1)
    for name, array in checkpoint.restore(tmp_path).tensors.items():
        np.testing.assert_array_equal(array, views[name])
        assert array.dtype.isnative


def test_tensors_of_pytorch_in_host_memory_are_saved_as_they_are(tmp_path):
    torch = installed("torch")
    tensors = {
        "bfloat16": torch.tensor([[1.5, -2.0], [0.0, 3.0]], dtype=torch.bfloat16).T,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "whole": torch.arange(3),
    }
    checkpoint.save(tmp_path, tensors, step=1)
    found = checkpoint.restore(tmp_path).tensors
    assert found["bfloat16"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found["bfloat16"].astype(float), [[1.5, 0], [-2, 3]])
    np.testing.assert_array_equal(found["parameter"], [1, 1, 1])
    np.testing.assert_array_equal(found["whole"], [0, 1, 2])
    with pytest.raises(errors.InvalidArgumentError, match="tensor: rows"):
        checkpoint.save(tmp_path, {"rows": torch.eye(3).to_sparse()}, step=2)
    with pytest.raises(errors.InvalidArgumentError, match="host first"):
        checkpoint.save(tmp_path, {"far": torch.ones(3, device="meta")}, step=2)


def test_no_tensors_and_no_metadata(tmp_path):
    checkpoint.save(tmp_path, {}, step=3)
    found = checkpoint.restore(tmp_path)
    assert (found.step, found.tensors, found.metadata) == (3, {}, {})


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path, {"a": np.ones(1)}, step=1)
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in path.iterdir()} == {
        SHARD: 0o640, "manifest.json": 0o640,
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o750


def test_any_tool_that_reads_safetensors_reads_the_shard(tmp_path):
    path = checkpoint.save(tmp_path, {"a": np.arange(5.0), "b": np.ones((2, 2), "f2")}, step=1)
    loaded = safetensors.numpy.load_file(path / SHARD)
    np.testing.assert_array_equal(loaded["a"], np.arange(5.0))
    assert loaded["b"].dtype == np.float16


def add_file(folder):
    (folder / "notes.txt").write_text("of the user")


def add_folder(folder):
    (folder / "plots").mkdir()


@pytest.mark.parametrize("add", [add_file, add_folder])
def test_a_checkpoint_to_which_a_user_has_added_something_is_not_deleted(tmp_path, caplog, add):
    old = checkpoint.save(tmp_path, {"a": np.array(1)}, step=1)
    add(old)
    before = everything(old)
    for step in (2, 3):
        checkpoint.save(tmp_path, {"a": np.array(step)}, step=step, keep=1)
    assert steps(tmp_path) == [1, 3]
    assert everything(old) == before
    assert "it holds files that no save has written: " in caplog.text
    assert checkpoint.restore(tmp_path, step=1).tensors["a"] == 1


@pytest.mark.parametrize("add", [add_file, add_folder])
def test_what_a_user_has_added_outlives_a_second_save_of_the_step(tmp_path, add):
    add(checkpoint.save(tmp_path, {"a": np.array(1)}, step=1))
    before = everything(tmp_path / "step-000001")
    for step in (1, 2):
        checkpoint.save(tmp_path, {"a": np.array(10)}, step=step)
    assert everything(tmp_path / ".old-step-000001") == before
    assert checkpoint.restore(tmp_path, step=1).tensors["a"] == 10


@pytest.mark.parametrize("name", [".tmp-step-000009", ".tmp-latest", ".old-step-000003"])
def test_leftovers_with_files_of_a_user_stay(tmp_path, name):
    (tmp_path / name).mkdir()
    add_file(tmp_path / name)
    (tmp_path / "step-000003").mkdir()
    if name == ".tmp-latest":
        with pytest.raises(errors.FailedPreconditionError, match="file exists"):
            checkpoint.save(tmp_path, {"a": np.array(1)}, step=10)
    else:
        checkpoint.save(tmp_path, {"a": np.array(1)}, step=10)
    assert list(everything(tmp_path / name)) == ["notes.txt"]


def everything(root):
    found = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def test_keeps_the_newest_and_points_to_the_last(tmp_path):
    for step in range(0, 60, 10):
        checkpoint.save(tmp_path, {"a": np.array(step)}, step=step, keep=3)
        assert (tmp_path / "latest").read_text() == f"step-{step:06d}\n"
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{step:06d}"
    assert steps(tmp_path) == [30, 40, 50]
    assert checkpoint.restore(tmp_path, step=40).tensors["a"] == 40
    checkpoint.save(tmp_path, {"a": np.array(60)}, step=60, keep=1)
    assert steps(tmp_path) == [60]


def test_going_back_makes_the_earlier_step_the_newest_and_deletes_no_later_one(tmp_path):
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, {"a": np.array(step)}, step=step, keep=5)
    checkpoint.save(tmp_path, {"a": np.array(25)}, step=25, keep=2)
    assert steps(tmp_path) == [20, 25, 30, 40]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000025"
    # 35 follows 25; 20 and 30 belong to the way that was given up and were written first.
    checkpoint.save(tmp_path, {"a": np.array(35)}, step=35, keep=2)
    assert steps(tmp_path) == [25, 35, 40]
    assert checkpoint.restore(tmp_path).step == 35


def test_the_same_step_again_replaces(tmp_path):
    for value in (1, 2, 3):
        checkpoint.save(tmp_path, {"a": np.array(value)}, step=7)
        assert checkpoint.restore(tmp_path).tensors["a"] == value
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step-000007"]


def test_steps_beyond_six_digits_sort_as_numbers(tmp_path):
    for step in (999_999, 1_000_000, 10**15 - 1):
        checkpoint.save(tmp_path, {}, step=step, keep=2)
    assert steps(tmp_path) == [1_000_000, 10**15 - 1]
    assert checkpoint.restore(tmp_path, step=1_000_000).step == 1_000_000


@pytest.mark.parametrize("pointer", [None, "step-000001\n", "step-000099\n", "../../etc\n", "\0"])
def test_latest_does_not_depend_on_the_pointer(tmp_path, pointer):
    for step in (1, 2):
        checkpoint.save(tmp_path, {}, step=step)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"
    assert checkpoint.restore(tmp_path).step == 2


def test_latest_of_nothing(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FailedPreconditionError, match="not a directory"):
        checkpoint.latest(tmp_path / "file")


def test_what_is_incomplete_is_passed_over_and_never_deleted(tmp_path, caplog):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, {"a": np.array(step)}, step=step)
    (tmp_path / "step-000003" / SHARD).unlink()
    (tmp_path / "step-000002" / "manifest.json").write_bytes(b"{")
    (tmp_path / ".tmp-step-000009").mkdir()
    (tmp_path / "step-17").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    assert checkpoint.restore(tmp_path).tensors["a"] == 1
    assert "step-000003" in caplog.text
    checkpoint.save(tmp_path, {}, step=4, keep=1)
    assert steps(tmp_path) == [2, 3, 4, 17]


def test_a_copied_checkpoint_is_read_where_it_is_but_not_under_a_wrong_step(tmp_path):
    path = checkpoint.save(tmp_path, {"a": np.ones(2)}, step=1)
    path.rename(tmp_path / "best")
    assert checkpoint.restore(tmp_path / "best").step == 1
    (tmp_path / "best").rename(tmp_path / "step-000002")
    assert checkpoint.latest(tmp_path) is None


def test_a_link_is_no_checkpoint_of_the_directory_but_may_be_asked_for(tmp_path):
    path = checkpoint.save(tmp_path / "elsewhere", {}, step=2)
    checkpoint.save(tmp_path / "run", {}, step=1)
    link = tmp_path / "run" / "step-000002"
    link.symlink_to(path)
    assert checkpoint.restore(tmp_path / "run").step == 1
    with pytest.raises(errors.NotFoundError, match=r"step 2, got steps \[1\]"):
        checkpoint.restore(tmp_path / "run", step=2)
    assert checkpoint.restore(link).step == 2


def test_the_directory_may_be_a_link_and_hold_other_files(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    others = {".tmp-mine", ".old-mine", ".old-step-mine", "metrics.jsonl", "step-x"}
    for name in others:
        (tmp_path / "run" / name).write_text(name)
    for step in (1, 2, 2):
        checkpoint.save(tmp_path / "run", {"a": np.ones(2)}, step=step, keep=1)
    found = checkpoint.restore(tmp_path / "run")
    assert (found.step, found.path) == (2, tmp_path / "run" / "step-000002")
    assert set(os.listdir(tmp_path / "scratch")) == {*others, ".lock", "latest", "step-000002"}


def test_missing_checkpoints_are_named(tmp_path):
    with pytest.raises(errors.NotFoundError, match="missing"):
        checkpoint.restore(tmp_path / "missing")
    with pytest.raises(errors.NotFoundError, match=r"no checkpoint, got steps \[\]"):
        checkpoint.restore(tmp_path)
    checkpoint.save(tmp_path, {}, step=5)
    with pytest.raises(errors.NotFoundError, match=r"step 6, got steps \[5\]"):
        checkpoint.restore(tmp_path, step=6)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"step": -1}, "step"),
        ({"step": 1.0}, "step"),
        ({"step": True}, "step"),
        ({"step": 10**15}, "step"),
        ({"keep": 0}, "keep"),
        ({"keep": None}, "keep"),
        ({"tensors": {"": np.ones(1)}}, "''"),
        ({"tensors": {"__metadata__": np.ones(1)}}, "__metadata__"),
        ({"tensors": {3: np.ones(1)}}, "got 3"),
        ({"tensors": {"\ud800": np.ones(1)}}, "tensor name"),
        ({"tensors": {"a": np.array([object()])}}, "object"),
        ({"tensors": {"a": np.array(["text"])}}, "<U4"),
        ({"tensors": {"a": np.ones(1, complex)}}, "complex128"),
        ({"tensors": {"a": np.ones(1, ml_dtypes.float8_e4m3fn)}}, "float8"),
        ({"tensors": {"a": [[1], [1, 2]]}}, "tensor: a"),
        ({"tensors": {"a": np.ones(1, "m8[s]")}}, "timedelta64"),
        ({"metadata": {"a": np.float32(1)}}, "float32"),
        ({"metadata": {"a": (1, 2)}}, "(1, 2)"),
        ({"metadata": {1: 2}}, "{1: 2}"),
        ({"metadata": {"a": float("nan")}}, "JSON"),
        ({"metadata": [1]}, "[1]"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_disk_is_touched(tmp_path, change, facts):
    arguments = {"tensors": {"a": np.ones(1)}, "step": 1} | change
    with pytest.raises(errors.InvalidArgumentError) as caught:
        checkpoint.save(tmp_path / "run", **arguments)
    assert facts in str(caught.value)
    assert os.listdir(tmp_path) == []
