"""`python -m strategies checkpoint show | verify | diff`."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint_samples import SHARD, tensors_of

from strategies.__main__ import main
from strategies.checkpoint import checkpoint


@pytest.fixture
def ask(capsys):
    """Run a command; returns its status and what it has printed."""

    def run(command, *paths):
        status = main(["checkpoint", command, *map(str, paths)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_show_lists_checkpoints_and_what_is_in_one(tmp_path, ask):
    for step in (3, 12):
        path = checkpoint.save(tmp_path, {"model/w": np.ones((2, 3), "f")}, step=step,
                               metadata={"epoch": step})  # fmt: skip
    status, text = ask("show", tmp_path)
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["step-000003", "step-000012"]
    status, text = ask("show", path)
    assert status == 0
    assert "model/w  float32   [2, 3]" in text
    assert "metadata\n  {'epoch': 12}" in text
    assert ask("show", tmp_path / "latest") == (0, text)
    assert f"{SHARD}, " in text


def test_show_as_json(tmp_path, ask):
    for step in (3, 12):
        path = checkpoint.save(tmp_path, {"model/w": np.ones((2, 3), "f")}, step=step,
                               metadata={"epoch": step})  # fmt: skip
    _, text = ask("show", tmp_path, "--json")
    listed = json.loads(text)["checkpoints"]
    assert [one["name"] for one in listed] == ["step-000003", "step-000012"]
    _, text = ask("show", path, "--json")
    shown = json.loads(text)
    assert ask("show", tmp_path / "latest", "--json") == (0, text)
    assert shown.items() >= (listed[1].items() - {("name", "step-000012")})
    assert (shown["step"], shown["ranks"], shown["metric"], shown["arrays"]) == (12, 1, None, 1)
    assert shown["bytes"] == sum(shown["files"].values()) > 0
    assert shown["tensors"] == {"model/w": {"dtype": "float32", "shape": [2, 3], "slices": 1}}
    assert shown["metadata"] == {"epoch": 12}


def test_names_do_not_move_the_cursor(tmp_path, ask):
    path = checkpoint.save(tmp_path, {"a\x1b[2J\nb": np.ones(1)}, step=1)
    _, text = ask("show", path)
    assert r"a\x1b[2J\nb" in text


def test_verify_names_what_is_damaged(tmp_path, ask):
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, {"w": np.ones(5)}, step=step)
    assert ask("verify", tmp_path) == (
        0, "".join(f"{tmp_path}/step-00000{n}: ok\n" for n in (1, 2, 3)))  # fmt: skip
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)
    (tmp_path / "step-000002" / SHARD).unlink()
    status, text = ask("verify", tmp_path)
    first, second, third = text.splitlines()
    assert status == 1
    assert first.endswith(": ok")
    assert "no such file" in second
    assert "checksum differs" in third
    assert "tensor: w" in third
    assert ask("verify", path)[0] == 1


def test_diff_says_in_what_two_differ(tmp_path, ask):
    one = checkpoint.save(tmp_path / "a", tensors_of(1), step=1, metadata={"m": [1, {"x": 2}]})
    same = checkpoint.save(tmp_path / "b", tensors_of(1), step=1, metadata={"m": [1, {"x": 2}]})
    assert ask("diff", one, tmp_path / "b") == (0, "")
    assert ask("diff", one, same) == (0, "")
    changed = tensors_of(1)
    changed["layer/bfloat16"][0, 0] += ml_dtypes.bfloat16(2)
    changed["nan and inf"][3] = 0.0  # was -0.0
    changed["step"] = np.array([1])
    del changed["all bits"]
    other = checkpoint.save(tmp_path / "c", changed, step=2, metadata={"m": [1, {"x": 3}]})
    status, text = ask("diff", one, other)
    assert status == 1
    assert text.splitlines() == [
        "step: 1 and 2",
        "layer/bfloat16: 1 of 15 elements differ, by 2 at most",
        "all bits: only in the first",
        "nan and inf: 1 of 5 elements differ, by 0 at most",
        "step: int64 [] and int64 [1]",
        "metadata/m/1/x: 2 and 3",
    ]


@pytest.mark.parametrize("command", ["show", "verify"])
def test_where_nothing_is_there_the_status_is_2(tmp_path, ask, command):
    status, text = ask(command, tmp_path)
    assert status == 2
    assert "list_steps: no checkpoint" in text
    status, text = ask(command, tmp_path / "missing")
    assert status == 2
    assert "list_steps: no such file" in text
    assert ask("diff", tmp_path, tmp_path)[0] == 2
