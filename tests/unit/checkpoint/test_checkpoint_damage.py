"""Checkpoints that were damaged or forged: a clear error, never wrong numbers."""

import contextlib
import json
import os
import tempfile
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_samples import SHARD, as_schema_1, assert_same_bits, forge
from hypothesis import given, settings
from hypothesis import strategies as some

from strategies import errors
from strategies.checkpoint import checkpoint


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_no_flipped_bit_goes_unnoticed(tmp_path, name):
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "v": np.arange(7, dtype=np.int8)}
    path = checkpoint.save(tmp_path, tensors, step=1, metadata={"line": 12})
    good = (path / name).read_bytes()
    harmless = 0
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        (path / name).write_bytes(bad)
        # A flipped bit in the version is a version that this library does not know.
        with contextlib.suppress(errors.DataLossError, errors.FailedPreconditionError):
            found = checkpoint.restore(path)
            assert_same_bits(found.tensors, tensors)
            assert found.metadata == {"line": 12}
            harmless += 1
    assert harmless < len(good) // 10  # only white space between the words of the JSON


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_every_truncation_is_noticed(tmp_path, name):
    path = checkpoint.save(tmp_path, {"w": np.arange(6.0)}, step=1)
    good = (path / name).read_bytes()
    for length in range(len(good) - (name != SHARD)):  # the manifest's last byte is a newline
        (path / name).write_bytes(good[:length])
        with pytest.raises(errors.DataLossError, match=name):
            checkpoint.restore(path)
        assert checkpoint.latest(tmp_path) is None
    (path / name).write_bytes(good + b"\0")
    with pytest.raises(errors.DataLossError, match=name):
        checkpoint.restore(path)


def test_a_flipped_byte_names_the_tensor_and_a_missing_shard_the_file(tmp_path):
    path = checkpoint.save(tmp_path, {"a": np.zeros(1000), "b": np.zeros(500_000)}, step=1)
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)
    with pytest.raises(errors.DataLossError, match=rf"checksum.*tensor: b, file: .*{SHARD}"):
        checkpoint.restore(path)
    (path / SHARD).unlink()
    with pytest.raises(errors.NotFoundError, match=SHARD):
        checkpoint.restore(path)
    with pytest.raises(errors.NotFoundError, match=SHARD):
        checkpoint.restore(tmp_path)
    (path / "manifest.json").unlink()
    with pytest.raises(errors.NotFoundError, match=r"manifest\.json"):
        checkpoint.restore(tmp_path)


def test_two_tensors_that_changed_places(tmp_path):
    path = checkpoint.save(tmp_path, {"a": np.zeros(4), "b": np.ones(4)}, step=1)
    safetensors.numpy.save_file({"a": np.ones(4), "b": np.zeros(4)}, path / SHARD)
    with pytest.raises(errors.DataLossError, match="checksum differs"):
        checkpoint.restore(path)


def set_in(*keys):
    """A change that puts the last argument at the place that the others name."""
    *way, last, value = keys

    def change(body):
        for key in way:
            body = body[key]
        body[last] = value

    return change


def rename_file(name):
    def change(body):
        body["files"] = {name: body["files"][SHARD]}
        for entry in body["tensors"].values():
            entry["file"] = name

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(rename_file(name) for name in (
            "../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\..\\b", "a\0b", ".hidden", "~",
            "x" * 300, "r\n", "\ud800",
        )),
        set_in("tensors", "w", "file", "other"),
        set_in("tensors", "w", "file", ["x"]),
        set_in("tensors", "w", "shape", [-1]),
        set_in("tensors", "w", "shape", [2**62, 2**62]),
        set_in("tensors", "w", "shape", [10**9]),
        set_in("tensors", "w", "shape", [2**62] * 100_000),
        set_in("tensors", "w", "shape", [1] * 100),
        set_in("tensors", "w", "shape", [3.0, 2]),
        set_in("tensors", "w", "shape", [True, 6]),
        set_in("tensors", "w", "shape", "32"),
        set_in("tensors", "w", "shape", None),
        set_in("tensors", "w", "shape", [2, 3]),
        set_in("tensors", "w", "dtype", "object"),
        set_in("tensors", "w", "dtype", "float64"),
        set_in("tensors", "w", "dtype", "int32"),
        set_in("tensors", "w", "dtype", None),
        set_in("tensors", "w", "checksum", "0"),
        set_in("tensors", "w", "checksum", 0),
        set_in("tensors", "w", None),
        set_in("tensors", "new", {}),
        set_in("tensors", []),
        set_in("tensors", {}),
        set_in("files", {}),
        set_in("files", SHARD, -1),
        set_in("files", SHARD, 1 << 70),
        set_in("files", "more", 3),
        set_in("files", []),
        set_in("step", -1),
        set_in("step", "1"),
        set_in("step", 10**15),
        set_in("sequence", None),
        set_in("world_size", 1.5),
        set_in("metadata", None),
        set_in("checksum", "md5"),
        set_in("schema", 0),
        set_in("schema", "1"),
        set_in("schema", True),
        lambda body: body.pop("step"),
        lambda body: body.clear(),
    ],
    ids=lambda change: None,
)  # fmt: skip
def test_forged_manifests(tmp_path, change):
    (tmp_path / "secret").write_bytes(b"secret")
    path = checkpoint.save(tmp_path / "run", {"w": np.ones((3, 2), "f4")}, step=1)
    as_schema_1(path)
    check_forged(path, change)


def slice_of(**facts):
    """A change of the only slice."""
    return lambda body: body["tensors"]["w"]["slices"][0].update(facts)


def slices(*boxes):
    """A change that gives the tensor slices of rows: where they begin, and how many."""

    def change(body):
        (one,) = body["tensors"]["w"]["slices"]
        body["tensors"]["w"]["slices"] = [
            {**one, "start": [first, 0], "shape": [count, 2]} for first, count in boxes
        ]

    return change


@pytest.mark.parametrize(
    "change",
    [
        slice_of(file="other"),
        slice_of(file="../secret"),
        slice_of(file=None),
        slice_of(start=[0]),
        slice_of(start=[-1, 0]),
        slice_of(start=[1, 0]),
        slice_of(start="00"),
        slice_of(shape=[3, 2, 1]),
        slice_of(shape=[1 << 62, 1 << 62]),
        slice_of(shape=[3.0, 2]),
        slice_of(checksum=-1),
        slice_of(checksum=0),
        slice_of(checksum=None),
        slices(),
        slices((0, 2)),
        slices((0, 2), (1, 2)),
        slices((0, 3), (0, 3)),
        slices((0, 2), (2, 1)),  # which the file does not have
        slices((0, 1), (1, 1), (2, 2)),
        set_in("tensors", "w", "slices", None),
        set_in("tensors", "w", "slices", {}),
        set_in("tensors", "w", "slices", [3]),
        set_in("tensors", "w", "shape", [1 << 31, 1 << 31]),
        set_in("tensors", "w", "shape", [2, 3]),
        set_in("checksum", "crc32"),
        set_in("schema", 1),
    ],
    ids=lambda change: None,
)
def test_forged_slices(tmp_path, change):
    path = checkpoint.save(tmp_path / "run", {"w": np.ones((3, 2), "f4")}, step=1)
    check_forged(path, change)


def check_forged(path, change):
    """What is forged is told, with the name of the checkpoint, and takes no memory."""
    forge(path, change)
    tracemalloc.start()
    try:
        with pytest.raises((errors.DataLossError, errors.NotFoundError)) as caught:
            checkpoint.restore(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert checkpoint.latest(path.parent) in (None, path)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "3", "{", "[" * 100_000, '{"a":' * 100_000, "\xff", "9" * 5000, "NaN",
     '{"schema": 1}'],
    ids=lambda text: text[:10],
)  # fmt: skip
def test_manifests_that_are_none(tmp_path, text):
    path = checkpoint.save(tmp_path, {}, step=1)
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(errors.DataLossError, match=r"damaged manifest.*manifest\.json"):
        checkpoint.restore(path)


def test_the_number_of_dimensions_is_bounded(tmp_path):
    path = checkpoint.save(tmp_path, {"w": np.ones([1] * 32)}, step=1)
    assert checkpoint.restore(path).tensors["w"].ndim == 32
    forge(path, set_in("tensors", "w", "shape", [1] * 33))
    with pytest.raises(errors.DataLossError, match="at most 32 extents"):
        checkpoint.restore(path)


def forge_empty_tensor(path, shape, dtype="float32"):
    """Let manifest and file agree on one tensor without elements, whatever its shape."""
    word = {"float32": "F32", "bfloat16": "BF16", "bool": "BOOL"}[dtype]
    header = {"w": {"dtype": word, "shape": shape, "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (path / SHARD).write_bytes(len(text).to_bytes(8, "little") + text)

    def change(body):
        body["files"] = {SHARD: 8 + len(text)}
        start = [0] * len(shape) if isinstance(shape, list) else shape
        one = {"file": SHARD, "start": start, "shape": shape, "checksum": 0}
        body["tensors"] = {"w": {"shape": shape, "dtype": dtype, "slices": [one]}}

    forge(path, change)


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 62, 0], [1 << 31, 0, 1 << 31], [0, 1 << 61]])
def test_an_empty_array_that_cannot_be_made(tmp_path, shape):
    path = checkpoint.save(tmp_path, {}, step=1)
    forge_empty_tensor(path, shape)
    with pytest.raises(errors.DataLossError, match=r"shape of w: too large for an array.*manifest"):
        checkpoint.restore(path)
    assert checkpoint.latest(tmp_path) is None


def test_the_largest_empty_array(tmp_path):
    path = checkpoint.save(tmp_path, {}, step=1)
    forge_empty_tensor(path, [0, (1 << 61) - 1])
    assert checkpoint.restore(path).tensors["w"].shape == (0, (1 << 61) - 1)


NUMBERS = some.sampled_from(
    [0, 1, 3, -1, True, None, 1.0, 1e308, "1", [], 10**15, 1 << 31, 1 << 62, (1 << 63) - 1,
     1 << 63, 1 << 64, 10**4000]
)  # fmt: skip
EXTENTS = some.sampled_from([0, 1, 2, 1 << 31, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64])
FIELDS = some.sampled_from(["step", "sequence", "world_size", "schema", "checksum", "metadata"])


@given(
    some.lists(EXTENTS | NUMBERS, max_size=4),
    some.sampled_from(["float32", "bfloat16", "bool"]),
    some.dictionaries(FIELDS, NUMBERS, max_size=1),
)
@settings(max_examples=200)
def test_no_number_leads_to_another_error(shape, dtype, others):
    with tempfile.TemporaryDirectory() as name:
        path = checkpoint.save(name, {}, step=1)
        forge_empty_tensor(path, shape, dtype)
        forge(path, lambda body: body.update(others))
        with contextlib.suppress(errors.DataLossError, errors.FailedPreconditionError):
            assert list(checkpoint.restore(path).tensors["w"].shape) == shape
        checkpoint.latest(name)
        if others.get("sequence") != LAST_PLACE:
            path = checkpoint.save(name, {}, step=2)
            assert checkpoint.restore(name).path == path


LAST_PLACE = (1 << 63) - 1


def test_the_last_place_in_the_order_of_writing_leaves_no_later_one(tmp_path):
    path = checkpoint.save(tmp_path, {}, step=1)
    forge(path, set_in("sequence", LAST_PLACE))
    with pytest.raises(errors.FailedPreconditionError, match="highest sequence number"):
        checkpoint.save(tmp_path, {}, step=2)
    assert checkpoint.restore(tmp_path).path == path
    assert checkpoint.save(tmp_path / "other", {}, step=2).exists()


def test_a_manifest_of_later_versions_says_so(tmp_path):
    path = checkpoint.save(tmp_path, {}, step=1)
    forge(path, set_in("schema", 3))
    with pytest.raises(errors.FailedPreconditionError, match="schema 3.*Update"):
        checkpoint.restore(path)


def test_lengths_are_bounded_before_memory_is_taken(tmp_path):
    path = checkpoint.save(tmp_path, {"w": np.ones(3)}, step=1)
    os.truncate(path / "manifest.json", 1 << 40)  # sparse
    with pytest.raises(errors.DataLossError, match="too long"):
        checkpoint.restore(path)
    for header in (1 << 63, (1 << 64) - 1, 100_000_001, 1 << 30, 0, 1):
        path = checkpoint.save(tmp_path, {"w": np.ones(3)}, step=1)
        shard = path / SHARD
        os.truncate(shard, 1 << 33)
        with shard.open("r+b") as file:
            file.write(header.to_bytes(8, "little"))
        forge(path, set_in("files", SHARD, 1 << 33))
        with pytest.raises(errors.DataLossError, match=SHARD):
            checkpoint.restore(path)


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_links_and_special_files(tmp_path, name):
    path = checkpoint.save(tmp_path / "run", {"w": np.ones(3)}, step=1)
    outside = tmp_path / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    with pytest.raises(errors.DataLossError, match="unsafe file"):
        checkpoint.restore(path)
    (path / name).unlink()
    (path / name).symlink_to(name)
    with pytest.raises(errors.OpError, match=name):
        checkpoint.restore(path)
    (path / name).unlink()
    os.mkfifo(path / name)  # opening it would wait for ever
    with pytest.raises(errors.DataLossError, match="regular file"):
        checkpoint.restore(path)
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(errors.DataLossError, match="regular file"):
        checkpoint.restore(path)
    (path / name).rmdir()
    outside.rename(path / "inside")
    (path / name).symlink_to("inside")
    assert checkpoint.restore(path).step == 1


def test_writing_follows_no_links(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    (victim / "precious").write_text("precious")
    run.mkdir()
    for name in (".tmp-step-000001", ".tmp-latest", "step-000001", "latest"):
        (run / name).symlink_to(victim)
    checkpoint.save(run, {"a": np.ones(2)}, step=1)
    assert checkpoint.restore(run).step == 1
    assert not (run / "step-000001").is_symlink()
    assert os.listdir(victim) == ["precious"]
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(victim / "precious")
    with pytest.raises(errors.FailedPreconditionError, match=r"\.lock"):
        checkpoint.save(run, {}, step=2)
    assert (victim / "precious").read_text() == "precious"
