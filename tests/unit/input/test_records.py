"""TFRecord files: the frame to the byte, damage of every kind, and what is checked first."""

import gzip
import struct
import sys
import textwrap
import tracemalloc
import zlib

import pytest

from launcher import run
from strategies.errors import DataLossError, InvalidArgumentError, OutOfRangeError
from strategies.input.readers import TFRecordReader
from strategies.input.records import TFRecordWriter, frame
from strategies.queues.queue_types import FIFOQueue

EMPTY = bytes.fromhex("0000000000000000 29039807 d8ea82a2")
ABC = bytes.fromhex("0300000000000000 b099490e 616263 6e57f121")


def queue_of(*paths):
    queue = FIFOQueue(-1, str, [()])
    queue.enqueue_many(([str(path) for path in paths],))
    queue.close()
    return queue


def read_all(reader, *paths):
    queue, pairs = queue_of(*paths), []
    while True:
        try:
            keys, values = reader.read_up_to(queue, 3)
        except OutOfRangeError:
            return pairs
        pairs += zip(keys, values, strict=True)


def header(length):
    """A header whose checksum is right."""
    return frame_of_length(length)[:12]


def frame_of_length(length):
    packed = struct.pack("<Q", length)
    return packed + frame(packed)[-4:]  # which ends with the checksum of its data


def test_frame():
    assert frame(b"") == EMPTY
    assert frame(b"abc") == ABC


def test_keys_are_offsets(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(EMPTY + ABC + EMPTY)
    assert read_all(TFRecordReader(), path) == [
        (f"{path}:0", b""),
        (f"{path}:16", b"abc"),
        (f"{path}:35", b""),
    ]
    path.write_bytes(b"")
    assert read_all(TFRecordReader(), path) == []


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB", None])
def test_round_trip(tmp_path, compression):
    path = tmp_path / ("file.gz" if compression is None else "file")
    values = [b"x" * n for n in (0, 1, 100_000, 3)] + [bytes(range(256)) * 1000]
    with TFRecordWriter(path, compression) as writer:
        for value in values[:3]:
            writer.write(value)
        writer.flush()
        reader = TFRecordReader(compression=compression)
        queue = queue_of(path)
        assert [reader.read(queue)[1] for _ in range(3)] == values[:3]
        reader.reset()
        writer.write(bytearray(values[3]))
        writer.write(memoryview(values[4]))
    writer.close()
    got = read_all(TFRecordReader(compression=compression), path)
    assert [value for _, value in got] == values
    data = path.read_bytes()
    assert (data[:2] == b"\x1f\x8b") == (compression in ("GZIP", None))
    if compression == "GZIP":
        assert b"".join(map(frame, values)) == gzip.decompress(data)
    if compression == "ZLIB":
        assert b"".join(map(frame, values)) == zlib.decompress(data)


def test_writing(tmp_path):
    writer = TFRecordWriter(tmp_path / "file")
    with pytest.raises(TypeError, match="bytes"):
        writer.write("text")
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"")
    with pytest.raises(ValueError, match="compression"):
        TFRecordWriter(tmp_path / "file", "zip")
    with pytest.raises(ValueError, match="compression"):
        TFRecordReader(compression="gzip")
    with pytest.raises(OSError, match="none"):
        TFRecordWriter(tmp_path / "none" / "file")
    with pytest.raises(InvalidArgumentError):
        TFRecordReader(max_record_bytes=0)
    with TFRecordWriter(tmp_path / "same.gz") as one, TFRecordWriter(tmp_path / "too.gz") as two:
        one.write(b"abc")
        two.write(b"abc")
    assert (tmp_path / "same.gz").read_bytes() == (tmp_path / "too.gz").read_bytes()


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (0, "record at 0: checksum of its length, .*; is this a TFRecord file"),
        (9, "record at 0: checksum of its length"),
        (16, "record at 16: checksum of its length, expected 0x.*, got 0x"),
        (28, "record at 16: checksum of its data, expected 0x.*, got 0x"),
        (31, "record at 16: checksum of its data"),
    ],
)
def test_corrupted(tmp_path, at, what):
    path = tmp_path / "file"
    data = bytearray(EMPTY + ABC + EMPTY)
    data[at] ^= 1
    path.write_bytes(data)
    reader, queue = TFRecordReader(), queue_of(path)
    if at >= 16:
        assert reader.read(queue)[1] == b""
    with pytest.raises(DataLossError, match=what) as caught:
        reader.read(queue)
    assert str(path) in str(caught.value)
    with pytest.raises(OutOfRangeError):
        reader.read(queue)


@pytest.mark.parametrize("compression", ["", "ZLIB"])
def test_cut_everywhere(tmp_path, compression, caplog):
    data = EMPTY + ABC
    for size in range(len(data)):
        path = tmp_path / f"file-{size}"
        cut = data[:size]
        path.write_bytes(zlib.compress(cut) if compression else cut)
        reader, queue = TFRecordReader(compression=compression), queue_of(path)
        caplog.clear()
        if size >= 16:
            assert reader.read(queue)[1] == b""
        whole_header = 12 <= size < 16 or size >= 28
        with pytest.raises(DataLossError if whole_header else OutOfRangeError) as caught:
            reader.read(queue)
        where = f"truncated record at {min(size // 16, 1) * 16}"
        assert (where in str(caught.value)) == whole_header
        assert ("too few for a header" in caplog.text) == (size % 16 > 0 and not whole_header)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_wrong_compression(tmp_path, compression):
    path = tmp_path / "file"
    path.write_bytes(ABC)
    with pytest.raises(DataLossError, match="compressed file is damaged"):
        read_all(TFRecordReader(compression=compression), path)
    with TFRecordWriter(path, compression) as writer:
        writer.write(b"abc" * 10)
    with pytest.raises(DataLossError, match="packed as you say"):
        read_all(TFRecordReader(), path)


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("length", [2**63, 2**40, (16 << 20) + 1, 16 << 20])
def test_a_length_is_checked_before_memory_is_taken(tmp_path, length, compression):
    path = tmp_path / "file"
    data = header(length) + b"x" * 1000
    path.write_bytes(gzip.compress(data) if compression else data)
    reader = TFRecordReader(compression=compression)
    tracemalloc.start()
    try:
        with pytest.raises(DataLossError, match="truncated|max_record_bytes"):
            reader.read(queue_of(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (20 << 20 if compression and length == 16 << 20 else 2 << 20)


def test_skipping_damage(tmp_path, caplog):
    bad = bytearray(ABC)
    bad[12] ^= 1
    worse = bytearray(ABC)
    worse[0] ^= 1
    long = frame(b"long" * 100)
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(EMPTY + bad + ABC + long + bad + ABC + worse + ABC)
    two.write_bytes(ABC + ABC[:-1])
    reader = TFRecordReader(on_damage="skip", max_record_bytes=100)
    got = read_all(reader, one, two)
    assert [value for _, value in got] == [b"", b"abc", b"abc", b"abc"]
    assert reader.num_skipped() == 5
    assert reader.num_records_produced() == 4
    assert reader.num_work_units_completed() == 2
    assert caplog.text.count("skipped") == 2
    assert "record at 16" in caplog.text
    with pytest.raises(DataLossError, match="record at 16: checksum of its data"):
        read_all(TFRecordReader(max_record_bytes=100), one)
    long_alone = tmp_path / "long"
    long_alone.write_bytes(long)
    with pytest.raises(DataLossError, match="400 bytes, more than max_record_bytes = 100"):
        read_all(TFRecordReader(max_record_bytes=100), long_alone)
    packed = tmp_path / "long.gz"
    packed.write_bytes(gzip.compress(long + ABC + header(10**15)))
    reader.reset()
    assert [value for _, value in read_all(reader, packed)] == [b"abc"]
    assert reader.num_skipped() == 3  # the last is first too long, and then cut


def test_what_to_do_without_the_library(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(ABC)
    program = """
        import sys
        sys.modules["google_crc32c"] = None
        from strategies.input.readers import TFRecordReader
        from strategies.input.records import TFRecordWriter
        from strategies.queues.queue_types import FIFOQueue
        path = sys.argv[1]
        reader, queue = TFRecordReader(), FIFOQueue(1, str, [()])
        queue.enqueue((path,))
        for call in (lambda: reader.read(queue), lambda: TFRecordWriter(path)):
            try:
                call()
            except ImportError as error:
                print(error)
        del sys.modules["google_crc32c"]
        print(reader.read(queue)[1])  # nothing is lost
    """
    result = run([sys.executable, "-c", textwrap.dedent(program), path], timeout=60).checked()
    assert result.stdout.count("pip install google-crc32c") == 2
    assert result.stdout.endswith("b'abc'\n")
    assert path.read_bytes() == ABC
