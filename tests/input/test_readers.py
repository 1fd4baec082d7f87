"""Readers: from file names in a queue to lines."""

from __future__ import annotations

import gzip
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from strategies.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    UnknownError,
)
from strategies.input.queues import FIFOQueue
from strategies.input.readers import TextLineReader

LIMIT = 20.0


def names_queue(*names, closed=True):
    queue = FIFOQueue(-1, str, [()])
    queue.enqueue_many(([str(name) for name in names],))
    if closed:
        queue.close()
    return queue


def write(path, data):
    path.write_bytes(data)
    return path


def read_all(reader, queue):
    pairs = []
    while True:
        try:
            pairs.append(reader.read(queue))
        except OutOfRangeError:
            return pairs


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_of_several_files(tmp_path, end):
    one = write(tmp_path / "one", end.join([b"a", b"", "ä b".encode()]) + end)
    two = write(tmp_path / "two", b"no end")
    empty = write(tmp_path / "empty", b"")
    reader = TextLineReader()
    pairs = read_all(reader, names_queue(one, empty, two))
    assert pairs == [
        (f"{one}:1", "a"),
        (f"{one}:2", ""),
        (f"{one}:3", "ä b"),
        (f"{two}:1", "no end"),
    ]
    assert reader.num_records_produced() == 4
    assert reader.num_work_units_completed() == 3


def test_only_the_end_of_a_line_is_cut(tmp_path):
    path = write(tmp_path / "file", b"\r\r\n a\rb \n\r")
    assert [line for _, line in read_all(TextLineReader(), names_queue(path))] == [
        "\r",
        " a\rb ",
        "\r",
    ]


def test_header_lines_are_skipped_and_counted(tmp_path):
    paths = [write(tmp_path / str(n), b"head\n" + b"x\n" * n) for n in (0, 2)]
    empty = write(tmp_path / "empty", b"")
    pairs = read_all(TextLineReader(1), names_queue(*paths, empty))
    assert pairs == [(f"{paths[1]}:2", "x"), (f"{paths[1]}:3", "x")]
    assert read_all(TextLineReader(5), names_queue(*paths)) == []
    with pytest.raises(InvalidArgumentError):
        TextLineReader(-1)
    with pytest.raises(InvalidArgumentError):
        TextLineReader(max_record_bytes=0)


def test_read_up_to_stays_in_one_file(tmp_path):
    four, two = write(tmp_path / "4", b"a\nb\nc\nd\n"), write(tmp_path / "2", b"e\nf\n")
    reader, queue = TextLineReader(), names_queue(four, two)
    got = [reader.read_up_to(queue, 3) for _ in range(3)]
    assert [values for _, values in got] == [["a", "b", "c"], ["d"], ["e", "f"]]
    assert got[1][0] == [f"{four}:4"]
    assert reader.num_work_units_completed() == 1  # the end of the last is not met yet
    with pytest.raises(OutOfRangeError):
        reader.read_up_to(queue, 3)
    assert reader.num_work_units_completed() == 2
    with pytest.raises(ValueError, match="at least 1"):
        reader.read_up_to(queue, 0)


def test_gzip(tmp_path):
    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    assert read_all(TextLineReader(), names_queue(path)) == [(f"{path}:1", "a"), (f"{path}:2", "b")]


def test_missing_file_is_consumed(tmp_path):
    good = write(tmp_path / "good", b"a\n")
    reader, queue = TextLineReader(), names_queue(tmp_path / "none", tmp_path, good)
    with pytest.raises(NotFoundError, match="none"):
        reader.read(queue)
    with pytest.raises(UnknownError, match="directory"):
        reader.read(queue)
    assert read_all(reader, queue) == [(f"{good}:1", "a")]


def test_damage_comes_after_what_precedes_it(tmp_path):
    bad = write(tmp_path / "bad", b"a\nb\n\xff\xfe\nc\n")
    good = write(tmp_path / "good", b"d\n")
    reader, queue = TextLineReader(), names_queue(bad, good)
    assert reader.read_up_to(queue, 100)[1] == ["a", "b"]
    with pytest.raises(DataLossError, match=r"UTF-8.*bad:3\)"):
        reader.read_up_to(queue, 100)
    assert reader.read_up_to(queue, 100)[1] == ["d"]


def test_a_line_has_a_limit(tmp_path):
    fits = write(tmp_path / "fits", b"12345678\r\n12345678\n12345678")
    long = write(tmp_path / "long", b"1\n" + b"123456789\n")
    endless = write(tmp_path / "endless", b"x" * 1000)
    header = write(tmp_path / "header", b"x" * 1000 + b"\n1\n")
    reader = TextLineReader(max_record_bytes=8)
    assert len(read_all(reader, names_queue(fits))) == 3
    queue = names_queue(long, endless, header)
    assert reader.read(queue)[1] == "1"
    for where in ("long:2", "endless:1", "header:1"):
        with pytest.raises(DataLossError, match=f"longer than 8 bytes .*{where}"):
            reader.read(queue)


def test_a_bomb_takes_no_memory(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(DataLossError, match="bomb.gz:1"):
            TextLineReader(max_record_bytes=1 << 20).read(names_queue(path))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", ["cut", "flip", "garbage", "checksum"])
def test_damaged_gzip(tmp_path, damage):
    packed = bytearray(gzip.compress(b"\n".join(b"line %d" % n for n in range(5000))))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flip":
        packed[len(packed) // 2] ^= 0xFF
    elif damage == "garbage":
        packed[:2] = b"no"
    else:
        packed[-8] ^= 0xFF
    path = write(tmp_path / "bad.gz", bytes(packed))
    reader, queue = TextLineReader(), names_queue(path)
    lines = []

    def read_on():
        while True:
            lines.extend(reader.read_up_to(queue, 100)[1])

    with pytest.raises(DataLossError, match=r"bad.gz:\d+\)"):
        read_on()
    # A flipped bit may change lines before the checksum tells.
    assert len(lines) <= 5000
    if damage == "cut":
        assert lines == [f"line {n}" for n in range(len(lines))]
        assert lines


@pytest.mark.parametrize(
    ("dtypes", "options"),
    [("int32", {}), ([str, str], {}), (str, {"shapes": [(1,)]}), (str, {"names": ["file"]})],
)
def test_queue_must_hold_single_strings(dtypes, options):
    with pytest.raises(InvalidArgumentError, match="exactly one component"):
        TextLineReader().read(FIFOQueue(1, dtypes, **options))


def test_unshaped_queue_must_hold_single_strings():
    queue = FIFOQueue(1, str)
    queue.enqueue((["a", "b"],))
    with pytest.raises(InvalidArgumentError, match="single string"):
        TextLineReader().read(queue)


def test_reset_drops_the_open_file(tmp_path):
    path = write(tmp_path / "file", b"a\nb\n")
    reader, queue = TextLineReader(), names_queue(path, path)
    before = open_files()
    reader.read(queue)
    assert open_files() == before + 1
    reader.reset()
    assert open_files() == before
    assert reader.num_records_produced() == 0
    assert reader.read(queue) == (f"{path}:1", "a")
    reader.reset()
    reader.reset()


def test_files_are_closed_at_their_end_and_at_damage(tmp_path):
    good, bad = write(tmp_path / "good", b"a\n"), write(tmp_path / "bad", b"\xff\n")
    before = open_files()
    reader, queue = TextLineReader(), names_queue(good, bad)
    assert reader.read(queue)[1] == "a"
    with pytest.raises(DataLossError):
        reader.read(queue)
    assert open_files() == before


def test_parallel_reads_of_one_reader(tmp_path):
    paths = [
        write(tmp_path / str(n), b"".join(b"%d-%d\n" % (n, k) for k in range(20)))
        for n in range(10)
    ]
    reader, queue = TextLineReader(), names_queue(*paths)
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(read_all, reader, queue) for _ in range(10)]
        lines = [line for future in futures for _, line in future.result(LIMIT)]
    assert sorted(lines) == sorted(f"{n}-{k}" for n in range(10) for k in range(20))
    assert reader.num_records_produced() == 200


def test_readers_blocked_on_their_queues_block_nobody(tmp_path):
    """25 readers wait, each for a queue of its own; the queues are filled from the same pool."""
    path = write(tmp_path / "file", b"x\n")
    queues = [names_queue(closed=False) for _ in range(25)]
    with ThreadPoolExecutor(26) as pool:
        reads = [pool.submit(TextLineReader().read, queue) for queue in queues]
        for queue in queues:
            pool.submit(queue.enqueue, str(path)).result(LIMIT)
        assert [read.result(LIMIT)[1] for read in reads] == ["x"] * 25


def test_reset_does_not_wait_for_a_blocked_read(tmp_path):
    path = write(tmp_path / "file", b"a\nb\n")
    reader = TextLineReader()
    asked = threading.Event()

    class Queue(FIFOQueue):
        def dequeue(self, **options):
            asked.set()
            return super().dequeue(**options)

    queue = Queue(5, str, [()])
    with ThreadPoolExecutor(2) as pool:
        read = pool.submit(reader.read, queue)
        assert asked.wait(LIMIT)
        pool.submit(reader.reset).result(LIMIT)
        queue.enqueue(str(path))
        assert read.result(LIMIT) == (f"{path}:1", "a")
        queue.close()
    assert read_all(reader, queue) == [(f"{path}:2", "b")]
