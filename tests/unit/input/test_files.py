"""Opening files: patterns, packed files of several kinds, URLs, and what can be wrong."""

import gzip
import os
import sys
import zlib
from pathlib import Path

import fsspec
import pytest

from strategies.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    UnknownError,
)
from strategies.input.files import match_files, open_source
from strategies.input.readers import TextLineReader, TFRecordReader, WholeFileReader
from strategies.input.records import TFRecordWriter
from strategies.queues.queue_types import FIFOQueue


def contents(path, compression=None, piece=-1):
    with open_source(str(path), compression, lambda: f"{path}:here") as source:
        data = b"".join(iter(lambda: source.file.read(piece), b""))
        assert source.size in (None, len(data))
        return data


def test_patterns(tmp_path):
    for name in ("b.csv", "a.csv", "c.txt", "x[1].csv", "deep/er/d.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "folder.csv").mkdir()

    def found(*patterns):
        listed = [str(tmp_path / pattern) for pattern in patterns]
        return [os.path.relpath(name, tmp_path) for name in match_files(listed)]

    assert found("*.csv") == ["a.csv", "b.csv", "x[1].csv"]
    assert found("b.csv", "?.csv", "c.txt") == ["b.csv", "a.csv", "c.txt"]
    assert found("x[1].csv") == ["x[1].csv"]
    assert found("[ab].csv") == ["a.csv", "b.csv"]
    assert found("**/*.csv") == ["a.csv", "b.csv", "deep/er/d.csv", "x[1].csv"]
    assert found("missing.csv") == ["missing.csv"]  # whoever opens it will say so
    assert match_files(Path("one")) == match_files("one") == ["one"]
    assert match_files([]) == []
    with pytest.raises(NotFoundError, match="no file matches .*none"):
        found("*.csv", "none*")


LINES = b"".join(b"line %d\n" % number for number in range(100_000))
GZIPPED, ZIPPED = gzip.compress(LINES), zlib.compress(LINES)
EMPTY = gzip.compress(b"")


@pytest.mark.parametrize("piece", [-1, 7777])
@pytest.mark.parametrize(
    ("packed", "compression"),
    [
        pytest.param(LINES, "", id="as it is"),
        pytest.param(GZIPPED, "GZIP", id="gzip"),
        pytest.param(
            gzip.compress(LINES[:100]) + EMPTY + gzip.compress(LINES[100:]), "GZIP", id="members"
        ),
        pytest.param(GZIPPED + b"\0" * 100_000, "GZIP", id="zeros at the end"),
        pytest.param(GZIPPED + b"\0" * 100_000 + EMPTY, "GZIP", id="zeros between members"),
        pytest.param(ZIPPED, "ZLIB", id="zlib"),
        pytest.param(zlib.compress(LINES, 0), "ZLIB", id="zlib, not compressed"),
    ],
)
def test_packed(tmp_path, packed, compression, piece):
    path = tmp_path / "file"
    path.write_bytes(packed)
    assert contents(path, compression, piece) == LINES


def test_the_name_tells_the_compression(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"text"))
    assert contents(path) == contents(path, "GZIP") == b"text"
    assert contents(path, "") == path.read_bytes()
    with pytest.raises(DataLossError):
        contents(path, "ZLIB")


@pytest.mark.parametrize(
    ("packed", "compression"),
    [
        pytest.param(b"", "GZIP", id="no gzip"),
        pytest.param(b"", "ZLIB", id="no zlib"),
        pytest.param(b"text", "GZIP", id="text"),
        pytest.param(GZIPPED[:-1], "GZIP", id="gzip cut"),
        pytest.param(GZIPPED[:9], "GZIP", id="gzip cut in its head"),
        pytest.param(GZIPPED + b"garbage", "GZIP", id="gzip and garbage"),
        pytest.param(GZIPPED + b"\0\0garbage", "GZIP", id="gzip, zeros and garbage"),
        pytest.param(ZIPPED + b"x", "ZLIB", id="zlib and garbage"),
        pytest.param(ZIPPED + ZIPPED, "ZLIB", id="zlib twice"),
        pytest.param(ZIPPED[:-1], "ZLIB", id="zlib cut"),
        pytest.param(ZIPPED[:-1] + b"\xff", "ZLIB", id="zlib, wrong sum"),
    ],
)
def test_packed_and_damaged(tmp_path, packed, compression):
    path = tmp_path / "file"
    path.write_bytes(packed)
    with pytest.raises(DataLossError, match="compressed file is damaged.*file:here"):
        contents(path, compression)


def test_what_precedes_damage_is_read(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(GZIPPED + b"garbage")
    got = []

    def read():
        with open_source(str(path), None, lambda: "here") as source:
            while line := source.file.readline():
                got.append(line)

    with pytest.raises(DataLossError, match="here"):
        read()
    assert b"".join(got) == LINES


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(NotFoundError, match="no such file .*none"):
        contents(tmp_path / "none")
    with pytest.raises(UnknownError, match="directory"):
        contents(tmp_path)
    with pytest.raises(InvalidArgumentError, match="null"):
        contents("a\0b")


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for call in (
        lambda: contents("memory://file"),
        lambda: match_files("memory://*.csv"),
        lambda: TFRecordWriter("memory://file"),
    ):
        with pytest.raises(ImportError, match="pip install"):
            call()


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def read_all(reader, *names):
    queue = FIFOQueue(-1, str, [()])
    queue.enqueue_many((list(names),))
    queue.close()
    values = []
    while True:
        try:
            values.append(reader.read(queue)[1])
        except OutOfRangeError:
            return values


def test_urls(memory):
    memory.pipe("/data/a.csv", b"1\n2\n")
    memory.pipe("/data/b.csv.gz", gzip.compress(b"3\n"))
    names = match_files(["memory://data/*.csv", "memory://data/*.gz"])
    assert names == ["memory:///data/a.csv", "memory:///data/b.csv.gz"]
    assert read_all(TextLineReader(), *names) == ["1", "2", "3"]
    assert read_all(WholeFileReader(), *names) == [b"1\n2\n", b"3\n"]
    for name in ("memory://records", "memory://records.gz"):
        with TFRecordWriter(name) as writer:
            writer.write(b"abc")
        assert read_all(TFRecordReader(), name) == [b"abc"]
    memory.pipe("/records", memory.cat("/records")[:-1])
    with pytest.raises(DataLossError, match="truncated record at 0"):
        read_all(TFRecordReader(), "memory://records")
    with pytest.raises(NotFoundError, match="memory://none"):
        read_all(TextLineReader(), "memory://none")
    with pytest.raises(NotFoundError, match="no file matches"):
        match_files("memory://none/*")
    with pytest.raises(InvalidArgumentError, match="unknown://"):
        read_all(TextLineReader(), "unknown://x")
