"""Limits of waits start again when code has been compiled, and at no other time."""

import os

import pytest

import limits


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, {9: 1, 10: 0, 30: 0}),
        ({"loop.0123.o": 8}, {9: 1, 10: 8, 17: 1, 18: 0}),
        ({"deep/loop.nbc": 8, "loop.o": 17}, {10: 8, 18: 9, 27: 0}),
        ({"loop.o": 8, "late.o": 19}, {10: 8, 18: 0, 20: 9}),
        ({"older.o": -5, "of a wrong clock.o": 500, "text.py": 8}, {10: 0, 30: 0}),
    ],
    ids=["nothing", "once", "twice", "too late", "other files"],
)
def test_a_limit_of_10_seconds_starts_again_with_compiled_code(files, left, tmp_path, monkeypatch):
    start = 1e9
    clock = [start]
    monkeypatch.setattr(limits.time, "time", lambda: clock[0])
    monkeypatch.setattr(limits, "_OF_JAX", (tmp_path, "no such file"))
    limit = limits.Limit(10, str(tmp_path))
    for name, written in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (start + written, start + written))
    for now, seconds in left.items():
        clock[0] = start + now
        assert limit.left() == seconds, now
