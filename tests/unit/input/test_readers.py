"""Readers: from file names in a queue to records of all formats but TFRecord."""

import gc
import gzip
import json
import os
import sys
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from strategies.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    UnknownError,
)
from strategies.input.reader import Reader
from strategies.input.readers import (
    FixedLengthRecordReader,
    IdentityReader,
    TextLineReader,
    TFRecordReader,
    WholeFileReader,
)
from strategies.input.records import TFRecordWriter
from strategies.queues.queue_types import FIFOQueue

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
    gc.collect()  # readers that other tests left with an open file
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


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [65_534, 65_535, 65_536, 131_072, 200_000])
@pytest.mark.parametrize(
    "before", [b"", b"x\n", b"x\n" * 40_000], ids=["first", "after a line", "after many"]
)
def test_lines_around_the_pieces_that_are_read(tmp_path, end, size, before):
    path = write(tmp_path / "file", before + b"y" * size + end + (b"z" if end else b""))
    for limit, fits in ((size - 1, False), (size, True), (size + 1, True)):
        reader = TextLineReader(max_record_bytes=limit, on_damage="skip")
        lines = [line for _, line in read_all(reader, names_queue(path))]
        expected = ["x"] * (len(before) // 2) + ["y" * size] * fits + ["z"] * bool(end)
        assert lines == expected
        assert reader.num_skipped() == (not fits)


def test_an_endless_line_ends_at_the_limit():
    with pytest.raises(DataLossError, match="zero:1"):
        TextLineReader(max_record_bytes=100_000).read(names_queue("/dev/zero"))


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


# Fixed length.


def pack(data, compression):
    return {"": bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}[compression](data)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("hop", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("footer", [0, 2])
@pytest.mark.parametrize("header", [0, 5])
def test_fixed_length(tmp_path, compression, hop, footer, header):
    record = 3
    reader = FixedLengthRecordReader(
        record, header_bytes=header, footer_bytes=footer, hop_bytes=hop, compression=compression
    )
    for size in range(30):
        body = bytes(range(size))
        path = write(tmp_path / f"{size}", pack(b"H" * header + body + b"F" * footer, compression))
        starts = range(0, max(0, size - record + 1), hop or record)
        expected = [
            (f"{path}:{number}", body[start : start + record])
            for number, start in enumerate(starts)
        ]
        assert read_all(reader, names_queue(path)) == expected


def test_fixed_length_of_one_file_after_the_other(tmp_path):
    one, two = write(tmp_path / "one", b"aabbc"), write(tmp_path / "two", b"dd")
    short = write(tmp_path / "short", b"x")
    reader = FixedLengthRecordReader(2)
    assert [v for _, v in read_all(reader, names_queue(one, short, two))] == [b"aa", b"bb", b"dd"]
    assert reader.num_records_produced() == 3
    assert reader.num_work_units_completed() == 3
    with_header = FixedLengthRecordReader(2, header_bytes=3)
    queue = names_queue(two, one)
    with pytest.raises(DataLossError, match="ends 1 bytes before the end of its header .*two"):
        with_header.read(queue)
    assert with_header.read(queue)[1] == b"bc"


@pytest.mark.parametrize(
    "options",
    [
        {"record_bytes": 0},
        {"record_bytes": -1},
        {"record_bytes": 1, "header_bytes": -1},
        {"record_bytes": 1, "footer_bytes": -1},
        {"record_bytes": 1, "hop_bytes": -1},
    ],
)
def test_fixed_length_arguments(options):
    with pytest.raises(InvalidArgumentError):
        FixedLengthRecordReader(**options)


# Whole files, and names.


def test_whole_files(tmp_path):
    one, empty = write(tmp_path / "one", b"some\0 contents\n"), write(tmp_path / "empty", b"")
    packed = write(tmp_path / "packed.gz", gzip.compress(b"contents"))
    reader = WholeFileReader()
    assert read_all(reader, names_queue(one, empty, packed)) == [
        (str(one), b"some\0 contents\n"),
        (str(empty), b""),
        (str(packed), b"contents"),
    ]
    assert reader.num_work_units_completed() == 3
    raw = WholeFileReader(compression="")
    assert raw.read(names_queue(packed))[1] == packed.read_bytes()


@pytest.mark.parametrize("name", ["long", "long.gz"])
def test_a_whole_file_has_a_limit(tmp_path, name):
    data = bytes(64 << 20)
    path = write(tmp_path / name, gzip.compress(data, 1) if name.endswith("gz") else data)
    del data
    tracemalloc.start()
    try:
        with pytest.raises(DataLossError, match="max_record_bytes = 1048576"):
            WholeFileReader(max_record_bytes=1 << 20).read(names_queue(path))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    fits = write(tmp_path / "fits", b"12345678")
    assert WholeFileReader(max_record_bytes=8).read(names_queue(fits))[1] == b"12345678"
    with pytest.raises(DataLossError):
        WholeFileReader(max_record_bytes=7).read(names_queue(fits))
    with pytest.raises(InvalidArgumentError):
        WholeFileReader(max_record_bytes=0)


def test_names_are_their_own_records():
    reader, queue = IdentityReader(), names_queue("A", "B", "C")
    assert read_all(reader, queue) == [("A", "A"), ("B", "B"), ("C", "C")]
    assert (reader.num_records_produced(), reader.num_work_units_completed()) == (3, 3)
    reader.reset()
    assert (reader.num_records_produced(), reader.num_work_units_completed()) == (0, 0)


# Damage.


def test_skipping_damaged_lines(tmp_path, caplog):
    lines = [b"good", b"\xff", b"x" * 100_000, b"good", b"12345678", b"123456789", b"last"]
    plain = write(tmp_path / "plain", b"\r\n".join(lines))
    cut = write(tmp_path / "cut.gz", gzip.compress(b"good\n" * 10)[:-6])
    fine = write(tmp_path / "fine", b"good\n")
    reader = TextLineReader(max_record_bytes=8, on_damage="skip")
    pairs = read_all(reader, names_queue(plain, cut, fine))
    by_file = [
        [key for key, _ in pairs if key.startswith(str(path))] for path in (plain, cut, fine)
    ]
    assert by_file[0] == [f"{plain}:{number}" for number in (1, 4, 5, 7)]
    assert len(by_file[1]) == 10
    assert len(by_file[2]) == 1
    assert reader.num_skipped() == 4
    assert caplog.text.count("skipped") == 2  # once per file
    with pytest.raises(ValueError, match="on_damage"):
        TextLineReader(on_damage="ignore")
    with pytest.raises(DataLossError, match=r"not UTF-8: .*; `encoding=` names .*plain:2\)"):
        read_all(TextLineReader(), names_queue(plain))


@pytest.mark.parametrize("name", ["utf-16", "utf-32", "hex", "no such"])
def test_encodings_without_lines_are_refused(name):
    with pytest.raises(ValueError, match=f"bad encoding, expected .* got '{name}'"):
        TextLineReader(encoding=name)


def test_the_length_of_a_joined_record_is_limited(tmp_path):
    path = write(tmp_path / "open", b'"a\nb\nc\nd\ne",1\nf,2\n')
    long, short = (TextLineReader(field_delim=",", max_record_bytes=n) for n in (13, 12))
    assert read_all(long, names_queue(path)) == [
        (f"{path}:1", '"a\nb\nc\nd\ne",1'), (f"{path}:6", "f,2"),
    ]  # fmt: skip
    assert [line for _, line in read_all(short, names_queue(path))][:3] == ['"a', "b", "c"]


def test_a_missing_file_is_not_skipped(tmp_path):
    good = write(tmp_path / "good", b"a\n")
    reader, queue = TextLineReader(on_damage="skip"), names_queue(tmp_path / "none", good)
    with pytest.raises(NotFoundError):
        reader.read(queue)
    assert reader.read(queue)[1] == "a"


# Positions.


def make_files(folder):
    """Four files for each kind of reader, some of them damaged in the middle."""
    lines = write(folder / "lines", b"head\n" + b"".join(b"%d\n" % n for n in range(5)))
    bad = write(folder / "bad.gz", gzip.compress(b"head\n1\n\xff\n2\n\xff\n")[:-3])
    return [lines, write(folder / "empty", b""), bad, lines]


def make_reader(kind):
    return {
        "text": lambda: TextLineReader(1, on_damage="skip"),
        "fixed": lambda: FixedLengthRecordReader(2, compression=None, on_damage="skip"),
        "whole": lambda: WholeFileReader(on_damage="skip"),
        "identity": IdentityReader,
    }[kind]()


@pytest.mark.parametrize("kind", ["text", "fixed", "whole", "identity"])
@pytest.mark.parametrize("count", [1, 3])
def test_continuing_from_any_position(tmp_path, kind, count):
    files = make_files(tmp_path)

    def batches(reader, queue, most=1000):
        got = []
        while len(got) < most:
            try:
                got.append(reader.read_up_to(queue, count))
            except OutOfRangeError:
                break
        return got

    whole = make_reader(kind)
    expected = batches(whole, names_queue(*files))
    assert len(expected) >= 3
    for stop in range(len(expected) + 1):
        first, queue = make_reader(kind), names_queue(*files)
        got = batches(first, queue, stop)
        state = json.loads(json.dumps(first.state_dict()))
        first.reset()
        second = make_reader(kind)
        second.load_state_dict(state)
        assert second.state_dict() == state
        got += batches(second, queue)
        assert got == expected
        for count_of in ("num_records_produced", "num_work_units_completed", "num_skipped"):
            assert getattr(second, count_of)() == getattr(whole, count_of)()


def test_a_position_before_an_error_leads_to_the_error(tmp_path):
    bad = write(tmp_path / "bad", b"a\nb\n\xff\nc\n")
    reader = TextLineReader()
    assert reader.read_up_to(names_queue(bad), 10)[1] == ["a", "b"]
    state = reader.state_dict()
    for twin in (reader, TextLineReader()):
        twin.load_state_dict(state)
        queue = names_queue()
        with pytest.raises(DataLossError, match="bad:3"):
            twin.read(queue)
        with pytest.raises(OutOfRangeError):
            twin.read(queue)


def test_a_position_in_a_file_that_has_changed(tmp_path):
    path = write(tmp_path / "file", b"a\nb\nc\n")
    reader = TextLineReader()
    reader.read_up_to(names_queue(path), 2)
    state = reader.state_dict()
    write(path, b"a\n")
    reader.load_state_dict(state)
    with pytest.raises(DataLossError, match="expected at least 2, got 1"):
        reader.read(names_queue())
    path.unlink()
    reader.load_state_dict(state)
    with pytest.raises(NotFoundError):
        reader.read(names_queue())


@pytest.mark.parametrize(
    "change",
    [
        {"reader": "WholeFileReader"},
        {"work": 7},
        {"records": -1},
        {"records": 1.0},
        {"records": sys.maxsize + 1},
        {"produced": 10**30},
        {"produced": None},
        {"skipped": True},
        {"more": 1},
    ],
)
def test_what_is_no_state(tmp_path, change):
    path = write(tmp_path / "file", b"a\nb\n")
    reader, queue = TextLineReader(), names_queue(path)
    reader.read(queue)
    state = reader.state_dict()
    for wrong in ({**state, **change}, {}, None, b"garbage", list(state)):
        with pytest.raises(InvalidArgumentError, match="could not parse state of a TextLineReader"):
            reader.load_state_dict(wrong)
        assert reader.num_records_produced() == 0
        with pytest.raises(OutOfRangeError):
            reader.read(queue)


def test_a_position_and_a_count_as_great_as_can_be(tmp_path):
    queue = names_queue(write(tmp_path / "file", b"a\nb\n"))
    reader = TextLineReader()
    assert reader.read_up_to(queue, 1 << 70)[1] == ["a", "b"]
    reader.load_state_dict({**reader.state_dict(), "records": sys.maxsize})
    with pytest.raises(DataLossError, match=f"expected at least {sys.maxsize}, got 2"):
        reader.read(queue)


def test_an_interrupted_read_loses_nothing(tmp_path):
    interrupts = [KeyboardInterrupt]

    class Interrupted(Reader):
        def _open(self, work):
            yield from ((work, "a"), (work, "b"))
            if interrupts:
                raise interrupts.pop()
            yield from ((work, "c"), (work, "d"))

    reader, queue = Interrupted(), names_queue("file")
    assert reader.read(queue)[1] == "a"
    with pytest.raises(KeyboardInterrupt):
        reader.read_up_to(queue, 3)
    assert reader.read_up_to(queue, 9)[1] == ["b", "c", "d"]


def test_five_readers_share_files_of_records(tmp_path):
    """As in the chapter: shards written once, read by five readers in threads, each record once."""
    paths = []
    for shard in range(12):
        paths.append(str(tmp_path / f"train-{shard:02}.tfrecord"))
        with TFRecordWriter(paths[-1]) as writer:
            for number in range(50):
                writer.write(b"%d-%d" % (shard, number))
    queue = names_queue(*paths)
    readers = [TFRecordReader() for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(read_all, reader, queue) for reader in readers]
        values = [value for future in futures for _, value in future.result(LIMIT)]
    assert sorted(values) == sorted(b"%d-%d" % (s, n) for s in range(12) for n in range(50))
    assert sum(reader.num_work_units_completed() for reader in readers) == 12
